// Decode steps as CUDA graphs: captured once for each number of rows, then replayed. A graph launches the same kernels
// on the same memory in the same order, so the results are bit-identical.
#pragma once
#include <functional>
#include <memory>
#include <set>
#include <vector>

#include "runtime/recorded_work.h"

namespace nemo_rl::generation {

/// The number of rows that a decode step of `rows` sequences computes. It is rounded up, so that few graphs are needed:
/// to 1, 2, 4, then multiples of 8 up to 256 and of 16 up to 512. Above 512 it is unchanged, and no graph is needed:
/// the device is busy enough to hide the launches.
std::int64_t recorded_rows(std::int64_t rows);

class RecordedSteps {
 public:
  using Recorder = std::function<std::unique_ptr<runtime::RecordedWork>()>;

  /// The recorder for the device of a model's weights: none on the CPU, where a launch costs nothing.
  static Recorder recorder_for(const at::Tensor& weights);

  /// Without a recorder every step is launched kernel by kernel.
  explicit RecordedSteps(Recorder recorder) : recorder_(std::move(recorder)) {}
  bool enabled() const { return static_cast<bool>(recorder_); }

  /// Runs `work`, a step of `rows` = recorded_rows(rows). The first step with this number of rows is launched kernel by
  /// kernel, so that buffers exist, matrix products have chosen their algorithms and kernels are loaded; the second is
  /// captured. `places` returns the addresses of all memory that may move between steps; if one has changed, all graphs
  /// are dropped. It is called again after a step without a graph.
  void run(std::int64_t rows, const std::function<std::vector<const void*>()>& places,
           const std::function<void()>& work);

  /// Drops all graphs. Must be called before memory that they use is freed.
  void clear();

 private:
  Recorder recorder_;
  std::unique_ptr<runtime::RecordedWork> recorded_;
  std::set<std::int64_t> seen_;
  std::vector<const void*> places_;
};

}  // namespace nemo_rl::generation
