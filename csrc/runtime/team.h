// A team keeps LibTorch's threads together while many small pieces of work follow each other, such as a decode step of
// few rows. Waking threads for every product costs some microseconds. Between products only one thread has work. The
// others wait in one parallel region, and read the weights of the next product into their caches meanwhile.
#pragma once
#include <ATen/Parallel.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <utility>

namespace nemo_rl::runtime {

/// A range of memory in n equal parts. Thread i will read part i first.
struct Stretch {
  const void* at = nullptr;
  std::int64_t bytes = 0;
};

class Team {
 public:
  static constexpr int kStretches = 2;

  /// Calls f() on this thread. Inside f, the functions of runtime/parallel_items.h use the team's threads. Any other
  /// parallel code inside f runs on this thread alone.
  template <class F>
  static void lead(const F& f) {
    if (at::get_num_threads() < 2 || at::in_parallel_region()) return f();
    Team team(at::get_num_threads());
    at::parallel_for(0, team.threads_, 1,
                     [&](std::int64_t begin, std::int64_t) { begin == 0 ? team.lead_here(f) : team.help(begin); });
  }

  explicit Team(int threads) : threads_(threads) {}
  /// Calls f() on this thread, which is thread 0. Then the helpers may leave.
  template <class F>
  void lead_here(const F& f) {
    struct Leading {
      explicit Leading(Team& team) : team(team) { current_ = &team; }
      ~Leading() {
        current_ = nullptr;
        team.state_.fetch_or(kEnd, std::memory_order_release);
      }
      Team& team;
    } leading(*this);
    f();
  }
  /// Helps as thread 1 or above until thread 0 has finished.
  void help(std::int64_t thread);

  /// The team that this thread leads; nullptr: none.
  static Team* current() { return current_; }
  int threads() const { return threads_; }

  /// Calls work(thread) on this thread, which is 0, and on every other thread that comes before thread 0 is done. So
  /// `work` must take pieces until none is left. Returns when every thread that began has ended.
  template <class F>
  void share(const F& work) {
    const auto call = [&](std::int64_t thread) { attempt([&] { work(thread); }); };
    open([](const void* context, std::int64_t thread) { (*static_cast<decltype(call)*>(context))(thread); }, &call);
    call(0);
    close();
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

  /// The memory that is read next: two ranges at the same time, or one and an empty one.
  void ask_ahead(const std::array<Stretch, kStretches>& stretches);

 private:
  using Call = void (*)(const void* context, std::int64_t thread);
  /// How much of the next memory a helper has read.
  struct Reading;

  /// Keeps what f throws, if it is the first to.
  template <class F>
  void attempt(const F& f) {
    try {
      f();
    } catch (...) {
      const std::lock_guard lock(failing_);
      if (!failure_) failure_ = std::current_exception();
    }
  }
  void open(Call call, const void* context);
  void close();
  bool read_ahead(std::int64_t thread, Reading& reading) const;

  // state_: in the upper half the number of the work; below, how many helpers are at it, and these:
  static constexpr std::uint64_t kClosed = 1u << 31, kEnd = 1u << 30, kHelpers = kEnd - 1;
  static thread_local Team* current_;

  const int threads_;
  Call call_ = nullptr;
  const void* context_ = nullptr;
  alignas(64) std::atomic<std::uint64_t> state_{kClosed};
  alignas(64) std::atomic<std::uint32_t> asked_{0};  ///< number of what is asked ahead
  std::atomic<const char*> at_[kStretches] = {};
  std::atomic<std::int64_t> bytes_[kStretches] = {};
  std::mutex failing_;
  std::exception_ptr failure_;
};

}  // namespace nemo_rl::runtime
