// The test that the connections of a run pass before it begins, on ranks that are threads, some of which damage data.
#include <gtest/gtest.h>

#include <string>

#include "distributed/memory_communicator.h"
#include "distributed/self_test.h"

namespace nemo_rl::distributed {
namespace {

constexpr std::int64_t kElements = 5000;

std::shared_ptr<Communicator> borrowed(Communicator& communicator) {
  return {&communicator, [](auto*) {}};
}

/// Flips the lowest bit of one number that `operation` brings to rank 1. Reading each other's memory is not offered.
class Damaging : public Communicator {
 public:
  Damaging(Communicator& sound, std::string operation)
      : Communicator(sound.rank(), sound.size()), sound_(sound), operation_(std::move(operation)) {}

  void all_to_all(const at::Tensor& out, const at::Tensor& in, const char* phase) override {
    sound_.all_to_all(out, in, phase);
    damage("all_to_all", out);
  }
  void all_gather(const at::Tensor& out, const at::Tensor& in, const char* phase) override {
    sound_.all_gather(out, in, phase);
    if (out.scalar_type() == at::kLong) out.zero_();  // what ranks tell of their memory
    damage("all_gather", out);
  }
  void broadcast(const at::Tensor& tensor, int root, const char* phase) override {
    sound_.broadcast(tensor, root, phase);
    damage("broadcast", tensor);
  }
  void send(const at::Tensor& tensor, int to, const char* phase) override { sound_.send(tensor, to, phase); }
  void receive(const at::Tensor& tensor, int from, const char* phase) override {
    sound_.receive(tensor, from, phase);
    damage("receive", tensor);
  }
  void barrier(const char* phase) override { sound_.barrier(phase); }

 private:
  void damage(const std::string& operation, const at::Tensor& tensor) const {
    if (operation == operation_ && rank() == 1 && tensor.scalar_type() == at::kFloat)
      tensor.view(-1)[0].view(at::kInt).bitwise_xor_(1);
  }

  Communicator& sound_;
  std::string operation_;
};

/// What each of `size` ranks says of its connections, of which rank 1 damages the results of `operation`.
std::vector<std::string> errors_of(int size, const std::string& operation) {
  std::vector<std::string> errors(static_cast<std::size_t>(size));
  on_ranks(size, [&](Communicator& sound) {
    Damaging ranks(sound, operation);
    try {
      self_test(borrowed(ranks), at::kCPU, kElements);
    } catch (const CommunicatorError& error) {
      errors[static_cast<std::size_t>(error.rank)] = error.what();
    }
  });
  return errors;
}

TEST(SelfTest, PassesOnSoundConnections) {
  for (const int size : {1, 2, 3, 5})
    on_ranks(size, [](Communicator& ranks) { EXPECT_NO_THROW(self_test(borrowed(ranks), at::kCPU, kElements)); });
}

TEST(SelfTest, NamesTheRankAndTheOperationWhoseResultDiffersInOneBit) {
  const std::vector<std::pair<std::string, std::string>> phases = {
      {"all_to_all", "self-test: sums over all ranks"},
      {"all_gather", "self-test: sums over all ranks"},
      {"broadcast", "self-test: broadcasts"},
      {"receive", "self-test: messages between two ranks"}};
  for (const auto& [operation, phase] : phases) {
    const auto errors = errors_of(2, operation);
    EXPECT_EQ(errors[1].find("rank 1 of 2: " + phase), 0u) << operation << ": " << errors[1];
    EXPECT_NE(errors[1].find(" differs in 1 of 257 numbers on cpu"), std::string::npos) << errors[1];
  }
}

TEST(CommunicatorThroughCpu, MovesTheSameNumbersAsTheCommunicatorBehindIt) {
  on_ranks(3, [](Communicator& sound) {
    const auto ranks = communicator_through_cpu(borrowed(sound));
    EXPECT_NO_THROW(self_test(ranks, at::kCPU, kElements));
    const auto own = at::full({4}, sound.rank(), at::kInt);
    auto all = at::zeros({3, 4}, at::kInt);
    ranks->all_gather(all, own, "gather");
    EXPECT_TRUE(at::equal(all, at::arange(3, at::kInt).view({3, 1}).expand({3, 4})));
    ranks->barrier("together");
  });
}

}  // namespace
}  // namespace nemo_rl::distributed
