// Ends a process that was asked twice to end and does not, whatever its main thread is doing.
#pragma once
#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace nemo_rl::process {

/// Counts signals on a thread of its own, which no interpreter lock holds up. Some time after the second one the
/// process ends with 128 + its number, unless `close` was called before.
class SignalWatch {
 public:
  /// `read_end`: of the pipe that a handler writes each signal's number into, as a byte; it is closed at the end.
  /// `forward_to`: where each byte is written as well, for another who waits for signals; -1: nobody does.
  /// SIGHUP counts as a first signal only: a terminal that closes sends several.
  SignalWatch(int read_end, int forward_to, std::vector<int> signals, std::chrono::duration<double> grace);
  ~SignalWatch();
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

  /// The work has ended. The pipe's other end is closed before, and the thread ends.
  void close();

 private:
  void work();
  void end_after_grace(int number);
  int read_end_, forward_to_;
  std::vector<int> signals_;
  std::chrono::duration<double> grace_;
  pid_t owner_;  // a forked child has no such thread
  std::mutex mutex_;
  std::condition_variable closing_;
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace nemo_rl::process
