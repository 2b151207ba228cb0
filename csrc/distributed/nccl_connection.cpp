#include "distributed/nccl_connection.h"

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <thread>

namespace nemo_rl::distributed {
namespace {

constexpr double kFarewellSeconds = 5.0;
constexpr double kAbortSeconds = 10.0;
constexpr int kTurnsWithoutSleep = 1000;
constexpr auto kNap = std::chrono::microseconds(50);

std::string describe(ncclResult_t result, ncclComm_t communicator) {
  const char* detail = ncclGetLastError(communicator);
  std::string text = detail::concat("NCCL: ", ncclGetErrorString(result));
  return detail != nullptr && *detail != 0 ? text + ": " + detail : text;
}

}  // namespace

NcclConnection::Event::Event() {
  const cudaError_t status = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  NRL_CHECK(status == cudaSuccess, "no CUDA event for NCCL: ", cudaGetErrorString(status));
}

NcclConnection::Event::~Event() {
  if (event != nullptr) (void)cudaEventDestroy(event);
}

NcclConnection::NcclConnection(const ncclUniqueId& id, const Call& call, at::Device device)
    : rank_(call.rank), size_(call.size), deadline_(call.deadline), device_(device) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  settle(call, ncclCommInitRankConfig(&communicator_, size_, id, rank_, &config));
}

NcclConnection::~NcclConnection() {
  if (communicator_ == nullptr) return;
  const Call call{rank_, size_, "goodbye", std::min(deadline_, kFarewellSeconds)};
  try {
    if (!say_goodbye(call)) abort(call);
  } catch (const std::exception&) {  // the process ends, and CUDA has gone before: nobody is left to be told
  }
}

cudaStream_t NcclConnection::stream() const { return c10::cuda::getCurrentCUDAStream(device_.index()).stream(); }

void NcclConnection::begin(const Call& call) const {
  if (communicator_ == nullptr) call.lose_peer("the connection ended when this failed: " + ended_by_);
}

void NcclConnection::settle(const Call& call, ncclResult_t result) {
  if (!is_accepted(result)) fail(call, result);
  for (int turn = 0; state(call) == ncclInProgress; ++turn) pause(call, turn, "NCCL has not begun");
}

void NcclConnection::wait_for_stream(const Call& call) {
  cudaError_t status = cudaEventRecord(reached_.event, stream());
  for (int turn = 0; status == cudaSuccess; ++turn) {
    status = cudaEventQuery(reached_.event);
    if (status == cudaSuccess) return;
    if (status != cudaErrorNotReady) break;
    (void)cudaGetLastError();  // "not ready" is no error for whoever asks next
    status = cudaSuccess;
    state(call);
    pause(call, turn, "NCCL has begun and waits");
  }
  abort(call);
  call.fail(detail::concat("CUDA on ", device_.str(), ": ", cudaGetErrorString(status)));
}

ncclResult_t NcclConnection::state(const Call& call) {
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = ncclCommGetAsyncError(communicator_, &state);
  if (asked != ncclSuccess) fail(call, asked);
  if (!is_accepted(state)) fail(call, state);
  return state;
}

void NcclConnection::fail(const Call& call, ncclResult_t result) {
  const std::string why = describe(result, communicator_);
  abort(call);
  if (result == ncclRemoteError) call.lose_peer(why);
  call.fail(why);
}

void NcclConnection::pause(const Call& call, int turn, const char* what) {
  if (call.is_late()) {
    abort(call);
    call.time_out(detail::concat(what, "; the deadline is ", call.deadline, " s"));
  }
  if (turn < kTurnsWithoutSleep) std::this_thread::yield();
  else std::this_thread::sleep_for(kNap);
}

/// In a thread of its own: ncclCommAbort waits for NCCL's threads and kernels, and where they do not obey, the caller
/// is told of the failure all the same.
void NcclConnection::abort(const Call& call) {
  const ncclComm_t communicator = std::exchange(communicator_, nullptr);
  if (communicator == nullptr) return;
  ended_by_ = call.phase;
  std::promise<void> promise;
  auto ended = promise.get_future();
  std::thread aborts([communicator, device = device_, promise = std::move(promise)]() mutable {
    const c10::cuda::CUDAGuard guard(device);
    (void)ncclCommAbort(communicator);
    promise.set_value();
  });
  const auto grace = std::chrono::duration<double>(std::min(deadline_, kAbortSeconds));
  if (ended.wait_for(grace) == std::future_status::ready) aborts.join();
  else aborts.detach();
}

/// What others still have to read is sent, then the connection is closed. A part of the protocol: a rank that aborted
/// at once could cut off its last message.
bool NcclConnection::say_goodbye(const Call& call) {
  const c10::cuda::CUDAGuard guard(device_);
  ncclResult_t state = ncclCommFinalize(communicator_);
  while (state == ncclInProgress) {
    if (call.is_late()) return false;
    std::this_thread::sleep_for(kNap);
    if (ncclCommGetAsyncError(communicator_, &state) != ncclSuccess) return false;
  }
  if (state != ncclSuccess) return false;
  (void)ncclCommDestroy(std::exchange(communicator_, nullptr));
  return true;
}

}  // namespace nemo_rl::distributed
