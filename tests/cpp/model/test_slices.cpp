// How a model is cut, and two slices in two threads against the whole model.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <mutex>

#include "common/check.h"
#include "distributed/memory_communicator.h"
#include "generation/small_model.h"
#include "runtime/tensor.h"
#include "trainer/trainer.h"

namespace nemo_rl::model {
namespace {

using distributed::Communicator;

at::Tensor part_of(const ParameterSpec& spec, at::Tensor whole) {
  return spec.split < 0 ? whole
                        : whole.narrow(spec.split, spec.begin, spec.shape[static_cast<std::size_t>(spec.split)]);
}

/// The slice of `whole` that this rank has.
std::shared_ptr<DecoderModel> slice_of(const DecoderModel& whole, Communicator& ranks) {
  auto m = std::make_shared<DecoderModel>(whole.config(), at::kFloat, true, at::kCPU,
                                          std::shared_ptr<Communicator>(&ranks, [](Communicator*) {}));
  for (const auto& spec : m->layout().specs) {
    const auto& from = whole.layout().find(spec.name);
    const auto values = whole.masters().narrow(0, from.offset, from.numel).view(from.shape);
    m->masters().narrow(0, spec.offset, spec.numel).view(spec.shape).copy_(part_of(spec, values));
  }
  m->masters_changed();
  return m;
}

TEST(TensorParallelSlices, VocabularySlicesCoverEveryTokenIdOnceAndBeginAtBlockBoundaries) {
  for (const std::int64_t V : {8, 131, 2048, 4097, 20000, 151936})
    for (const int size : {1, 2, 4, 8}) {
      auto c = small_config(false);
      c.vocab_size = V, c.num_heads = c.num_kv_heads = 8;
      const auto cut = c.sliced({0, size});
      std::int64_t end = 0;
      for (int r = 0; r < size; ++r) {
        const auto rows = cut.vocab_rows(r);
        EXPECT_EQ(rows.begin, end) << V << " of " << size;
        EXPECT_GT(rows.size(), 0) << V << " of " << size;
        EXPECT_EQ(rows.begin % cut.vocab_block(), 0);
        end = rows.end;
      }
      EXPECT_EQ(end, V);
    }
}

TEST(TensorParallelSlices, ModelsThatCannotBeSlicedThrow) {
  const auto c = small_config(false);  // 6 heads, 2 key/value heads
  EXPECT_THROW(c.sliced({0, 4}), ArgumentError);
  EXPECT_THROW(c.sliced({0, 3}), ArgumentError);
  EXPECT_EQ(c.sliced({1, 2}).num_kv_heads, 1);
  auto whole_norms = c;
  whole_norms.qk_norm = QkNorm::whole;
  EXPECT_THROW(whole_norms.sliced({0, 2}), ArgumentError);
}

TEST(TensorParallelSlices, TwoSlicesInTwoThreadsGiveTheLogitsOfTheWholeModel) {
  for (const bool qwen3 : {false, true}) {
    const auto whole = random_model(qwen3, at::kFloat);
    const auto ids = at::arange(3, 40, at::kLong);
    const auto expected = trainer::Trainer(whole).logits(ids);
    std::mutex lock;
    std::vector<at::Tensor> found(2);
    distributed::on_ranks(2, [&](Communicator& ranks) {
      const auto logits = trainer::Trainer(slice_of(*whole, ranks)).logits(ids);
      const std::lock_guard guard(lock);
      found[static_cast<std::size_t>(ranks.rank())] = logits;
    });
    EXPECT_TRUE(at::equal(found[0], found[1]));
    EXPECT_LE((found[0] - expected).abs().max().item<float>(), 1e-5 * expected.abs().max().item<float>());
  }
}

}  // namespace
}  // namespace nemo_rl::model
