// Equal bytes have equal digests, and any changed byte, wherever it lies, another one.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "ops/close.h"
#include "ops/weight_digest.h"

namespace nemo_rl::ops {
namespace {

TEST(WeightDigest, EqualBytesHaveEqualDigestsOnAnyNumberOfThreads) {
  const auto x = randn({700001}, 1, at::kFloat);  // more than two blocks of a MiB, and a rest
  const auto digest = weight_digest(x);
  for (const int threads : {1, 2}) {
    at::set_num_threads(threads);
    EXPECT_EQ(weight_digest(x.clone()), digest);
  }
}

TEST(WeightDigest, OneFlippedBitAnywhereChangesTheDigest) {
  for (const std::int64_t bytes : {1, 7, 8, 33, (1 << 20) + 5}) {
    const auto x = at::arange(bytes, at::kLong).to(at::kByte);
    const auto digest = weight_digest(x);
    for (const std::int64_t at : {std::int64_t{0}, bytes / 2, bytes - 1}) {
      const auto changed = x.clone();
      changed.data_ptr<std::uint8_t>()[at] ^= 1;
      EXPECT_NE(weight_digest(changed), digest) << at << " of " << bytes;
    }
  }
}

TEST(WeightDigest, SwappingTwoBlocksOfATensorChangesTheDigest) {
  const auto a = at::zeros({1 << 20}, at::kByte), b = at::ones({1 << 20}, at::kByte);
  EXPECT_NE(weight_digest(at::cat({a, b})), weight_digest(at::cat({b, a})));
}

}  // namespace
}  // namespace nemo_rl::ops
