#include "process/signal_watch.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace nemo_rl::process {

SignalWatch::SignalWatch(int read_end, int forward_to, std::vector<int> signals, std::chrono::duration<double> grace)
    : read_end_(read_end), forward_to_(forward_to), signals_(std::move(signals)), grace_(grace), owner_(getpid()) {
  // the thread takes no signal itself: they are the main thread's, whose system calls they interrupt
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { work(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

SignalWatch::~SignalWatch() { close(); }

void SignalWatch::close() {
  if (!thread_.joinable()) return;
  if (getpid() != owner_) return thread_.detach();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
  }
  closing_.notify_all();
  thread_.join();
}

void SignalWatch::work() {
  int seen = 0;
  unsigned char number = 0;
  while (true) {
    const ssize_t got = read(read_end_, &number, 1);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    if (forward_to_ >= 0) {
      [[maybe_unused]] const ssize_t written = write(forward_to_, &number, 1);  // its pipe may be full or gone
    }
    const bool counts = std::find(signals_.begin(), signals_.end(), number) != signals_.end();
    seen += counts && !(number == SIGHUP && seen > 0);
    if (seen == 2) end_after_grace(number);
  }
  ::close(read_end_);
}

void SignalWatch::end_after_grace(int number) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!closing_.wait_for(lock, grace_, [this] { return closed_; })) _exit(128 + number);
}

}  // namespace nemo_rl::process
