#include "runtime/team.h"

#include <algorithm>
#include <thread>

namespace nemo_rl::runtime {
namespace {

/// Lets the other thread of this core go on.
void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

thread_local Team* Team::current_ = nullptr;

struct Team::Reading {
  std::uint32_t asked = 0;
  std::int64_t begin[kStretches] = {}, length = 0, done = 0;
};

void Team::open(Call call, const void* context) {
  current_ = nullptr;  // what the work calls runs on its own thread
  call_ = call;
  context_ = context;
  const std::uint64_t number = (state_.load(std::memory_order_relaxed) >> 32) + 1;
  state_.store(number << 32, std::memory_order_release);
}

void Team::close() {
  state_.fetch_or(kClosed, std::memory_order_relaxed);
  for (int waited = 0; (state_.load(std::memory_order_acquire) & kHelpers) != 0; ++waited) {
    if (waited > 10'000) std::this_thread::yield();
    pause();
  }
  current_ = this;
}

void Team::ask_ahead(const std::array<Stretch, kStretches>& stretches) {
  for (std::size_t s = 0; s < kStretches; ++s) {
    at_[s].store(static_cast<const char*>(stretches[s].at), std::memory_order_relaxed);
    bytes_[s].store(stretches[s].bytes, std::memory_order_relaxed);
  }
  asked_.store(asked_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

/// Asks for a little more of this thread's part; whether there was any.
bool Team::read_ahead(std::int64_t thread, Reading& reading) const {
  constexpr std::int64_t kMost = 384 << 10, kLine = 64,
                         kAtOnce = 4 * kLine;  // of a stretch, for the second-level cache; of a turn
  const std::uint32_t asked = asked_.load(std::memory_order_acquire);
  if (asked != reading.asked) {
    reading.asked = asked;
    reading.done = 0;
    reading.length = 0;
    for (int s = 0; s < kStretches; ++s) {
      const std::int64_t bytes = bytes_[s].load(std::memory_order_relaxed);
      reading.begin[s] = bytes * thread / threads_;
      reading.length = std::max(reading.length, std::min(bytes / threads_, kMost));
    }
  }
  if (reading.done >= reading.length) return false;
  for (int s = 0; s < kStretches; ++s)
    if (const char* at = at_[s].load(std::memory_order_relaxed))
      for (std::int64_t line = 0; line < kAtOnce; line += kLine)
        __builtin_prefetch(at + reading.begin[s] + reading.done + line, 0, 2);
  reading.done += kAtOnce;
  return true;
}

void Team::help(std::int64_t thread) {
  Reading reading;
  std::uint64_t last = 0;
  for (std::int64_t idle = 0;;) {
    std::uint64_t seen = state_.load(std::memory_order_acquire);
    if (seen & kEnd) return;
    if (seen & kClosed || seen >> 32 == last) {
      if (read_ahead(thread, reading)) continue;
      pause();
      if (++idle > 10'000) std::this_thread::yield();
      continue;
    }
    if (!state_.compare_exchange_weak(seen, seen + 1, std::memory_order_acquire)) continue;
    last = seen >> 32;
    idle = 0;
    call_(context_, thread);
    state_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace nemo_rl::runtime
