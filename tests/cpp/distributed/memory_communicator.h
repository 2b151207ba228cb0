// Ranks that are threads of this process: messages are copies in memory.
#pragma once
#include <ATen/ATen.h>

#include <barrier>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "distributed/communicator.h"
#include "runtime/tensor.h"

namespace nemo_rl::distributed {

struct Meeting {
  explicit Meeting(int size) : barrier(size), given(static_cast<std::size_t>(size)) {}
  std::barrier<> barrier;
  std::vector<at::Tensor> given;
  std::map<std::pair<int, int>, at::Tensor> letters;  ///< (from, to): one at a time
  std::mutex mutex;
  std::condition_variable changed;
};

class MemoryCommunicator : public Communicator {
 public:
  MemoryCommunicator(Meeting& meeting, int rank)
      : Communicator(rank, static_cast<int>(meeting.given.size())), meeting_(meeting) {}

  void all_to_all(const at::Tensor& out, const at::Tensor& in, const char*) override {
    exchange(in, [&](int r, const at::Tensor& theirs) { out[r].copy_(theirs[rank()]); });
  }
  void all_gather(const at::Tensor& out, const at::Tensor& in, const char*) override {
    exchange(in, [&](int r, const at::Tensor& theirs) { out[r].copy_(theirs); });
  }
  void broadcast(const at::Tensor& tensor, int root, const char*) override {
    exchange(tensor, [&](int r, const at::Tensor& theirs) {
      if (r == root && r != rank()) tensor.copy_(theirs);
    });
  }
  void send(const at::Tensor& tensor, int to, const char*) override {
    std::unique_lock lock(meeting_.mutex);
    meeting_.changed.wait(lock, [&] { return !meeting_.letters.contains({rank(), to}); });
    meeting_.letters[{rank(), to}] = tensor.clone();
    meeting_.changed.notify_all();
  }
  void receive(const at::Tensor& tensor, int from, const char*) override {
    std::unique_lock lock(meeting_.mutex);
    meeting_.changed.wait(lock, [&] { return meeting_.letters.contains({from, rank()}); });
    tensor.copy_(meeting_.letters.extract({from, rank()}).mapped());
    meeting_.changed.notify_all();
  }
  void barrier(const char*) override { meeting_.barrier.arrive_and_wait(); }

 private:
  void exchange(const at::Tensor& mine, const std::function<void(int, const at::Tensor&)>& take) {
    meeting_.given[static_cast<std::size_t>(rank())] = mine;
    meeting_.barrier.arrive_and_wait();
    for (int r = 0; r < size(); ++r) take(r, meeting_.given[static_cast<std::size_t>(r)]);
    meeting_.barrier.arrive_and_wait();
  }
  Meeting& meeting_;
};

/// f(communicator) on `size` threads.
inline void on_ranks(int size, const std::function<void(Communicator&)>& f) {
  Meeting meeting(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      MemoryCommunicator communicator(meeting, rank);
      f(communicator);
    });
  for (auto& thread : threads) thread.join();
}

}  // namespace nemo_rl::distributed
