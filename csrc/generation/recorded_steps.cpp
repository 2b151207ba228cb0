#include "generation/recorded_steps.h"

#include <ATen/core/Tensor.h>

namespace nemo_rl::generation {
namespace {

constexpr std::int64_t kMostRows = 512;

}  // namespace

std::int64_t recorded_rows(std::int64_t rows) {
  if (rows <= 2 || rows > kMostRows) return rows;
  if (rows <= 4) return 4;
  const std::int64_t step = rows <= 256 ? 8 : 16;
  return (rows + step - 1) / step * step;
}

RecordedSteps::Recorder RecordedSteps::recorder_for(const at::Tensor& weights) {
  if (!weights.is_cuda()) return {};
  return [weights] { return runtime::recorded_work_cuda.get(weights)(weights); };
}

void RecordedSteps::run(std::int64_t rows, const std::function<std::vector<const void*>()>& places,
                        const std::function<void()>& work) {
  if (!enabled() || rows > kMostRows) return work();
  if (auto now = places(); now != places_) {
    clear();
    places_ = std::move(now);
  }
  if (recorded_ && recorded_->replay(rows)) return;
  if (!seen_.contains(rows)) {
    work();
    if (auto now = places(); now != places_) {  // this step made buffers
      clear();
      places_ = std::move(now);
    }
    seen_.insert(rows);
    return;
  }
  if (!recorded_) recorded_ = recorder_();
  recorded_->record(rows, work);
  recorded_->replay(rows);
}

void RecordedSteps::clear() {
  recorded_.reset();
  seen_.clear();
  places_.clear();
}

}  // namespace nemo_rl::generation
