// What a receiver refuses, and that it then keeps its weights; ranks are threads of this process.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>

#include "distributed/memory_communicator.h"
#include "refit/delta.h"
#include "refit/refit.h"
#include "runtime/tensor.h"

namespace nemo_rl::refit {
namespace {

using distributed::Communicator;
using distributed::Meeting;
using distributed::MemoryCommunicator;

/// Changes what a rank receives: message number `number` goes through `change`.
class Damaging final : public Communicator {
 public:
  Damaging(Meeting& meeting, int rank, std::function<void(int, const at::Tensor&)> change)
      : Communicator(rank, static_cast<int>(meeting.given.size())), inner_(meeting, rank), change_(std::move(change)) {}
  void all_to_all(const at::Tensor& out, const at::Tensor& in, const char* phase) override {
    inner_.all_to_all(out, in, phase);
  }
  void all_gather(const at::Tensor& out, const at::Tensor& in, const char* phase) override {
    inner_.all_gather(out, in, phase);
  }
  void broadcast(const at::Tensor& tensor, int root, const char* phase) override {
    inner_.broadcast(tensor, root, phase);
    if (rank() != root && change_) change_(number_, tensor);
    ++number_;
  }
  void send(const at::Tensor& tensor, int to, const char* phase) override { inner_.send(tensor, to, phase); }
  void receive(const at::Tensor& tensor, int from, const char* phase) override { inner_.receive(tensor, from, phase); }
  void barrier(const char* phase) override { inner_.barrier(phase); }

 private:
  MemoryCommunicator inner_;
  std::function<void(int, const at::Tensor&)> change_;
  int number_ = 0;
};

NamedTensors weights(float begin) {
  return {{"embedding", at::arange(begin, begin + 24).view({6, 4})},
          {"norm", at::arange(begin, begin + 5).to(at::kBFloat16)},
          {"head", at::arange(begin, begin + 30).view({3, 10}).to(at::kDouble)}};
}

bool equal(const NamedTensors& a, const NamedTensors& b) {
  for (std::size_t i = 0; i < a.size(); ++i)
    if (!at::equal(a[i].second, b[i].second)) return false;
  return true;
}

/// What the ranks said: "" of those that were content.
struct Outcome {
  std::string publisher, error;     ///< of rank 0, and of rank 1
  std::vector<std::string> errors;  ///< of all engines
  std::vector<NamedTensors> engines;
  Transfer sent;
};

template <class F>
std::string error_of(const F& f) {
  try {
    f();
  } catch (const RefitRefused& error) {
    return std::string("refused: ") + error.what();
  } catch (const PeerRefused& error) {
    return std::string("peer refused: ") + error.what();
  }
  return "";
}

/// One refit to `engines` engines that expect `target` and version 7; engine 1 gets what `change` makes of messages.
Outcome refit(const NamedTensors& source, const NamedTensors& target, std::uint64_t version = 7,
              std::int64_t bucket_bytes = 64, const std::function<void(int, const at::Tensor&)>& change = {},
              std::size_t engines = 1, bool in_place = false) {
  Outcome outcome;
  Meeting meeting(static_cast<int>(engines) + 1);
  outcome.errors.resize(engines), outcome.engines.resize(engines);
  for (auto& engine : outcome.engines)
    for (const auto& [name, tensor] : target) engine.emplace_back(name, tensor.clone());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < engines; ++i)
    threads.emplace_back([&, i] {
      Receiver receiver(std::make_shared<Damaging>(meeting, static_cast<int>(i) + 1, i == 0 ? change : nullptr),
                        outcome.engines[i]);
      outcome.errors[i] = error_of([&] { receiver.receive(7); });
    });
  Publisher publisher(std::make_shared<MemoryCommunicator>(meeting, 0), bucket_bytes, false, in_place);
  outcome.publisher = error_of([&] { outcome.sent = publisher.publish(source, version); });
  for (auto& thread : threads) thread.join();
  outcome.error = outcome.errors[0];
  return outcome;
}

void expect_refused(const Outcome& outcome, const std::string& words) {
  EXPECT_EQ(outcome.error.find("refused: rank 1 of "), 0U) << outcome.error;
  EXPECT_NE(outcome.error.find(words), std::string::npos) << outcome.error;
  EXPECT_NE(outcome.error.find("the old weights stay"), std::string::npos) << outcome.error;
  EXPECT_EQ(outcome.publisher.find("peer refused: "), 0U) << outcome.publisher;
  EXPECT_NE(outcome.publisher.find("was refused by rank 1"), std::string::npos) << outcome.publisher;
  for (const auto& engine : outcome.engines) EXPECT_TRUE(equal(engine, weights(-99)));
}

TEST(Refit, TransferredWeightsAreBitIdenticalForAnyBucketSize) {
  for (std::int64_t bucket : {1, 7, 64, 96, 100000}) {
    const auto outcome = refit(weights(0), weights(-99), 7, bucket, {}, 3);
    EXPECT_EQ(outcome.publisher + outcome.error, "");
    EXPECT_EQ(outcome.sent.bytes, 24 * 4 + 5 * 2 + 30 * 8);
    EXPECT_EQ(outcome.sent.buckets, (outcome.sent.bytes + bucket - 1) / bucket);
    for (const auto& engine : outcome.engines) EXPECT_TRUE(equal(engine, weights(0)));
  }
}

TEST(Refit, WeightsReadInPlaceOnOneMachineAreBitIdentical) {
  for (std::int64_t bucket : {1, 7, 64, 96, 100000}) {
    const auto outcome = refit(weights(0), weights(-99), 7, bucket, {}, 3, true);
    EXPECT_EQ(outcome.publisher + outcome.error, "");
    EXPECT_EQ(outcome.sent.sent, refit(weights(0), weights(-99), 7, bucket, {}, 3).sent.sent);
    for (const auto& engine : outcome.engines) EXPECT_TRUE(equal(engine, weights(0)));
  }
}

TEST(Refit, SecondInPlaceRefitUsesOneLargeBucket) {
  Meeting meeting(2);
  auto engine = weights(-99);
  std::thread thread([&] {
    Receiver receiver(std::make_shared<MemoryCommunicator>(meeting, 1), engine);
    receiver.receive(7), receiver.receive(8);
  });
  Publisher publisher(std::make_shared<MemoryCommunicator>(meeting, 0), /*bucket_bytes=*/64);
  EXPECT_EQ(publisher.publish(weights(0), 7).buckets, 6);
  EXPECT_EQ(publisher.publish(weights(1), 8).buckets, 1);
  thread.join();
  EXPECT_TRUE(equal(engine, weights(1)));
}

TEST(Refit, CorruptDigestsOrAddressesOfInPlaceWeightsAreRejected) {
  const std::int64_t message_bytes = 3 * 16 + 8;  // digest and address of three tensors, and the digest of them
  for (std::int64_t byte = 0; byte < message_bytes; ++byte) {
    const auto flip = [&](int number, const at::Tensor& message) {
      if (number == 2) message[byte] = message[byte].item<std::uint8_t>() ^ (1 << (byte % 8));
    };
    expect_refused(refit(weights(0), weights(-99), 7, 100000, flip, 2, true),
                   "bucket 1 of 1: its digests were damaged on the way");
  }
}

TEST(Refit, CorruptHeaderIsRejected) {
  const auto flip = [](int number, const at::Tensor& message) {
    if (number == 0) message[3] = message[3].item<std::int64_t>() ^ 16;
  };
  Meeting meeting(2);
  auto engine = weights(-99);
  std::string error;
  std::thread thread([&] {
    Receiver receiver(std::make_shared<Damaging>(meeting, 1, flip), engine);
    error = error_of([&] { receiver.receive(7); });
  });
  MemoryCommunicator root(meeting, 0);
  root.broadcast(at::tensor({std::int64_t{0x7469'6665'725f'6c72}, std::int64_t{8}, std::int64_t{1},
                             std::int64_t{0x7469'6665'725f'6c72}},
                            at::kLong),
                 0, "header");
  thread.join();
  EXPECT_NE(error.find("its header is damaged"), std::string::npos) << error;
}

TEST(Refit, TensorsAreAcceptedInAnyOrder) {
  auto source = weights(0);
  std::swap(source[0], source[2]);
  EXPECT_TRUE(equal(refit(source, weights(-99)).engines[0], weights(0)));
}

TEST(Refit, EveryFlippedBitIsRejectedWithTheNameOfItsTensor) {
  const std::int64_t embedding = 24 * 4, norm = 5 * 2, head = 30 * 8;
  for (std::int64_t byte = 0; byte < embedding + norm + head; ++byte) {
    const auto flip = [&](int number, const at::Tensor& message) {
      if (number == 2) message[byte] = message[byte].item<std::uint8_t>() ^ (1 << (byte % 8));
    };
    const auto* name = byte < embedding ? "embedding" : byte < embedding + norm ? "norm" : "head";
    expect_refused(refit(weights(0), weights(-99), 7, 100000, flip, 2), std::string("bucket 1 of 1: ") + name);
  }
}

TEST(Refit, ErrorForACorruptTensorNamesItsBucket) {
  const auto flip = [](int number, const at::Tensor& message) {
    if (number == 4) message[3] = message[3].item<std::uint8_t>() ^ 16;
  };
  expect_refused(refit(weights(0), weights(-99), 7, 64, flip), "bucket 3 of 6: head has digest");
}

TEST(Refit, CorruptManifestIsRejected) {
  const auto flip = [](int number, const at::Tensor& message) {
    if (number == 1) message[30] = message[30].item<std::uint8_t>() ^ 1;
  };
  expect_refused(refit(weights(0), weights(-99), 7, 64, flip), "the manifest was damaged on the way");
}

TEST(Refit, UnexpectedWeightVersionIsRejected) {
  expect_refused(refit(weights(0), weights(-99), 8), "it is version 8, version 7 was expected");
}

TEST(Refit, MissingUnknownDuplicateOrMisshapedTensorsAreRejected) {
  auto source = weights(0);
  source.pop_back();
  expect_refused(refit(source, weights(-99)), "missing: head");
  source = weights(0);
  source.emplace_back("bias", at::zeros({2}));
  expect_refused(refit(source, weights(-99)), "unknown: bias");
  source.back() = source.front();
  expect_refused(refit(source, weights(-99)), "twice: embedding");
  source = weights(0);
  source[0].second = source[0].second.view({4, 6});
  expect_refused(refit(source, weights(-99)), "embedding is [4, 6] Float, [6, 4] Float was expected");
  source = weights(0);
  source[1].second = source[1].second.to(at::kHalf);
  expect_refused(refit(source, weights(-99)), "norm is [5] Half, [5] BFloat16 was expected");
}

TEST(Refit, RefitRejectedByOneEngineIsAppliedByNoEngine) {
  const auto flip = [](int number, const at::Tensor& message) {
    if (number == 2) message[0] = message[0].item<std::uint8_t>() ^ 1;
  };
  const auto outcome = refit(weights(0), weights(-99), 7, 64, flip, 3);
  expect_refused(outcome, "embedding");
  for (std::size_t i : {1, 2}) EXPECT_EQ(outcome.errors[i].find("peer refused: "), 0U) << outcome.errors[i];
}

// ---- what has changed

/// `count` weights, of which each with probability `share` differs from those of another seed.
at::Tensor some_changed(at::ScalarType type, std::int64_t count, double share, std::uint64_t seed) {
  const auto generator = at::detail::createCPUGenerator(seed);
  auto weights = at::arange(1, count + 1).to(type);
  const auto changes = at::rand({count}, generator) < share;
  return at::where(changes, -weights, weights).contiguous();
}

TEST(RefitDelta, DeltaOfOldAndNewWeightsIsSmallerAndRestoresTheNewWeights) {
  for (const auto type : {at::kBFloat16, at::kFloat, at::kDouble})
    for (const std::int64_t count : {1, 63, 64, 65, 1000})
      for (const double share : {0.0, 0.02, 0.5, 1.0}) {
        const auto old = some_changed(type, count, 0, 1), now = some_changed(type, count, share, 2);
        const auto width = static_cast<std::int64_t>(c10::elementSize(type)), size = count * width;
        std::vector<char> changes(static_cast<std::size_t>(size));
        const auto* const old_bytes = static_cast<const char*>(old.const_data_ptr());
        const auto length =
            encode_changes(old_bytes, static_cast<const char*>(now.const_data_ptr()), size, width, changes.data());
        if (count == 1000) EXPECT_EQ(length < size, share < 1.0) << share << " " << width;
        if (count == 1000 && share == 0) EXPECT_EQ(length, 128);
        auto taken = old.clone();
        auto* const to = static_cast<char*>(taken.data_ptr());
        EXPECT_TRUE(apply_changes(changes.data(), length, size, width, to));
        EXPECT_TRUE(at::equal(taken, now));
        EXPECT_FALSE(apply_changes(changes.data(), size + 1, size, width, to));
        if (length == size) continue;
        EXPECT_FALSE(apply_changes(changes.data(), length - 1, size, width, to));
        changes[0] ^= 1;  // one change more, or one less
        EXPECT_FALSE(apply_changes(changes.data(), length, size, width, to));
      }
}

TEST(RefitDelta, DeltaWithAnIndexBeyondTheLastWeightIsRejected) {
  std::vector<char> changes(10), to(3 * 2);
  changes[1] = 1;  // weight 8 of 3
  EXPECT_FALSE(apply_changes(changes.data(), 10, 6, 2, to.data()));
}

NamedTensors step_of(int step) {
  return {{"a", some_changed(at::kBFloat16, 1000, step == 0 ? 0 : 0.05, static_cast<std::uint64_t>(step))},
          {"b", some_changed(at::kFloat, 500, step == 0 ? 0 : 0.05, static_cast<std::uint64_t>(step))}};
}

/// Three refits of changes to two engines; what the first one gets goes through `change`. The errors of that engine,
/// and the bytes sent.
struct Several {
  std::vector<std::string> errors;
  std::vector<std::int64_t> sent;
  NamedTensors engine;
};

Several several(std::int64_t bucket_bytes, const std::function<void(int, const at::Tensor&)>& change = {}) {
  Several outcome;
  Meeting meeting(3);
  const auto receive = [&](int rank, NamedTensors& weights, std::vector<std::string>& errors, auto damage) {
    for (const auto& [name, tensor] : step_of(0)) weights.emplace_back(name, at::zeros_like(tensor));
    Receiver receiver(std::make_shared<Damaging>(meeting, rank, damage), weights);
    for (std::uint64_t version = 0; version < 3; ++version)
      errors.push_back(error_of([&] { receiver.receive(version); }));
  };
  NamedTensors other;
  std::vector<std::string> others;
  std::thread first([&] { receive(1, outcome.engine, outcome.errors, change); });
  std::thread second([&] { receive(2, other, others, std::function<void(int, const at::Tensor&)>()); });
  Publisher publisher(std::make_shared<MemoryCommunicator>(meeting, 0), bucket_bytes, /*delta=*/true);
  for (int version = 0; version < 3; ++version) {
    Transfer done;
    error_of([&] { done = publisher.publish(step_of(version), static_cast<std::uint64_t>(version)); });
    outcome.sent.push_back(done.sent);
  }
  first.join(), second.join();
  EXPECT_TRUE(equal(other, outcome.engine));
  return outcome;
}

TEST(RefitDelta, RefitByDeltaSendsFewerBytesAndGivesTheSameWeights) {
  for (const std::int64_t bucket : {37, 300, 100000}) {
    const auto outcome = several(bucket);
    EXPECT_EQ(outcome.errors, std::vector<std::string>(3));
    EXPECT_TRUE(equal(outcome.engine, step_of(2)));
    if (bucket == 100000) EXPECT_LT(outcome.sent[1], outcome.sent[0] / 3);
  }
}

TEST(RefitDelta, AllWeightsAreSentAfterACorruptDeltaIsRejected) {
  // messages: 0 to 2 of version 0 (header, manifest, bucket), 3 to 6 of version 1 (its length before the bucket)
  const auto outcome = several(100000, [](int number, const at::Tensor& message) {
    if (number == 6) message[200] = message[200].item<std::uint8_t>() ^ 4;
  });
  EXPECT_NE(outcome.errors[1].find("the old weights stay: bucket 1 of 1: a has digest"), std::string::npos)
      << outcome.errors[1];
  EXPECT_EQ(outcome.errors[0] + outcome.errors[2], "");
  EXPECT_EQ(outcome.sent[2], outcome.sent[0]);
  EXPECT_TRUE(equal(outcome.engine, step_of(2)));
}

TEST(RefitDelta, DeltaOfWrongLengthIsRejected) {
  const auto outcome = several(100000, [](int number, const at::Tensor& message) {
    if (number == 6) message[13] = 1;  // of the first piece, 2^40 longer
  });
  EXPECT_NE(outcome.errors[1].find("a and what follows it have changes of another length"), std::string::npos)
      << outcome.errors[1];
  EXPECT_TRUE(equal(outcome.engine, step_of(2)));
}

TEST(RefitDelta, DeltaFromAnotherWeightVersionIsRejected) {
  const Manifest changes{5, 4, 64, specs_of(weights(0))};
  const auto read = Manifest::unpacked(changes.packed());
  EXPECT_EQ(read.base, 4U);
  EXPECT_EQ(difference(read, {specs_of(weights(0)), 5, 4}), "");
  EXPECT_EQ(difference(read, {specs_of(weights(0)), 5, 3}),
            "it is what has changed since version 4, and the weights in use are of version 3");
  EXPECT_NE(difference(read, {specs_of(weights(0)), 5}).find("of no refit"), std::string::npos);
}

TEST(Refit, TruncatedOrExtendedManifestIsRejected) {
  const auto good = Manifest{3, std::nullopt, 64, specs_of(weights(0))}.packed();
  EXPECT_EQ(difference(Manifest::unpacked(good), {specs_of(weights(0)), 3}), "");
  for (std::int64_t n = 0; n < good.numel(); ++n)
    EXPECT_THROW(Manifest::unpacked(good.narrow(0, 0, n).clone()), RefitRefused);
  EXPECT_THROW(Manifest::unpacked(at::cat({good, at::zeros({1}, at::kByte)})), RefitRefused);
}

TEST(Refit, NonContiguousOrIntegerWeightsThrow) {
  EXPECT_THROW(specs_of({{"w", at::ones({4, 6}).t()}}), std::invalid_argument);
  EXPECT_THROW(specs_of({{"w", at::ones({4}, at::kInt)}}), std::invalid_argument);
}

}  // namespace
}  // namespace nemo_rl::refit
