// An NCCL whose ranks are threads of one process. A kernel goes onto its stream only after the communicator was asked a
// few times, and ends when every rank that it needs has one that fits; nothing runs by itself, but whoever asks for an
// error or an event moves all streams on. Like NCCL it refuses a call while the one before is in progress. What NCCL
// leaves undefined is a misuse: another collective on another rank, other sizes, a communicator that is gone, one that
// is destroyed without being finalized.
#pragma once
#include <nccl.h>

#include <map>
#include <string>
#include <vector>

namespace nccl_emulation {

constexpr int kForever = INT_MAX;

/// What goes wrong on one rank. The numbers of questions: so often ncclCommGetAsyncError answers "in progress".
struct Faults {
  int questions_to_meet = 3, questions_to_begin = 2, questions_to_finalize = 2;
  ncclResult_t meeting_result = ncclSuccess;  ///< what ncclCommInitRankConfig itself returns
  ncclResult_t call_result = ncclSuccess;     ///< what sends, receives and collectives return
  ncclResult_t state = ncclSuccess;           ///< what ncclCommGetAsyncError finds once a kernel is on its stream
  cudaError_t event = cudaSuccess;            ///< what cudaEventQuery returns
  bool abort_hangs = false;                   ///< until the session ends
};

/// What has happened since the session began.
struct Counts {
  int made = 0, aborted = 0, finalized = 0, destroyed = 0;
  int questions = 0;         ///< ncclCommGetAsyncError
  int in_progress = 0;       ///< of these, how many were answered so
  int live = 0, events = 0;  ///< communicators and events that exist
  int kernels = 0;           ///< that are on a stream now
};

/// From its beginning to its end the emulation has these faults and counts. One at a time.
class Session {
 public:
  Session();
  ~Session();
  /// To be set before the ranks begin.
  Faults& faults(int rank);
  Counts counts() const;
  std::vector<std::string> misuses() const;
  /// All ranks that are connected now lose the others.
  void cut();
};

}  // namespace nccl_emulation
