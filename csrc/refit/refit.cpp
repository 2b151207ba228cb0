#include "refit/refit.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <future>

#include "common/check.h"
#include "kernels/weight_digest.h"
#include "refit/delta.h"
#include "runtime/tensor.h"

namespace nemo_rl::refit {
namespace {

using distributed::Communicator;
using Clock = std::chrono::steady_clock;

constexpr int kRoot = 0;
constexpr std::int64_t kMagic = 0x7469'6665'725f'6c72;  // "rl_refit"
constexpr std::int64_t kMostManifestBytes = std::int64_t{1} << 30;
constexpr std::int64_t kCopyBytes = std::int64_t{1} << 20;  ///< of one job when weights are put in place
/// Least weights of one bucket that is read in place: it takes no memory of its own, and every message costs a wait.
constexpr std::int64_t kInPlaceBytes = 64'000'000;

double since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }

std::uint64_t digest_of(const at::Tensor& bytes) {
  return kernels::digest_bytes(static_cast<const char*>(bytes.const_data_ptr()), bytes.numel(), nullptr);
}

at::Tensor of_at_least(at::Tensor& buffer, std::int64_t bytes) {
  if (!buffer.defined() || buffer.numel() < bytes) buffer = at::empty({bytes}, at::kByte);
  return buffer.narrow(0, 0, bytes);
}

/// Every rank says whether it refuses. PeerRefused where this one does not and another does.
void agree(Communicator& communicator, bool refuses, const std::string& what) {
  auto own = at::full({1}, refuses ? 1 : 0, at::kLong), all = at::zeros({communicator.size(), 1}, at::kLong);
  communicator.all_gather(all, own, (what + ": whether all ranks take it").c_str());
  for (int rank = 0; rank < communicator.size() && !refuses; ++rank)
    if (all[rank].item<std::int64_t>() != 0)
      throw PeerRefused(detail::concat("rank ", communicator.rank(), " of ", communicator.size(), ": ", what,
                                       " was refused by rank ", rank, ", which says why; no rank has taken it"));
}

std::string what_of(std::uint64_t version) { return detail::concat("refit of version ", version); }

/// Of a message of changes: for each piece the digest of the weights that they make, and the length of its changes.
struct ChangesHead {
  std::uint64_t digest;
  std::int64_t length;
};

std::int64_t head_bytes(const Bucket& bucket) {
  return static_cast<std::int64_t>(bucket.pieces.size() * sizeof(ChangesHead));
}

/// Of a message about weights that are read in place: for each piece its digest and where it lies, then their digest.
struct PlaceHead {
  std::uint64_t digest;
  std::uint64_t address;
};

std::int64_t places_bytes(const Bucket& bucket) {
  return static_cast<std::int64_t>(bucket.pieces.size() * sizeof(PlaceHead) + sizeof(std::uint64_t));
}

std::string digests_differ(const std::string& name, std::uint64_t found, std::uint64_t wanted) {
  return detail::concat(name, " has digest ", std::hex, found, " against ", wanted, std::dec, " of the sender");
}

std::unique_ptr<distributed::PeerMemory> open_memory(Communicator& communicator, const std::string& what) {
  return distributed::PeerMemory::open(communicator, (what + ": whether weights can be read in place").c_str());
}

std::string phase_of(const std::string& what, std::size_t bucket, std::size_t count) {
  return detail::concat(what, ": bucket ", bucket + 1, " of ", count);
}

}  // namespace

// ---- the trainer's side

Publisher::Publisher(std::shared_ptr<Communicator> communicator, std::int64_t bucket_bytes, bool delta, bool in_place)
    : communicator_(std::move(communicator)),
      bucket_bytes_(bucket_bytes),
      delta_(delta),
      way_(in_place ? kAsk : kBuckets) {
  NRL_CHECK_ARG(bucket_bytes >= 1, "a bucket of a refit has ", bucket_bytes, " bytes: give it room for some weights");
  NRL_CHECK(communicator_->rank() == kRoot, "rank 0 publishes, this is rank ", communicator_->rank());
}

Transfer Publisher::publish(const NamedTensors& weights, std::uint64_t version) {
  const auto began = Clock::now();
  Manifest manifest{version, std::nullopt, bucket_bytes_, specs_of(weights)};
  if (base_ && base_->tensors == manifest.tensors) manifest.base = base_->version;
  if (way_ == kInPlace && !manifest.base) manifest.bucket_bytes = std::max(bucket_bytes_, kInPlaceBytes);
  if (delta_ && !manifest.base) base_ = make_base(manifest);
  try {
    auto done = send(weights, manifest);
    if (base_) base_->version = version;
    done.seconds = since(began);
    return done;
  } catch (...) {
    base_.reset();  // some receivers may have other weights
    throw;
  }
}

Transfer Publisher::send(const NamedTensors& weights, const Manifest& manifest) {
  const bool changes = manifest.base.has_value();
  const auto buckets = buckets_of(manifest);
  const auto what = what_of(manifest.version);
  announce(manifest, what);
  agree(*communicator_, false, what);
  if (way_ == kAsk) way_ = open_memory(*communicator_, what) ? kInPlace : kBuckets;
  const bool in_place = way_ == kInPlace && !changes;
  Transfer done{.buckets = static_cast<std::int64_t>(buckets.size())};
  std::future<at::Tensor> packing;
  const auto begin_packing = [&](std::size_t i, std::launch how) {
    const auto most = in_place ? places_bytes(buckets[i])
                               : std::max(buckets[i].message_bytes(), buckets[i].bytes + head_bytes(buckets[i]));
    auto message = of_at_least(buffers_[i % 2], most);
    packing = std::async(how, [&, i, message] {
      return in_place  ? pack_places(weights, buckets[i], message)
             : changes ? pack_changes(weights, buckets[i], message)
                       : pack(weights, buckets[i], message);
    });
  };
  if (!buckets.empty()) begin_packing(0, std::launch::deferred);
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    const auto message = packing.get();
    if (i + 1 < buckets.size()) begin_packing(i + 1, std::launch::async);
    const auto phase = phase_of(what, i, buckets.size());
    if (changes) {
      const auto size = at::tensor({message.numel(), message.numel() ^ kMagic}, at::kLong);
      communicator_->broadcast(size, kRoot, phase.c_str());
    }
    communicator_->broadcast(message, kRoot, phase.c_str());
    done.bytes += buckets[i].bytes, done.sent += in_place ? buckets[i].message_bytes() : message.numel();
  }
  agree(*communicator_, false, what);
  return done;
}

Publisher::Base Publisher::make_base(const Manifest& manifest) const {
  Base base{manifest.version, manifest.tensors, {}};
  for (const auto& spec : manifest.tensors) base.bytes.push_back(at::empty({spec.bytes()}, at::kByte));
  return base;
}

at::Tensor Publisher::announce(const Manifest& manifest, const std::string& what) {
  const auto bytes = manifest.packed();
  const auto header =
      at::tensor({kMagic, bytes.numel(), static_cast<std::int64_t>(digest_of(bytes)), way_ ^ kMagic}, at::kLong);
  communicator_->broadcast(header, kRoot, (what + ": header").c_str());
  communicator_->broadcast(bytes, kRoot, (what + ": manifest").c_str());
  return bytes;
}

/// Also into the base, where there is one.
at::Tensor Publisher::pack(const NamedTensors& weights, const Bucket& bucket, const at::Tensor& message) const {
  auto* to = static_cast<char*>(message.data_ptr());
  char* digests = to + bucket.bytes;
  for (const auto& piece : bucket.pieces) {
    const auto* from = static_cast<const char*>(weights[piece.tensor].second.const_data_ptr()) + piece.begin;
    const auto digest = kernels::digest_bytes(from, piece.size, to + piece.place);
    std::memcpy(digests, &digest, sizeof digest);
    digests += sizeof digest;
    if (base_.has_value())
      std::memcpy(static_cast<char*>(base_->bytes[piece.tensor].data_ptr()) + piece.begin, to + piece.place,
                  static_cast<std::size_t>(piece.size));
  }
  return message.narrow(0, 0, bucket.message_bytes());
}

/// Digests of the weights where they lie; nothing is copied, but into the base, where there is one.
at::Tensor Publisher::pack_places(const NamedTensors& weights, const Bucket& bucket, const at::Tensor& message) const {
  auto* to = static_cast<char*>(message.data_ptr());
  for (const auto& piece : bucket.pieces) {
    const auto* from = static_cast<const char*>(weights[piece.tensor].second.const_data_ptr()) + piece.begin;
    auto* old = base_ ? static_cast<char*>(base_->bytes[piece.tensor].data_ptr()) + piece.begin : nullptr;
    const PlaceHead head{kernels::digest_bytes(from, piece.size, old), reinterpret_cast<std::uint64_t>(from)};
    std::memcpy(to, &head, sizeof head);
    to += sizeof head;
  }
  const auto heads = message.narrow(0, 0, places_bytes(bucket) - static_cast<std::int64_t>(sizeof(std::uint64_t)));
  const auto digest = digest_of(heads);
  std::memcpy(to, &digest, sizeof digest);
  return message.narrow(0, 0, places_bytes(bucket));
}

/// The base becomes these weights.
at::Tensor Publisher::pack_changes(const NamedTensors& weights, const Bucket& bucket, const at::Tensor& message) const {
  auto* const begin = static_cast<char*>(message.data_ptr());
  std::int64_t end = head_bytes(bucket);
  char* heads = begin;
  for (const auto& piece : bucket.pieces) {
    const auto& tensor = weights[piece.tensor].second;
    const auto* now = static_cast<const char*>(tensor.const_data_ptr()) + piece.begin;
    auto* old = static_cast<char*>(base_->bytes[piece.tensor].data_ptr()) + piece.begin;
    const auto width = static_cast<std::int64_t>(tensor.element_size());
    const auto length = encode_changes(old, now, piece.size, width, begin + end);
    const ChangesHead head{kernels::digest_bytes(now, piece.size, old), length};
    std::memcpy(heads, &head, sizeof head);
    heads += sizeof head, end += length;
  }
  return message.narrow(0, 0, end);
}

// ---- an engine's side

Receiver::Receiver(std::shared_ptr<Communicator> communicator, NamedTensors weights)
    : communicator_(std::move(communicator)), weights_(std::move(weights)), specs_(specs_of(weights_)) {
  NRL_CHECK(communicator_->rank() != kRoot, "rank 0 publishes, it does not receive");
  for (const auto& [name, tensor] : weights_) places_.emplace(name, static_cast<char*>(tensor.data_ptr()));
}

Transfer Receiver::receive(std::uint64_t version) {
  const auto began = Clock::now();
  const auto what = what_of(version);
  const auto refuse = [&](const std::string& problem) {
    throw RefitRefused(detail::concat("rank ", communicator_->rank(), " of ", communicator_->size(), ": ", what,
                                      " is refused, the old weights stay: ", problem));
  };
  std::string problem;
  const auto manifest = await_manifest(what, problem);
  if (problem.empty()) problem = difference(manifest, {specs_, version, version_});
  agree(*communicator_, !problem.empty(), what);
  if (!problem.empty()) refuse(problem);
  if (way_ == kAsk) memory_ = open_memory(*communicator_, what);
  const auto buckets = buckets_of(manifest);
  for (const auto& damage : await_buckets(manifest, buckets, what)) problem += (problem.empty() ? "" : "; ") + damage;
  agree(*communicator_, !problem.empty(), what);
  if (!problem.empty()) refuse(problem);
  put_in_place(manifest, buckets);
  version_ = version;
  Transfer done{.sent = sent_, .buckets = static_cast<std::int64_t>(buckets.size()), .seconds = since(began)};
  for (const auto& bucket : buckets) done.bytes += bucket.bytes;
  return done;
}

Manifest Receiver::await_manifest(const std::string& what, std::string& problem) {
  auto header = at::zeros({4}, at::kLong);
  communicator_->broadcast(header, kRoot, (what + ": header").c_str());
  const auto* values = header.const_data_ptr<std::int64_t>();
  way_ = values[3] ^ kMagic;
  if (values[0] != kMagic || values[1] < 0 || values[1] > kMostManifestBytes || way_ < kBuckets ||
      way_ > kAsk)  // what follows cannot be found
    throw RefitRefused(detail::concat(what, " is refused, the old weights stay: its header is damaged"));
  auto bytes = at::empty({values[1]}, at::kByte);
  communicator_->broadcast(bytes, kRoot, (what + ": manifest").c_str());
  if (digest_of(bytes) != static_cast<std::uint64_t>(values[2])) {
    problem = "the manifest was damaged on the way";
    return {};
  }
  try {
    return Manifest::unpacked(bytes);
  } catch (const RefitRefused& error) {
    problem = error.what();
    return {};
  }
}

std::vector<std::string> Receiver::await_buckets(const Manifest& manifest, const std::vector<Bucket>& buckets,
                                                 const std::string& what) {
  std::int64_t total = 0;
  for (const auto& bucket : buckets) total += bucket.message_bytes();
  auto all = of_at_least(staged_, total);
  std::vector<std::string> problems;
  std::future<std::string> verifying;
  const auto finish = [&] {
    if (!verifying.valid()) return;
    if (auto problem = verifying.get(); !problem.empty()) problems.push_back(std::move(problem));
  };
  const bool in_place = way_ != kBuckets && memory_ != nullptr && !manifest.base;
  std::int64_t begin = 0;
  sent_ = 0;
  for (std::size_t i = 0; i < buckets.size(); ++i) {  // also behind damage, so that all ranks stay in step
    const auto place = all.narrow(0, begin, buckets[i].message_bytes());
    begin += place.numel();
    const auto phase = phase_of(what, i, buckets.size());
    if (in_place && !read_in_place(buckets[i], place, phase)) {
      problems.push_back(
          detail::concat("bucket ", i + 1, " of ", buckets.size(), ": its digests were damaged on the way"));
      continue;
    }
    const auto message = in_place ? place : await_message(manifest, buckets[i], place, phase);
    sent_ += message.numel();
    finish();
    const bool last = i + 1 == buckets.size();
    verifying = std::async(last ? std::launch::deferred : std::launch::async, [&, i, place, message] {
      auto* const to = static_cast<char*>(place.data_ptr());
      auto names = manifest.base ? take_changes(manifest, buckets[i], message, to) : verify(manifest, buckets[i], to);
      return names.empty() ? names : detail::concat("bucket ", i + 1, " of ", buckets.size(), ": ", names);
    });
  }
  finish();
  return problems;
}

/// Reads the weights of a bucket where the publisher has them, and puts its digests behind them, as in a message. False
/// where what it says of them is damaged.
bool Receiver::read_in_place(const Bucket& bucket, const at::Tensor& place, const std::string& phase) {
  const auto message = of_at_least(changes_[0], places_bytes(bucket));
  communicator_->broadcast(message, kRoot, phase.c_str());
  const auto* heads = static_cast<const char*>(message.const_data_ptr());
  const auto size = message.numel() - static_cast<std::int64_t>(sizeof(std::uint64_t));
  std::uint64_t wanted;
  std::memcpy(&wanted, heads + size, sizeof wanted);
  if (digest_of(message.narrow(0, 0, size)) != wanted) return false;
  auto* const to = static_cast<char*>(place.data_ptr());
  char* digests = to + bucket.bytes;
  for (const auto& piece : bucket.pieces) {
    PlaceHead head;
    std::memcpy(&head, heads, sizeof head);
    memory_->read(kRoot, head.address, to + piece.place, static_cast<std::size_t>(piece.size), phase.c_str());
    std::memcpy(digests, &head.digest, sizeof head.digest);
    heads += sizeof head, digests += sizeof head.digest;
  }
  return true;
}

/// The message of a bucket; one of all weights lies at `place`.
at::Tensor Receiver::await_message(const Manifest& manifest, const Bucket& bucket, const at::Tensor& place,
                                   const std::string& phase) {
  if (!manifest.base) {
    communicator_->broadcast(place, kRoot, phase.c_str());
    return place;
  }
  auto size = at::zeros({2}, at::kLong);
  communicator_->broadcast(size, kRoot, phase.c_str());
  const auto* values = size.const_data_ptr<std::int64_t>();
  const std::int64_t most = bucket.bytes + head_bytes(bucket);
  if ((values[0] ^ kMagic) != values[1] || values[0] < head_bytes(bucket) || values[0] > most)
    throw RefitRefused(
        detail::concat(phase, " is refused, the old weights stay: the length of its changes is damaged"));
  std::swap(changes_[0], changes_[1]);  // the other one may still be read
  const auto message = of_at_least(changes_[0], most).narrow(0, 0, values[0]);
  communicator_->broadcast(message, kRoot, phase.c_str());
  return message;
}

/// The new weights of a bucket, of those in use and their changes. What is wrong with them, by tensor.
std::string Receiver::take_changes(const Manifest& manifest, const Bucket& bucket, const at::Tensor& message,
                                   char* to) const {
  std::string damaged;
  const auto* const begin = static_cast<const char*>(message.const_data_ptr());
  const char* heads = begin;
  std::int64_t at = head_bytes(bucket);
  for (const auto& piece : bucket.pieces) {
    ChangesHead head;
    std::memcpy(&head, heads, sizeof head);
    heads += sizeof head;
    const auto& spec = manifest.tensors[piece.tensor];
    const auto add = [&](const std::string& text) { damaged += (damaged.empty() ? "" : ", ") + text; };
    if (head.length < 0 || head.length > message.numel() - at) {
      add(spec.name + " and what follows it have changes of another length");
      return damaged;
    }
    std::memcpy(to + piece.place, places_.at(spec.name) + piece.begin, static_cast<std::size_t>(piece.size));
    const auto width = static_cast<std::int64_t>(c10::elementSize(spec.dtype));
    const bool whole = apply_changes(begin + at, head.length, piece.size, width, to + piece.place);
    at += head.length;
    const auto found = kernels::digest_bytes(to + piece.place, piece.size, nullptr);
    if (!whole || found != head.digest) add(digests_differ(spec.name, found, head.digest));
  }
  return damaged;
}

std::string Receiver::verify(const Manifest& manifest, const Bucket& bucket, const char* message) const {
  std::string damaged;
  const char* digests = message + bucket.bytes;
  for (const auto& piece : bucket.pieces) {
    std::uint64_t wanted;
    std::memcpy(&wanted, digests, sizeof wanted);
    digests += sizeof wanted;
    const auto found = kernels::digest_bytes(message + piece.place, piece.size, nullptr);
    if (found != wanted)
      damaged += (damaged.empty() ? "" : ", ") + digests_differ(manifest.tensors[piece.tensor].name, found, wanted);
  }
  return damaged;
}

void Receiver::put_in_place(const Manifest& manifest, const std::vector<Bucket>& buckets) {
  struct Job {
    char* to;
    const char* from;
    std::int64_t size;
  };
  std::vector<Job> jobs;
  const auto* message = static_cast<const char*>(staged_.const_data_ptr());
  for (const auto& bucket : buckets) {
    for (const auto& piece : bucket.pieces) {
      char* to = places_.at(manifest.tensors[piece.tensor].name) + piece.begin;
      for (std::int64_t done = 0; done < piece.size; done += kCopyBytes)
        jobs.push_back({to + done, message + piece.place + done, std::min(kCopyBytes, piece.size - done)});
    }
    message += bucket.message_bytes();
  }
  at::parallel_for(0, static_cast<std::int64_t>(jobs.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i)
      std::memcpy(jobs[i].to, jobs[i].from, static_cast<std::size_t>(jobs[i].size));
  });
}

}  // namespace nemo_rl::refit
