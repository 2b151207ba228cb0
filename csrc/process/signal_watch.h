// Ends a process that was asked twice to end and does not, whatever its main thread is doing.
#pragma once
#include <sys/types.h>

#include <chrono>
#include <memory>
#include <thread>
#include <vector>

namespace nemo_rl::process {

/// Counts signals on a thread of its own, which no interpreter lock holds up. Some time after the second one the
/// process ends with 128 + its number, unless `close` was called before.
class SignalWatch {
 public:
  /// `read_end`: of the pipe that a handler writes each signal's number into, as a byte; it is closed at the end. A 0
  /// ends the thread, since the pipe's other end may live on in a forked child. `forward_to`: where each byte is
  /// written as well, for another who waits for signals; -1: nobody does. SIGHUP counts as a first signal only: a
  /// terminal that closes sends several.
  SignalWatch(int read_end, int forward_to, std::vector<int> signals, std::chrono::duration<double> grace);
  ~SignalWatch();
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

  /// The work has ended: tells the thread through `write_end`, the pipe's other end, waits for it and closes that end.
  /// In a forked child, which has no such thread, it closes the end alone.
  void close(int write_end);

 private:
  struct State;  ///< shared with the thread, which may outlive this object
  static void work(State& state);
  std::shared_ptr<State> state_;
  pid_t owner_;
  std::thread thread_;
};

}  // namespace nemo_rl::process
