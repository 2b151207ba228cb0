// Tracks which sequences and prompts hold the recurrent states of a model. Unlike a cache block, a state is never
// shared: a sequence that continues a prompt copies the prompt's state. No tensor is touched here.
#pragma once
#include <cstdint>
#include <vector>

#include "common/check.h"

namespace nemo_rl::generation {

class StateSlots {
 public:
  /// No slot.
  static constexpr std::int64_t kNone = -1;

  explicit StateSlots(std::int64_t count) : count_(count) {
    for (std::int64_t slot = count; slot-- > 0;) free_.push_back(slot);
  }
  /// Whether the model has recurrent states.
  bool enabled() const { return count_ > 0; }
  std::int64_t num_free() const { return static_cast<std::int64_t>(free_.size()); }
  std::int64_t num_used() const { return count_ - num_free(); }
  /// Takes the slot that was freed last, which is likely in the CPU's cache. Returns kNone if the model has no states.
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
