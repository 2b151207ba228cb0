// Keeps track of who holds which state of a model with recurrent layers. Unlike a cache block a state is never shared:
// a sequence that continues a prompt copies the prompt's. No tensor is touched here.
#pragma once
#include <cstdint>
#include <vector>

#include "common/check.h"

namespace nemo_rl::generation {

class StateSlots {
 public:
  /// Held by nobody.
  static constexpr std::int64_t kNone = -1;

  explicit StateSlots(std::int64_t count) : count_(count) {
    for (std::int64_t slot = count; slot-- > 0;) free_.push_back(slot);
  }
  /// Whether the model has states at all.
  bool enabled() const { return count_ > 0; }
  std::int64_t num_free() const { return static_cast<std::int64_t>(free_.size()); }
  std::int64_t num_used() const { return count_ - num_free(); }
  /// The slot freed last, which is likely in the CPU's cache; kNone where there are no states.
  std::int64_t take() {
    if (!enabled()) return kNone;
    NRL_CHECK(!free_.empty(), "no free state");
    const std::int64_t slot = free_.back();
    free_.pop_back();
    return slot;
  }
  void release(std::int64_t& slot) {
    if (slot != kNone) free_.push_back(slot);
    slot = kNone;
  }

 private:
  std::int64_t count_;
  std::vector<std::int64_t> free_;
};

}  // namespace nemo_rl::generation
