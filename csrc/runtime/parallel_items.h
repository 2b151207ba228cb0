// Shares work among LibTorch's threads: each piece goes to the next free thread. It serves items of uneven cost, and
// tiles of even cost on cores of uneven speed. The result of a piece must not depend on the thread that computes it.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "common/large_memory.h"
#include "runtime/team.h"

namespace nemo_rl::runtime {

/// Number of threads that can work here at the same time.
inline int threads_at_hand() {
  if (const Team* team = Team::current()) return team->threads();
  return at::in_parallel_region() ? 1 : at::get_num_threads();
}

/// Calls f(worker) for workers of [0, count), each on a thread of its own. Some threads of a team may not come. So f
/// must take work until none is left, also the part of other workers.
template <class F>
void parallel_workers(std::int64_t count, const F& f) {
  if (Team* team = Team::current()) {
    return team->share([&](std::int64_t thread) {
      if (thread < count) f(thread);
    });
  }
  at::parallel_for(0, count, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t worker = begin; worker < end; ++worker) f(worker);
  });
}

/// Calls f(i) for i in [0, count), in about ascending order. Without `parallel` it uses this thread alone.
template <class F>
void parallel_items(std::int64_t count, bool parallel, const F& f) {
  const std::int64_t workers = std::min<std::int64_t>(threads_at_hand(), count);
  if (!parallel || workers < 2) {
    for (std::int64_t i = 0; i < count; ++i) f(i);
    return;
  }
  std::atomic<std::int64_t> next{0};
  parallel_workers(workers, [&](std::int64_t) {
    for (std::int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) f(i);
  });
}

/// A range of tiles. Its owner takes tiles from the front, other threads from the back.
class alignas(64) TileRange {
 public:
  void set(std::int64_t begin, std::int64_t end) { both_.store(pack(begin, end), std::memory_order_relaxed); }

  /// Takes up to `count` tiles. Gives them as [begin, end), and how many are left; begin == end when there were none.
  struct Taken {
    std::int64_t begin, end, left;
  };
  Taken take(std::int64_t count, bool from_front) {
    std::uint64_t seen = both_.load(std::memory_order_relaxed);
    for (;;) {
      const std::int64_t begin = static_cast<std::int64_t>(seen >> 32),
                         end = static_cast<std::int64_t>(seen & 0xffffffffu);
      const std::int64_t n = std::min(count, end - begin);
      if (n <= 0) return {0, 0, 0};
      const std::uint64_t rest = from_front ? pack(begin + n, end) : pack(begin, end - n);
      if (!both_.compare_exchange_weak(seen, rest, std::memory_order_relaxed)) continue;
      return from_front ? Taken{begin, begin + n, end - begin - n} : Taken{end - n, end, 0};
    }
  }

 private:
  static std::uint64_t pack(std::int64_t begin, std::int64_t end) {
    return static_cast<std::uint64_t>(begin) << 32 | static_cast<std::uint64_t>(end);
  }
  std::atomic<std::uint64_t> both_{0};
};

/// The least number of tiles, of so many multiply-adds each, for one thread: waking a thread costs some microseconds.
inline std::int64_t tiles_at_least(std::int64_t work) {
  return std::max<std::int64_t>(1, 200'000 / std::max<std::int64_t>(1, work));
}

/// Calls f(mine, begin, end, more) until tiles [0, count) are done, at least `at_least` of them at a time. Every thread
/// works through a range of its own. Then it takes tiles from the ends of other ranges, so that no thread waits for a
/// slower core. `mine`: a Mine of this worker alone, for what it learns from tile to tile; it begins as Mine{}. `more`:
/// the caller will most likely continue with tile `end`. count < 2^31.
template <class Mine, class F>
void parallel_tiles_with(std::int64_t count, std::int64_t at_least, const F& f) {
  const std::int64_t workers = std::min<std::int64_t>(threads_at_hand(), (count + at_least - 1) / at_least);
  if (workers < 2) {
    Mine mine{};
    if (count > 0) f(mine, std::int64_t{0}, count, false);
    return;
  }
  std::vector<TileRange> ranges(static_cast<std::size_t>(workers));
  for (std::int64_t w = 0; w < workers; ++w)
    ranges[static_cast<std::size_t>(w)].set(count * w / workers, count * (w + 1) / workers);
  parallel_workers(workers, [&](std::int64_t own) {
    Mine mine{};
    for (std::int64_t i = 0; i < workers; ++i) {
      TileRange& range = ranges[static_cast<std::size_t>((own + i) % workers)];
      for (auto t = range.take(at_least, i == 0); t.begin < t.end; t = range.take(at_least, i == 0))
        f(mine, t.begin, t.end, t.left > 0);
    }
  });
}

/// The same without anything of a worker's own: f(begin, end, more).
template <class F>
void parallel_tiles(std::int64_t count, std::int64_t at_least, const F& f) {
  struct Nothing {};
  parallel_tiles_with<Nothing>(count, at_least,
                               [&](Nothing&, std::int64_t begin, std::int64_t end, bool more) { f(begin, end, more); });
}

/// Calls f(begin, end) until [0, count) is done, about `grain` or more at a time. It is at::parallel_for that also uses
/// the threads of a team.
template <class F>
void parallel_rows(std::int64_t count, std::int64_t grain, const F& f) {
  if (Team::current() == nullptr) return at::parallel_for(0, count, grain, f);
  if (count <= 0) return;
  const std::int64_t workers = std::clamp<std::int64_t>(count / std::max<std::int64_t>(1, grain), 1, threads_at_hand());
  parallel_tiles(count, (count + workers - 1) / workers,
                 [&](std::int64_t begin, std::int64_t end, bool) { f(begin, end); });
}

/// Scratch memory, 64-byte aligned. It grows and is kept, because fresh big blocks would cost page faults. Above kSmall
/// it comes in huge pages.
class ScratchMemory {
 public:
  /// May allocate again: then the pointer that the previous call returned is invalid.
  std::byte* get(std::size_t bytes) {
    if (bytes > size_) {
      if (bytes > kSmall) bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
      memory_.reset();
      memory_ = allocate_large(bytes, bytes);
      size_ = bytes;
    }
    return memory_.get();
  }

 private:
  static constexpr std::size_t kSmall = std::size_t{1} << 17;
  LargeBlock memory_;
  std::size_t size_ = 0;
};

/// This thread's scratch memory. It is valid until the thread's next call.
inline std::byte* thread_workspace(std::size_t bytes) {
  thread_local ScratchMemory memory;
  return memory.get(bytes);
}

}  // namespace nemo_rl::runtime
