// One call of a communicator: what it must be given, its clock, its phase, and the errors that it may end with.
#pragma once
#include <chrono>
#include <string>

#include "distributed/communicator.h"

namespace nemo_rl::distributed {

struct Call {
  using Clock = std::chrono::steady_clock;

  int rank, size;
  const char* phase;
  double deadline;  ///< seconds
  Clock::time_point began = Clock::now();

  double seconds() const { return std::chrono::duration<double>(Clock::now() - began).count(); }
  bool is_late() const { return seconds() > deadline; }

  [[noreturn]] void time_out(const std::string& why) const;
  [[noreturn]] void lose_peer(const std::string& why) const;
  /// For what no other rank has caused.
  [[noreturn]] void fail(const std::string& why) const;
  /// An error of c10d, which tells its kind by its text alone.
  [[noreturn]] void fail_by(const std::exception& error) const;

 private:
  std::string text(const std::string& what, const std::string& why) const;
};

/// Shapes as the interface wants them, whatever the back end.
void check_all_to_all(const Communicator& ranks, const at::Tensor& out, const at::Tensor& in, const char* phase);
void check_all_gather(const Communicator& ranks, const at::Tensor& out, const at::Tensor& in, const char* phase);

}  // namespace nemo_rl::distributed
