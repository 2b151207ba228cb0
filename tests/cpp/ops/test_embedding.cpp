// Embedding rows, their gradient in the order of tokens, column sums, and ids that the vocabulary lacks.
#include <ATen/ATen.h>

#include "common/check.h"
#include "ops/close.h"
#include "ops/embedding.h"

namespace nemo_rl::ops {
namespace {

TEST(Embedding, ForwardCopiesWeightRowsToTheOutputDtype) {
  for (const auto type : kTypes) {
    const auto table = randn({5, 9}, 1, type), ids = at::tensor({4L, 0L, 4L}), h = at::empty({3, 9}, sums_of(type));
    embedding_forward(table, ids, h, table.scalar_type());
    EXPECT_TRUE(at::equal(h, table.index_select(0, ids).to(h.scalar_type())));
  }
}

TEST(Embedding, BackwardAddsEveryTokensGradientToItsRow) {
  for (const auto type : {at::kDouble, at::kFloat}) {
    const auto ids = at::randint(0, 7, {200}, at::detail::createCPUGenerator(3), at::kLong);
    const auto dh = randn({200, 12}, 1, type), before = randn({7, 12}, 2, type), d_table = before.clone();
    embedding_backward(dh, ids, d_table);
    expect_close(d_table, before.to(at::kDouble).index_add(0, ids, dh.to(at::kDouble)), 4 * bound_of(type), "d_table");
  }
}

TEST(Embedding, ColumnSumsAreAddedToTheOutput) {
  for (const auto type : kTypes) {
    const auto x = randn({300, 17}, 1, type), out = at::ones({17}, sums_of(type));
    add_column_sums(x, out);
    expect_close(out, x.to(at::kDouble).sum(0) + 1, 4 * bound_of(sums_of(type)), "sums");
  }
}

TEST(Embedding, IdOutsideTheVocabularyThrows) {
  const auto table = randn({5, 9}, 1), h = at::empty({1, 9}, at::kDouble);
  for (const std::int64_t id : {-1L, 5L})
    EXPECT_THROW(embedding_forward(table, at::tensor({id}), h, at::kFloat), ArgumentError) << id;
}

}  // namespace
}  // namespace nemo_rl::ops
