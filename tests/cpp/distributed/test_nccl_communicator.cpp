// The host side of NCCL's back end against the emulation of tests/nccl_emulation: ranks are threads, device memory is
// host memory. Each test ends with the emulation's own counts: nothing left, nothing aborted twice, no rule of NCCL
// broken.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <numeric>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "distributed/nccl_communicator.h"
#include "distributed/self_test.h"
#include "distributed/shards.h"
#include "nccl_emulation/control.h"
#include "runtime/tensor.h"

namespace nemo_rl::distributed {
namespace {

using nccl_emulation::kForever;
using nccl_emulation::Session;
using Body = std::function<void(Communicator&)>;

constexpr double kPlenty = 60.0;
constexpr double kShort = 0.3;    // seconds of a deadline that is to pass
constexpr double kAtMost = 10.0;  // a call with that deadline has ended by then, also on a busy machine

class NcclCommunicator : public ::testing::Test {
 protected:
  /// body(communicator) on `size` threads; what a thread throws is thrown here, the lowest rank's first.
  void on_ranks(int size, const Body& body, double seconds = kPlenty) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank)
      threads.emplace_back([&, rank] {
        try {
          body(*connect_by_nccl(store, rank, size, at::kCPU, seconds));
        } catch (...) {
          errors[static_cast<std::size_t>(rank)] = std::current_exception();
        }
      });
    for (auto& thread : threads) thread.join();
    for (const auto& error : errors)
      if (error) std::rethrow_exception(error);
  }

  /// Two ranks meet; rank 0 does `body` and must fail with Error. Rank 1 only waits until that is over, and is cut off.
  template <class Error>
  Error rank_0_fails(const Body& body, double seconds = kShort) {
    std::exception_ptr error;
    std::atomic<int> met = 0;
    std::atomic<bool> over = false;
    on_ranks(
        2,
        [&](Communicator& ranks) {
          for (++met; met < 2 && session.counts().live == 2;) std::this_thread::yield();
          if (ranks.rank() == 0) {
            try {
              body(ranks);
            } catch (...) {
              error = std::current_exception();
            }
            session.cut();  // or rank 1 would wait for an answer to its goodbye
            over = true;
          }
          while (!over) std::this_thread::yield();
        },
        seconds);
    return caught<Error>([&] { error ? std::rethrow_exception(error) : void(); });
  }

  /// The error that f must throw, of this very class.
  template <class Error>
  static Error caught(const std::function<void()>& f) {
    try {
      f();
    } catch (const Error& error) {
      EXPECT_EQ(typeid(error), typeid(Error)) << error.what();
      return error;
    }
    throw std::logic_error("nothing was thrown");
  }

  void waits_for(int kernels) {
    while (session.counts().kernels < kernels) std::this_thread::yield();
  }

  void ends_cleanly(int aborted) {
    const auto counts = session.counts();
    EXPECT_EQ(counts.aborted, aborted);
    EXPECT_EQ(counts.live, 0) << "communicators that nobody ended";
    EXPECT_EQ(counts.events, 0) << "events that nobody destroyed";
    EXPECT_EQ(counts.made, counts.aborted + counts.destroyed);
    EXPECT_EQ(session.misuses(), std::vector<std::string>{});
  }

  static void names(const CommunicatorError& error, int rank, const std::string& phase, double least) {
    EXPECT_EQ(error.rank, rank);
    EXPECT_EQ(error.phase, phase);
    EXPECT_GE(error.seconds, least);
    EXPECT_LT(error.seconds, kAtMost);
    const std::string text = error.what();
    EXPECT_EQ(text.find("rank " + std::to_string(rank) + " of 2: " + phase + " failed after "), 0u) << text;
  }

  Session session;
};

/// [rank * 1000 + i] in `dtype`, of this shape.
at::Tensor numbers(int rank, at::IntArrayRef shape, at::ScalarType dtype) {
  const auto n = c10::multiply_integers(shape);
  return (at::arange(n) % 7 + rank * 10).to(dtype).view(shape);
}

// ---------------------------------------------------------------- results

TEST_F(NcclCommunicator, PassesTheSelfTestOfARun) {
  on_ranks(3, [](Communicator& ranks) { self_test({&ranks, [](auto*) {}}, at::kCPU, 1000); });
  ends_cleanly(/*aborted=*/0);
}

class NcclResults : public NcclCommunicator, public ::testing::WithParamInterface<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, NcclResults, ::testing::Values(1, 2, 3, 5));

TEST_P(NcclResults, EveryCollectiveReturnsTheExpectedTensors) {
  const int size = GetParam();
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kLong, at::kByte})
    on_ranks(size, [&](Communicator& ranks) {
      ASSERT_EQ(ranks.size(), size);
      const int me = ranks.rank();
      const auto own = numbers(me, {3, 5}, dtype), many = numbers(me, {size, 2, 3}, dtype);
      auto all = at::zeros({size, 3, 5}, dtype), dealt = at::zeros_like(many);
      ranks.all_gather(all, own, "gather");
      ranks.all_to_all(dealt, many, "deal");
      for (int r = 0; r < size; ++r) {
        EXPECT_TRUE(at::equal(all[r], numbers(r, {3, 5}, dtype)));
        EXPECT_TRUE(at::equal(dealt[r], numbers(r, {size, 2, 3}, dtype)[me]));
      }
      for (int root = 0; root < size; ++root) {
        const auto told = own.clone();
        ranks.broadcast(told, root, "tell");
        EXPECT_TRUE(at::equal(told, numbers(root, {3, 5}, dtype)));
      }
      ranks.barrier("all are here");
    });
  ends_cleanly(/*aborted=*/0);
  EXPECT_EQ(session.counts().finalized, 4 * size);
}

/// The other ranks are those of a program whose communicators greet, and then take a broadcast, as vLLM's do.
TEST_P(NcclResults, BroadcastAfterTheHandshakeReturnsTheWeightsOfTheRoot) {
  const int size = GetParam();
  on_ranks(size, [&](Communicator& ranks) {
    nccl_greeting(ranks, "greeting");
    auto weight = ranks.rank() == 0 ? numbers(7, {3, 5}, at::kBFloat16) : at::zeros({3, 5}, at::kBFloat16);
    ranks.broadcast(weight, 0, "weights");
    EXPECT_TRUE(at::equal(weight, numbers(7, {3, 5}, at::kBFloat16)));
  });
  ends_cleanly(0);
}

TEST_F(NcclCommunicator, HandshakeTimesOutIfAnotherRankDoesNotTakePart) {
  const auto error = rank_0_fails<TimedOut>([](Communicator& ranks) { nccl_greeting(ranks, "greeting"); });
  names(error, 0, "greeting", kShort);
  EXPECT_EQ(session.misuses(), std::vector<std::string>{});
}

TEST_P(NcclResults, SendAndReceiveAroundARingSumTheTermsOfAllRanks) {
  const int size = GetParam();
  if (size == 1) return;
  on_ranks(size, [&](Communicator& ranks) {
    const int me = ranks.rank(), next = (me + 1) % size, last = (me + size - 1) % size;
    auto message = at::full({4}, 1.5);
    if (me == 0) ranks.send(message, next, "round");
    ranks.receive(message, last, "round");
    message += me;
    if (me > 0) ranks.send(message, next, "round");
    EXPECT_TRUE(at::equal(message, at::full({4}, 1.5 + (me == 0 ? size * (size - 1) / 2 : me * (me + 1) / 2))));
  });
  ends_cleanly(0);
}

TEST_F(NcclCommunicator, EmptyTensorsAreNotSent) {
  on_ranks(2, [&](Communicator& ranks) {
    const auto none = at::empty({2, 0});
    ranks.all_gather(at::empty({2, 0}), at::empty({0}), "nothing");
    ranks.all_to_all(none, none.clone(), "nothing");
    ranks.broadcast(none, 0, "nothing");
    ranks.rank() == 0 ? ranks.send(none, 1, "nothing") : ranks.receive(none, 0, "nothing");
  });
  ends_cleanly(0);
}

// ---------------------------------------------------------------- sums

TEST_F(NcclCommunicator, SumIsBitIdenticalWhicheverRankCallsFirst) {
  std::vector<at::Tensor> flats;
  for (int r = 0; r < 4; ++r) {
    at::manual_seed(static_cast<std::uint64_t>(r));
    flats.push_back(at::randn({1003}) * at::pow(10.0, at::randint(-4, 5, {1003}).to(at::kFloat)));
  }
  const auto wanted = (flats[0] + flats[1]) + (flats[2] + flats[3]);
  ASSERT_FALSE(at::equal(wanted, ((flats[3] + flats[2]) + flats[1]) + flats[0])) << "every order has these bits";
  std::vector<int> order{0, 1, 2, 3};
  do {
    std::atomic<int> met = 0;
    on_ranks(4, [&](Communicator& ranks) {
      const int me = ranks.rank();
      const auto flat = flats[static_cast<std::size_t>(me)].clone();
      ++met;
      while (met < 4) std::this_thread::yield();
      waits_for(static_cast<int>(std::find(order.begin(), order.end(), me) - order.begin()) % 4);
      Shards shards({&ranks, [](auto*) {}}, /*in_place=*/false);
      shards.reduce_scatter(flat, 16, "sum");
      shards.all_gather(flat, 16, "share");
      EXPECT_TRUE(at::equal(flat, wanted));
    });
  } while (std::next_permutation(order.begin(), order.end()));
  ends_cleanly(0);
}

// ---------------------------------------------------------------- waiting

TEST_F(NcclCommunicator, CallWaitsWhileNcclIsInProgress) {
  for (int r = 0; r < 2; ++r) session.faults(r) = {.questions_to_meet = 300, .questions_to_begin = 200};
  on_ranks(2, [&](Communicator& ranks) {
    auto all = at::zeros({2, 3});
    ranks.all_gather(all, at::full({3}, ranks.rank() + 1.0), "gather");
    EXPECT_TRUE(at::equal(all, at::tensor({1.0f, 1.0f, 1.0f, 2.0f, 2.0f, 2.0f}).view({2, 3})));
  });
  EXPECT_GE(session.counts().in_progress, 2 * (299 + 199));
  ends_cleanly(0);
}

TEST_F(NcclCommunicator, ConnectingTimesOutIfAnotherRankNeverConnects) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto error = caught<TimedOut>([&] { connect_by_nccl(store, 0, 2, at::kCPU, kShort); });
  names(error, 0, "meeting the other ranks", kShort);
  ends_cleanly(/*aborted=*/1);
}

TEST_F(NcclCommunicator, ConnectingWithoutRank0TimesOutAndCreatesNoCommunicator) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto error = caught<TimedOut>([&] { connect_by_nccl(store, 1, 2, at::kCPU, kShort); });
  names(error, 1, "meeting the other ranks", kShort);
  ends_cleanly(0);
  EXPECT_EQ(session.counts().made, 0);
}

TEST_F(NcclCommunicator, EveryOperationTimesOutAtTheDeadline) {
  const auto one = at::ones({4}), two = at::ones({2, 4});
  const std::vector<std::pair<std::string, Body>> calls{
      {"all_to_all", [&](Communicator& ranks) { ranks.all_to_all(two.clone(), two, "all_to_all"); }},
      {"all_gather", [&](Communicator& ranks) { ranks.all_gather(two.clone(), one, "all_gather"); }},
      {"broadcast", [&](Communicator& ranks) { ranks.broadcast(one, 1, "broadcast"); }},
      {"send", [&](Communicator& ranks) { ranks.send(one, 1, "send"); }},
      {"receive", [&](Communicator& ranks) { ranks.receive(one, 1, "receive"); }},
      {"barrier", [&](Communicator& ranks) { ranks.barrier("barrier"); }}};
  int before = 0;
  for (const auto& [phase, call] : calls) {
    names(rank_0_fails<TimedOut>(call), 0, phase, kShort);
    ends_cleanly(before += 2);  // and rank 1
  }
}

TEST_F(NcclCommunicator, OperationThatNcclNeverStartsTimesOut) {
  session.faults(0).questions_to_begin = kForever;
  const auto error = rank_0_fails<TimedOut>([](Communicator& ranks) { ranks.barrier("sleep"); });
  names(error, 0, "sleep", kShort);
  EXPECT_NE(std::string(error.what()).find("NCCL has not begun"), std::string::npos) << error.what();
  ends_cleanly(2);
}

TEST_F(NcclCommunicator, HangingAbortDoesNotBlockTheCaller) {
  session.faults(0).abort_hangs = true;
  names(rank_0_fails<TimedOut>([](Communicator& ranks) { ranks.barrier("hang"); }), 0, "hang", kShort);
  EXPECT_EQ(session.counts().aborted, 2);
  EXPECT_EQ(session.counts().live, 1);
}

// ---------------------------------------------------------------- errors

TEST_F(NcclCommunicator, LostPeerFailsTheCallAndAllLaterCalls) {
  std::jthread loses([&] {
    waits_for(1);
    session.cut();
  });
  const auto error = rank_0_fails<PeerLost>(
      [&](Communicator& ranks) {
        const auto first = caught<PeerLost>([&] { ranks.barrier("lost"); });
        names(first, 0, "lost", 0.0);
        EXPECT_NE(std::string(first.what()).find("another rank is gone (NCCL: remote process"), std::string::npos)
            << first.what();
        EXPECT_EQ(session.counts().aborted, 1);
        ranks.broadcast(at::ones({1}), 0, "later");
      },
      /*seconds=*/2.0);
  loses.join();
  names(error, 0, "later", 0.0);
  EXPECT_NE(std::string(error.what()).find("the connection ended when this failed: lost"), std::string::npos)
      << error.what();
  ends_cleanly(2);
}

TEST_F(NcclCommunicator, LocalErrorIsNotReportedAsALostPeer) {
  const Body barrier = [](Communicator& ranks) { ranks.barrier("work"); };
  int aborted = 0;
  for (const nccl_emulation::Faults& faults : {nccl_emulation::Faults{.state = ncclUnhandledCudaError},
                                               {.call_result = ncclInvalidArgument},
                                               {.event = cudaErrorLaunchFailure},
                                               {.state = ncclSystemError}}) {
    session.faults(0) = faults;
    const auto error = rank_0_fails<CommunicatorError>(barrier);
    names(error, 0, "work", 0.0);
    EXPECT_NE(std::string(error.what()).find("this rank cannot go on ("), std::string::npos) << error.what();
    ends_cleanly(aborted += 2);
  }
}

TEST_F(NcclCommunicator, FailedInitialisationLeavesNoCommunicator) {
  session.faults(0).meeting_result = ncclInvalidUsage;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  names(caught<CommunicatorError>([&] { connect_by_nccl(store, 0, 2, at::kCPU, kShort); }), 0,
        "meeting the other ranks", 0.0);
  ends_cleanly(0);
  EXPECT_EQ(session.counts().made, 0);
}

TEST_F(NcclCommunicator, FinalizeThatDoesNotCompleteIsFollowedByAnAbort) {
  session.faults(0).questions_to_finalize = kForever;
  on_ranks(2, [](Communicator& ranks) { ranks.barrier("work"); }, 2 * kShort);
  EXPECT_EQ(session.counts().finalized, 2);
  ends_cleanly(/*aborted=*/1);
}

TEST_F(NcclCommunicator, DifferentCollectivesOnTwoRanksAreAnError) {
  EXPECT_THROW(on_ranks(2,
                        [](Communicator& ranks) {
                          ranks.rank() == 0 ? ranks.barrier("a") : ranks.broadcast(at::ones({1}), 0, "b");
                        }),
               CommunicatorError);
  EXPECT_EQ(session.misuses(), std::vector<std::string>{"ranks take part in different collectives"});
  EXPECT_EQ(session.counts().live, 0);
}

// ---------------------------------------------------------------- mistakes of the caller

TEST_F(NcclCommunicator, InvalidArgumentsThrowBeforeAnythingIsSent) {
  on_ranks(2, [](Communicator& ranks) {
    const auto one = at::ones({4}), two = at::ones({2, 4});
    const int me = ranks.rank();
    EXPECT_THROW(ranks.broadcast(at::ones({4, 4}).t(), 0, "gaps"), std::runtime_error);
    EXPECT_THROW(ranks.broadcast(at::ones({4}, at::kMeta), 0, "device"), std::runtime_error);
    EXPECT_THROW(ranks.broadcast(one, 2, "rank"), std::runtime_error);
    EXPECT_THROW(ranks.send(one, me, "self"), std::runtime_error);
    EXPECT_THROW(ranks.receive(one, -1, "rank"), std::runtime_error);
    EXPECT_THROW(ranks.all_gather(at::ones({3, 4}), one, "shape"), std::runtime_error);
    EXPECT_THROW(ranks.all_to_all(at::ones({2, 3}), two, "shape"), std::runtime_error);
    ranks.barrier("still works");
  });
  ends_cleanly(0);
}

TEST_F(NcclCommunicator, SecondRendezvousOnTheSameStoreThrows) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  connect_by_nccl(store, 0, 1, at::kCPU, kPlenty);
  EXPECT_THROW(connect_by_nccl(store, 0, 1, at::kCPU, kPlenty), std::invalid_argument);
  EXPECT_THROW(connect_by_nccl(store, 0, 1, at::kCPU, 0.0), std::invalid_argument);
  EXPECT_THROW(connect_by_nccl(store, 2, 2, at::kCPU, kPlenty), std::invalid_argument);
  ends_cleanly(0);
}

TEST_F(NcclCommunicator, ConcurrentCallFromASecondThreadThrows) {
  on_ranks(2, [&](Communicator& ranks) {
    if (ranks.rank() == 1) return ranks.receive(at::ones({4}), 0, "one");
    waits_for(1);  // rank 1 waits
    ranks.send(at::ones({4}), 1, "one");
  });
  rank_0_fails<TimedOut>([&](Communicator& ranks) {
    std::jthread other([&] {
      waits_for(1);
      EXPECT_THROW(ranks.barrier("two"), std::runtime_error);
    });
    const auto error = caught<TimedOut>([&] { ranks.receive(at::ones({4}), 1, "one"); });
    other.join();
    throw error;
  });
  ends_cleanly(2);
}

TEST(NcclOfTheCore, CommunicatorOfADeviceThatIsNoGpuThrows) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (const char* device : {"cpu", "cuda"})
    EXPECT_THROW(nccl_communicator(store, 0, 1, at::Device(device), 1.0), std::invalid_argument) << device;
}

// ---------------------------------------------------------------- by device

class Recording final : public Communicator {
 public:
  Recording(std::string name, std::vector<std::string>& calls, int size = 2)
      : Communicator(1, size), name_(std::move(name)), calls_(calls) {}
  void all_to_all(const at::Tensor&, const at::Tensor&, const char*) override { note("all_to_all"); }
  void all_gather(const at::Tensor&, const at::Tensor&, const char*) override { note("all_gather"); }
  void broadcast(const at::Tensor&, int root, const char*) override { note("broadcast", root); }
  void send(const at::Tensor&, int to, const char*) override { note("send", to); }
  void receive(const at::Tensor&, int from, const char*) override { note("receive", from); }
  void barrier(const char*) override { note("barrier"); }

 private:
  void note(const std::string& what, int rank = -1) {
    calls_.push_back(name_ + " " + what + (rank < 0 ? "" : " " + std::to_string(rank)));
  }
  std::string name_;
  std::vector<std::string>& calls_;
};

TEST(CommunicatorByDevice, CollectiveUsesTheCommunicatorOfTheDeviceOfTheTensor) {
  std::vector<std::string> calls, wanted;
  const auto ranks =
      communicator_by_device(std::make_shared<Recording>("cpu", calls), std::make_shared<Recording>("device", calls));
  EXPECT_EQ(ranks->rank(), 1);
  EXPECT_EQ(ranks->size(), 2);
  for (const std::string name : {"cpu", "device"}) {
    const auto t = at::empty({2}, name == "cpu" ? at::kCPU : at::kMeta);
    ranks->all_to_all(t, t, ""), ranks->all_gather(t, t, ""), ranks->broadcast(t, 1, ""), ranks->send(t, 0, "");
    ranks->receive(t, 0, ""), ranks->barrier("");
    for (const char* call : {"all_to_all", "all_gather", "broadcast 1", "send 0", "receive 0"})
      wanted.push_back(name + " " + call);
    wanted.push_back("cpu barrier");
  }
  EXPECT_EQ(calls, wanted);
  EXPECT_THROW(communicator_by_device(std::make_shared<Recording>("cpu", calls),
                                      std::make_shared<Recording>("device", calls, 3)),
               std::runtime_error);
}

}  // namespace
}  // namespace nemo_rl::distributed
