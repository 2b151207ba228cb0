#include "process/signal_watch.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <string>

namespace nemo_rl::process {

namespace {

std::string name_of(int number) {
  switch (number) {
    case SIGINT:
      return "interrupted";
    case SIGTERM:
      return "ended by SIGTERM";
    case SIGHUP:
      return "ended by SIGHUP";
    case SIGUSR1:
      return "ended by SIGUSR1";
    default:
      return "ended by signal " + std::to_string(number);
  }
}

}  // namespace

struct SignalWatch::State {
  int read_end, forward_to;
  std::vector<int> signals;
  std::chrono::duration<double> grace;
  std::mutex mutex;
  std::condition_variable closing;
  bool closed = false;

  void end_after_grace(int number) {
    std::unique_lock<std::mutex> lock(mutex);
    if (closing.wait_for(lock, grace, [this] { return closed; })) return;
    // the main thread, which would say so, does not come back, or its code has caught the exception
    const std::string said = "\n" + name_of(number) + ": stopped at once\n";
    [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, said.data(), said.size());
    _exit(128 + number);
  }
};

SignalWatch::SignalWatch(int read_end, int forward_to, std::vector<int> signals, std::chrono::duration<double> grace)
    : state_(std::make_shared<State>()), owner_(getpid()) {
  state_->read_end = read_end;
  state_->forward_to = forward_to;
  state_->signals = std::move(signals);
  state_->grace = grace;
  // the thread takes no signal itself: they are the main thread's, whose system calls they interrupt
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([state = state_] { work(*state); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

SignalWatch::~SignalWatch() {
  if (thread_.joinable()) thread_.detach();
}

void SignalWatch::close(int write_end) {
  if (!thread_.joinable()) return;
  if (getpid() != owner_) {
    thread_.detach();
  } else {
    {
      const std::lock_guard<std::mutex> lock(state_->mutex);
      state_->closed = true;
    }
    state_->closing.notify_all();
    const unsigned char end = 0;
    while (write(write_end, &end, 1) < 0 && (errno == EINTR || errno == EAGAIN)) std::this_thread::yield();
    thread_.join();
  }
  ::close(write_end);
}

void SignalWatch::work(State& state) {
  int seen = 0;
  unsigned char number = 0;
  while (true) {
    const ssize_t got = read(state.read_end, &number, 1);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0 || number == 0) break;
    if (state.forward_to >= 0) {
      [[maybe_unused]] const ssize_t written = write(state.forward_to, &number, 1);  // its pipe may be full or gone
    }
    const bool counts = std::find(state.signals.begin(), state.signals.end(), number) != state.signals.end();
    seen += counts && !(number == SIGHUP && seen > 0);
    if (seen == 2) state.end_after_grace(number);
  }
  ::close(state.read_end);
}

}  // namespace nemo_rl::process
