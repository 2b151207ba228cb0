// Decode steps on a device: recorded once for each number of rows, then launched as a whole. Recorded work is the same
// kernels on the same memory in the same order, so it gives the same bits.
#pragma once
#include <functional>
#include <memory>
#include <set>
#include <vector>

#include "runtime/recorded_work.h"

namespace nemo_rl::generation {

/// The rows that a decode step of `rows` sequences computes, so that few numbers of rows need a recording: 1, 2, 4,
/// then multiples of 8 up to 256 and of 16 up to 512; above, what it is, since the device then has enough to do to hide
/// the launches.
std::int64_t recorded_rows(std::int64_t rows);

class RecordedSteps {
 public:
  using Recorder = std::function<std::unique_ptr<runtime::RecordedWork>()>;

  /// The recorder of the device on which a model's weights lie: none on the CPU, where a launch costs nothing.
  static Recorder recorder_for(const at::Tensor& weights);

  /// Without a recorder every step runs as it is.
  explicit RecordedSteps(Recorder recorder) : recorder_(std::move(recorder)) {}
  bool enabled() const { return static_cast<bool>(recorder_); }

  /// Does `work`, a step of `rows` = recorded_rows(rows). The first step of that many rows runs as it is, so that
  /// buffers exist, products have chosen their algorithms and kernels are loaded; the second is recorded. `places` are
  /// the addresses of all memory that may move between steps: where one has changed, every recording is dropped. It is
  /// asked again after a step that ran as it is.
  void run(std::int64_t rows, const std::function<std::vector<const void*>()>& places,
           const std::function<void()>& work);

  /// Before memory that recordings name is given back.
  void clear();

 private:
  Recorder recorder_;
  std::unique_ptr<runtime::RecordedWork> recorded_;
  std::set<std::int64_t> seen_;
  std::vector<const void*> places_;
};

}  // namespace nemo_rl::generation
