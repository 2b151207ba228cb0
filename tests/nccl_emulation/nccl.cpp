// See control.h. One lock guards everything.
#include <c10/cuda/CUDAStream.h>
#include <nccl.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "nccl_emulation/control.h"

namespace nccl_emulation {
namespace {

enum class Kind { send, receive, all_gather, broadcast, all_reduce };  // the last three are collectives

/// What one call adds to a kernel.
struct Part {
  Kind kind;
  int peer;  ///< or the root
  const char* from;
  char* to;
  std::size_t bytes;
  bool done = false;
};

struct Kernel {
  ncclComm* comm;
  std::vector<Part> parts;
  Stream* stream;
};

/// The ranks that share an id.
struct Clique {
  explicit Clique(int size) : ranks(static_cast<std::size_t>(size)), has_finalized(ranks.size()) {}
  std::vector<ncclComm*> ranks;  ///< null: not there
  std::vector<bool> has_finalized;
  bool met = false;  ///< all ranks were there once
};

enum class Stage { meeting, ready, beginning, finalizing, finalized };

}  // namespace

struct Stream {
  std::deque<Kernel> kernels;  ///< the first one runs
  std::uint64_t enqueued = 0, ended = 0;
};

struct Event {
  Stream* stream = nullptr;
  std::uint64_t after = 0;
};

}  // namespace nccl_emulation

using namespace nccl_emulation;

struct ncclComm {
  std::shared_ptr<Clique> clique;
  int rank;
  Faults faults;
  Stage stage = Stage::meeting;
  int questions_left;
  ncclResult_t error = ncclSuccess;
  std::vector<Kernel> accepted;  ///< not on their stream yet
  bool in_progress() const {
    return stage == Stage::meeting || stage == Stage::beginning || stage == Stage::finalizing;
  }
};

namespace nccl_emulation {
namespace {

struct World {
  std::mutex lock;
  std::condition_variable over;
  bool open = false;
  int hanging = 0, next_id = 0;
  std::map<int, Faults> faults;
  Counts counts;
  std::vector<std::string> misuses;
  std::map<std::string, std::shared_ptr<Clique>> cliques;
  std::set<ncclComm*> live;
  std::set<Stream*> streams;
} world;

using Locked = std::unique_lock<std::mutex>;

ncclResult_t misuse(const std::string& what) {
  world.misuses.push_back(what);
  return ncclInvalidUsage;
}

struct OwnStream {
  OwnStream() {
    const Locked locked(world.lock);
    world.streams.insert(&stream);
  }
  ~OwnStream() {
    const Locked locked(world.lock);
    world.streams.erase(&stream);
  }
  Stream stream;
};

Kernel* running(ncclComm* comm) {
  if (comm == nullptr) return nullptr;
  for (Stream* stream : world.streams)
    if (!stream->kernels.empty() && stream->kernels.front().comm == comm) return &stream->kernels.front();
  return nullptr;
}

/// A send meets the first receive that waits for it on the other rank, or on its own.
bool deliver(ncclComm* sender, Part& send) {
  Kernel* const kernel = running(sender->clique->ranks[static_cast<std::size_t>(send.peer)]);
  if (kernel == nullptr) return false;
  for (Part& part : kernel->parts)
    if (part.kind == Kind::receive && part.peer == sender->rank && !part.done) {
      if (part.bytes != send.bytes) misuse("a receive of another size than its send");
      std::memcpy(part.to, send.from, std::min(part.bytes, send.bytes));
      return send.done = part.done = true;
    }
  return false;
}

/// All ranks' kernels begin with a collective: they are carried out together.
bool collect(Clique& clique) {
  std::vector<Part*> parts;
  for (ncclComm* comm : clique.ranks) {
    Kernel* const kernel = running(comm);
    const bool fits =
        kernel != nullptr && !kernel->parts.front().done && kernel->parts.front().kind >= Kind::all_gather;
    if (!fits) return false;
    parts.push_back(&kernel->parts.front());
  }
  for (Part* part : parts) {
    if (part->kind != parts[0]->kind || part->bytes != parts[0]->bytes || part->peer != parts[0]->peer) {
      for (ncclComm* comm : clique.ranks) comm->error = ncclInvalidUsage;
      misuse("ranks take part in different collectives");
      return false;
    }
  }
  float sum = 0;  // an all_reduce is of one number, in place
  for (const Part* part : parts)
    if (part->kind == Kind::all_reduce) sum += *reinterpret_cast<const float*>(part->from);
  for (Part* part : parts) {
    if (part->kind == Kind::all_reduce) std::memcpy(part->to, &sum, sizeof(sum));
    if (part->kind == Kind::broadcast)
      std::memmove(part->to, parts[static_cast<std::size_t>(part->peer)]->from, part->bytes);
    for (std::size_t r = 0; part->kind == Kind::all_gather && r < parts.size(); ++r)
      std::memmove(part->to + r * part->bytes, parts[r]->from, part->bytes);
  }
  for (Part* part : parts) part->done = true;
  return true;
}

bool pop_ended() {
  bool any = false;
  for (Stream* stream : world.streams)
    while (!stream->kernels.empty()) {
      const auto& parts = stream->kernels.front().parts;
      if (!std::all_of(parts.begin(), parts.end(), [](const Part& part) { return part.done; })) break;
      stream->kernels.pop_front();
      ++stream->ended;
      any = true;
    }
  return any;
}

/// Does what can be done now on all streams.
void move_on() {
  for (bool any = true; any;) {
    any = false;
    for (ncclComm* comm : std::vector<ncclComm*>(world.live.begin(), world.live.end())) {
      Kernel* const kernel = running(comm);
      if (kernel == nullptr || comm->error != ncclSuccess) continue;
      for (Part& part : kernel->parts)
        if (part.kind == Kind::send && !part.done) any |= deliver(comm, part);
      any |= collect(*comm->clique);
    }
    any |= pop_ended();
  }
}

void enqueue(ncclComm* comm) {
  for (Kernel& kernel : comm->accepted) {
    ++kernel.stream->enqueued;
    kernel.stream->kernels.push_back(std::move(kernel));
  }
  comm->accepted.clear();
  comm->stage = Stage::ready;
  comm->error = comm->faults.state;
}

/// No rank still has something to say.
bool all_finalize(const Clique& clique) {
  for (std::size_t r = 0; r < clique.ranks.size(); ++r)
    if (!clique.has_finalized[r] && (clique.ranks[r] == nullptr || clique.ranks[r]->stage != Stage::finalizing))
      return false;
  return true;
}

void answer_question(ncclComm* comm) {
  if (comm->questions_left == kForever || --comm->questions_left > 0) return;
  if (comm->stage == Stage::meeting && comm->clique->met) comm->stage = Stage::ready;
  if (comm->stage == Stage::beginning) enqueue(comm);
  if (comm->stage == Stage::finalizing && all_finalize(*comm->clique)) {
    comm->stage = Stage::finalized;
    comm->clique->has_finalized[static_cast<std::size_t>(comm->rank)] = true;
  }
}

/// The communicator is gone, and its kernels end unfinished.
void forget(ncclComm* comm) {
  for (Stream* stream : world.streams) {
    const auto gone = std::remove_if(stream->kernels.begin(), stream->kernels.end(),
                                     [&](const Kernel& kernel) { return kernel.comm == comm; });
    stream->ended += static_cast<std::uint64_t>(stream->kernels.end() - gone);
    stream->kernels.erase(gone, stream->kernels.end());
  }
  comm->clique->ranks[static_cast<std::size_t>(comm->rank)] = nullptr;
  world.live.erase(comm);
  delete comm;
}

// ---------------------------------------------------------------- groups

thread_local int depth = 0;
thread_local std::vector<Kernel> group;

ncclResult_t add(ncclComm* comm, const Part& part, Stream* stream) {
  const Locked locked(world.lock);
  if (!world.live.contains(comm)) return misuse("a call of a communicator that is gone");
  if (comm->in_progress()) return misuse("a call before the one before it has ended");
  if (comm->stage == Stage::finalized) return misuse("a call after the communicator was finalized");
  if (depth == 0) return misuse("a call outside of a group");
  if (comm->faults.call_result != ncclSuccess) return comm->faults.call_result;
  for (Kernel& kernel : group)
    if (kernel.comm == comm) return kernel.parts.push_back(part), ncclSuccess;
  group.push_back({comm, {part}, stream});
  return ncclSuccess;
}

}  // namespace

// ---------------------------------------------------------------- Session

Session::Session() {
  const Locked locked(world.lock);
  if (std::exchange(world.open, true)) misuse("two sessions at once");
  world.faults.clear(), world.misuses.clear(), world.cliques.clear();
  world.counts = {};
}

Session::~Session() {
  Locked locked(world.lock);
  world.open = false;
  world.over.notify_all();
  world.over.wait(locked, [] { return world.hanging == 0; });
}

Faults& Session::faults(int rank) { return world.faults[rank]; }

Counts Session::counts() const {
  const Locked locked(world.lock);
  Counts counts = world.counts;
  counts.live = static_cast<int>(world.live.size());
  for (const Stream* stream : world.streams) counts.kernels += static_cast<int>(stream->kernels.size());
  return counts;
}

std::vector<std::string> Session::misuses() const {
  const Locked locked(world.lock);
  return world.misuses;
}

void Session::cut() {
  const Locked locked(world.lock);
  for (ncclComm* comm : world.live) comm->error = ncclRemoteError;
}

}  // namespace nccl_emulation

// ---------------------------------------------------------------- CUDA

cudaStream_t c10::cuda::CUDAStream::stream() const {
  thread_local OwnStream own;
  return &own.stream;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  const Locked locked(world.lock);
  ++world.counts.events;
  *event = new Event;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const Locked locked(world.lock);
  --world.counts.events;
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const Locked locked(world.lock);
  *event = {stream, stream->enqueued};
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  const Locked locked(world.lock);
  move_on();
  for (const Kernel& kernel : event->stream->kernels)
    if (kernel.comm->faults.event != cudaSuccess) return kernel.comm->faults.event;
  return event->stream->ended >= event->after ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorLaunchFailure ? "unspecified launch failure" : "emulated CUDA error";
}

// ---------------------------------------------------------------- NCCL

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  const Locked locked(world.lock);
  *id = {};
  const std::string name = "clique " + std::to_string(world.next_id++);
  std::memcpy(id->internal, name.data(), name.size());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  const Locked locked(world.lock);
  *comm = nullptr;
  if (config->blocking != 0) return misuse("a communicator that blocks");
  if (config->size != sizeof(ncclConfig_t) || config->magic != 0xcafebeef) return misuse("no initialized ncclConfig_t");
  const Faults faults = world.faults[rank];
  if (faults.meeting_result != ncclSuccess) return faults.meeting_result;
  auto& clique = world.cliques[std::string(id.internal, sizeof id.internal)];
  if (clique == nullptr) clique = std::make_shared<Clique>(nranks);
  if (rank >= nranks || static_cast<int>(clique->ranks.size()) != nranks) return misuse("ranks of other sizes");
  if (clique->ranks[static_cast<std::size_t>(rank)] != nullptr) return misuse("one rank twice");
  *comm = new ncclComm{clique, rank, faults};
  (*comm)->questions_left = faults.questions_to_meet;
  clique->ranks[static_cast<std::size_t>(rank)] = *comm;
  clique->met = std::find(clique->ranks.begin(), clique->ranks.end(), nullptr) == clique->ranks.end();
  world.live.insert(*comm);
  ++world.counts.made;
  return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  const Locked locked(world.lock);
  if (!world.live.contains(comm)) return misuse("a question to a communicator that is gone");
  ++world.counts.questions;
  move_on();
  if (comm->error == ncclSuccess && comm->in_progress()) answer_question(comm);
  *state = comm->error != ncclSuccess ? comm->error : comm->in_progress() ? ncclInProgress : ncclSuccess;
  world.counts.in_progress += *state == ncclInProgress;
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  const Locked locked(world.lock);
  if (!world.live.contains(comm)) return misuse("a communicator that is gone is finalized");
  if (comm->stage != Stage::ready) return misuse("finalized in the middle of something");
  ++world.counts.finalized;
  comm->stage = Stage::finalizing;
  comm->questions_left = comm->faults.questions_to_finalize;
  return ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  const Locked locked(world.lock);
  if (!world.live.contains(comm)) return misuse("a communicator that is gone is destroyed");
  if (comm->stage != Stage::finalized) misuse("destroyed without being finalized");
  ++world.counts.destroyed;
  forget(comm);
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  Locked locked(world.lock);
  if (!world.live.contains(comm)) return misuse("a communicator that is gone is aborted");
  ++world.counts.aborted;
  if (comm->faults.abort_hangs) {
    ++world.hanging;
    world.over.wait(locked, [] { return !world.open; });
    --world.hanging;
    world.over.notify_all();
  }
  forget(comm);
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclRemoteError ? "remote process exited or there was a network error" : "emulated error";
}

const char* ncclGetLastError(ncclComm_t) { return "emulated detail"; }
ncclResult_t ncclGroupStart() {
  ++depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  const Locked locked(world.lock);
  if (depth == 0) return misuse("the end of no group");
  if (--depth > 0) return ncclSuccess;
  ncclResult_t result = ncclSuccess;
  for (Kernel& kernel : std::exchange(group, {})) {
    ncclComm* const comm = kernel.comm;
    comm->accepted.push_back(std::move(kernel));
    comm->stage = Stage::beginning;
    comm->questions_left = comm->faults.questions_to_begin;
    if (comm->questions_left == 0) enqueue(comm);
    else result = ncclInProgress;
  }
  return result;
}

ncclResult_t ncclSend(const void* from, std::size_t count, ncclDataType_t, int peer, ncclComm_t comm, cudaStream_t s) {
  return add(comm, {Kind::send, peer, static_cast<const char*>(from), nullptr, count}, s);
}

ncclResult_t ncclRecv(void* to, std::size_t count, ncclDataType_t, int peer, ncclComm_t comm, cudaStream_t s) {
  return add(comm, {Kind::receive, peer, nullptr, static_cast<char*>(to), count}, s);
}

ncclResult_t ncclAllGather(const void* from, void* to, std::size_t count, ncclDataType_t, ncclComm_t comm,
                           cudaStream_t s) {
  return add(comm, {Kind::all_gather, -1, static_cast<const char*>(from), static_cast<char*>(to), count}, s);
}

ncclResult_t ncclAllReduce(const void* from, void* to, std::size_t count, ncclDataType_t, ncclRedOp_t, ncclComm_t comm,
                           cudaStream_t s) {
  return add(comm, {Kind::all_reduce, -1, static_cast<const char*>(from), static_cast<char*>(to), 4 * count}, s);
}

ncclResult_t ncclBroadcast(const void* from, void* to, std::size_t count, ncclDataType_t, int root, ncclComm_t comm,
                           cudaStream_t s) {
  return add(comm, {Kind::broadcast, root, static_cast<const char*>(from), static_cast<char*>(to), count}, s);
}
