#include "process/unfinished.h"

#include <unistd.h>

#include <atomic>
#include <cstdlib>

namespace nemo_rl::process {
namespace {

std::atomic<pid_t> unfinished_process{0};

void at_exit(int status) {
  if (status != 0 || unfinished_process != getpid()) return;
  static const char text[] = "\nerror: exit(0) was called in the middle of the work: it ends here, unfinished\n";
  if (write(STDERR_FILENO, text, sizeof(text) - 1) < 0) _exit(1);  // the terminal may be gone
  _exit(1);
}

}  // namespace

void set_unfinished(bool unfinished) {
#if defined(__GLIBC__)
  static const int registered = on_exit([](int status, void*) { at_exit(status); }, nullptr);
#else
  static const int registered = std::atexit([] { at_exit(0); });
#endif
  static_cast<void>(registered);
  unfinished_process = unfinished ? getpid() : 0;
}

}  // namespace nemo_rl::process
