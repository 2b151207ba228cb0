// Work of many launches that is recorded once and launched again as a whole: CUDA graphs, where the core library knows
// no CUDA.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>

#include "runtime/cuda_dispatch.h"

namespace nemo_rl::runtime {

/// Recordings by a key. All of them share memory for what is allocated and freed inside a recording, so one may run at
/// a time.
class RecordedWork {
 public:
  virtual ~RecordedWork() = default;
  /// Runs `work` so that its launches are recorded and not executed. What it reads and writes must stay where it is for
  /// as long as this lives. It must wait for nothing and copy nothing from or to the host.
  virtual void record(std::int64_t key, const std::function<void()>& work) = 0;
  /// Launches the recording on the current stream; false where there is none.
  virtual bool replay(std::int64_t key) = 0;
};

/// For work on the device of `like`.
extern CudaSlot<std::unique_ptr<RecordedWork>(const at::Tensor& like)> recorded_work_cuda;

}  // namespace nemo_rl::runtime
