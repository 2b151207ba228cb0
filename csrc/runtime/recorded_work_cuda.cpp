// Recordings as CUDA graphs, by torch's own capture: its allocator keeps the memory that a graph names apart from
// everyone else's.
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>

#include <map>

#include "runtime/cuda_launch.h"
#include "runtime/recorded_work.h"

namespace nemo_rl::runtime {
namespace {

class CudaGraphs : public RecordedWork {
 public:
  explicit CudaGraphs(at::Device device) : device_(device), pool_(at::cuda::graph_pool_handle()) {}

  void record(std::int64_t key, const std::function<void()>& work) override {
    const c10::cuda::CUDAGuard guard(device_);
    const auto current = c10::cuda::getCurrentCUDAStream();
    const auto side = c10::cuda::getStreamFromPool(/*isHighPriority=*/false,
                                                   device_.index());  // the default stream cannot be captured
    wait_for(current, side);
    auto graph = std::make_unique<at::cuda::CUDAGraph>();
    try {
      const c10::cuda::CUDAStreamGuard on_side(side);
      graph->capture_begin(pool_, cudaStreamCaptureModeThreadLocal);
      try {
        work();
      } catch (...) {
        abandon(*graph);
        throw;
      }
      graph->capture_end();
    } catch (const std::exception& e) {
      throw std::runtime_error(detail::concat("a decode step on ", device_.str(),
                                              " could not be recorded as a CUDA graph "
                                              "(policy.generation.vllm_cfg.enforce_eager=true does without): ",
                                              e.what()));
    }
    wait_for(side, current);
    graphs_[key] = std::move(graph);
  }

  bool replay(std::int64_t key) override {
    const auto found = graphs_.find(key);
    if (found == graphs_.end()) return false;
    const c10::cuda::CUDAGuard guard(device_);
    found->second->replay();
    return true;
  }

 private:
  static void wait_for(const c10::cuda::CUDAStream& first, const c10::cuda::CUDAStream& then) {
    at::cuda::CUDAEvent reached;
    reached.record(first);
    reached.block(then);
  }
  /// The stream leaves capture; that this recording failed is known already.
  static void abandon(at::cuda::CUDAGraph& graph) {
    try {
      graph.capture_end();
    } catch (const std::exception&) {
    }
  }

  at::Device device_;
  at::MempoolId_t pool_;
  std::map<std::int64_t, std::unique_ptr<at::cuda::CUDAGraph>> graphs_;
};

const bool registered = [] {
  recorded_work_cuda.set([](const at::Tensor& like) -> std::unique_ptr<RecordedWork> {
    return std::make_unique<CudaGraphs>(like.device());
  });
  return true;
}();

}  // namespace
}  // namespace nemo_rl::runtime
