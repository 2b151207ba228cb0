// Items of uneven cost on LibTorch's threads: whoever is free takes the next one. For work whose result does not depend
// on who does it.
#pragma once
#include <ATen/Parallel.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace nemo_rl::ops {

/// Calls f(i) for i in [0, count), in about ascending order; on this thread alone unless `parallel`.
template <class F>
void parallel_items(std::int64_t count, bool parallel, const F& f) {
  if (!parallel || count < 2 || at::get_num_threads() < 2 || at::in_parallel_region()) {
    for (std::int64_t i = 0; i < count; ++i) f(i);
    return;
  }
  std::atomic<std::int64_t> next{0};
  const std::int64_t workers = std::min<std::int64_t>(at::get_num_threads(), count);
  at::parallel_for(0, workers, 1, [&](std::int64_t, std::int64_t) {
    for (std::int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) f(i);
  });
}

/// This thread's scratch memory, 64-byte aligned, kept between calls: fresh big blocks would cost page faults. Holds
/// until the thread's next call.
inline std::byte* thread_workspace(std::size_t bytes) {
  struct Free {
    void operator()(std::byte* p) const { ::operator delete(p, std::align_val_t(64)); }
  };
  thread_local std::unique_ptr<std::byte, Free> memory;
  thread_local std::size_t size = 0;
  if (bytes > size) {
    memory.reset();
    memory.reset(static_cast<std::byte*>(::operator new(bytes, std::align_val_t(64))));
    size = bytes;
  }
  return memory.get();
}

}  // namespace nemo_rl::ops
