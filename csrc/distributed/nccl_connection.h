// A communicator of NCCL that never blocks: every wait is a loop here that asks NCCL for errors and looks at the clock.
// The first failure aborts it, once, and no later call uses it. One thread at a time.
#pragma once
#include <ATen/core/Tensor.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <atomic>
#include <string>
#include <utility>

#include "common/check.h"
#include "distributed/call.h"

namespace nemo_rl::distributed {

class NcclConnection {
 public:
  /// Meets the other ranks; `call`: this meeting. Its deadline is also that of later calls.
  NcclConnection(const ncclUniqueId& id, const Call& call, at::Device device);
  /// Says goodbye to the other ranks, at most so long as `kFarewellSeconds`; aborts where they do not answer.
  ~NcclConnection();
  NcclConnection(const NcclConnection&) = delete;
  NcclConnection& operator=(const NcclConnection&) = delete;

  /// Calls enqueue(communicator, stream) -> ncclResult_t between ncclGroupStart and ncclGroupEnd, on torch's current
  /// stream, and returns when the stream has done what was enqueued and all work before it.
  template <class Enqueue>
  void run(const char* phase, const Enqueue& enqueue) {
    const Call call{rank_, size_, phase, deadline_};
    const OneCall only(*this, phase);
    begin(call);
    ncclResult_t result = ncclGroupStart();
    if (is_accepted(result)) {
      const ncclResult_t enqueued = enqueue(communicator_, stream());
      result = ncclGroupEnd();  // in any case: an open group would swallow later calls
      if (!is_accepted(enqueued)) result = enqueued;
    }
    settle(call, result);
    wait_for_stream(call);
  }

  /// NCCL took a call; it may not have done it yet.
  static bool is_accepted(ncclResult_t result) { return result == ncclSuccess || result == ncclInProgress; }

 private:
  /// Two threads at once are a mistake of the caller: NCCL's order of calls would differ from the other ranks'.
  struct OneCall {
    OneCall(NcclConnection& connection, const char* phase) : connection(connection) {
      NRL_CHECK(!connection.busy_.exchange(true), phase, ": another thread is in a call of this communicator");
    }
    ~OneCall() { connection.busy_ = false; }
    NcclConnection& connection;
  };
  struct Event {
    Event();
    ~Event();
    cudaEvent_t event = nullptr;
  };

  cudaStream_t stream() const;
  /// Fails where an earlier call has failed.
  void begin(const Call& call) const;
  /// Waits until NCCL has enqueued on the stream what `result` says that it accepted.
  void settle(const Call& call, ncclResult_t result);
  void wait_for_stream(const Call& call);
  /// What NCCL says of its communicator; fails where that is an error.
  ncclResult_t state(const Call& call);
  [[noreturn]] void fail(const Call& call, ncclResult_t result);
  /// One turn of a loop that waits: fails when the deadline is over, else lets others work.
  void pause(const Call& call, int turn, const char* what);
  void abort(const Call& call);
  bool say_goodbye(const Call& call);

  int rank_, size_;
  double deadline_;
  at::Device device_;
  Event reached_;
  ncclComm_t communicator_ = nullptr;  ///< null: aborted
  std::string ended_by_;               ///< the phase whose failure ended it
  std::atomic<bool> busy_ = false;
};

}  // namespace nemo_rl::distributed
