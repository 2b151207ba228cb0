// Routing of a mixture of experts: ties, weights, groups in a fixed order, and gradients against ATen's.
#include <ATen/ATen.h>

#include "ops/close.h"
#include "ops/experts.h"

namespace nemo_rl::ops {
namespace {

struct Routes {
  at::Tensor expert, weight;
};

Routes routes_of(const at::Tensor& logits, std::int64_t k, bool renormalise) {
  Routes r{at::empty({logits.size(0), k}, at::kLong), at::empty({logits.size(0), k}, logits.options())};
  route_tokens(logits, renormalise, r.expert, r.weight);
  return r;
}

TEST(Experts, ExpertWithTheLowerIndexIsChosenFirstOfEqualLogits) {
  const auto logits = at::tensor({0.5, 2.0, 2.0, 0.5}, at::kDouble).view({1, 4});
  const auto r = routes_of(logits, 3, true);
  EXPECT_TRUE(at::equal(r.expert, at::tensor({1, 2, 0}, at::kLong).view({1, 3})));
  EXPECT_EQ(r.weight[0][0].item<double>(), r.weight[0][1].item<double>());
}

TEST(Experts, NanLogitsChooseDistinctExperts) {
  const auto r = routes_of(at::full({2, 3}, std::nan(""), at::kFloat), 3, false);
  EXPECT_TRUE(at::equal(r.expert, at::tensor({0, 1, 2, 0, 1, 2}, at::kLong).view({2, 3})));
}

TEST(Experts, RoutingWeightsAndGradientsMatchAten) {
  for (const bool renormalise : {false, true}) {
    const auto logits = randn({11, 7}, 1, at::kDouble).set_requires_grad(true),
               d_weight = randn({11, 3}, 2, at::kDouble);
    const auto r = routes_of(logits.detach(), 3, renormalise);
    auto expected = at::softmax(logits, -1).gather(1, r.expert);
    if (renormalise) expected = expected / expected.sum(-1, /*keepdim=*/true);
    EXPECT_TRUE(at::equal(r.expert, std::get<1>(logits.detach().topk(3))));
    EXPECT_TRUE(at::allclose(r.weight, expected.detach(), 1e-12, 1e-14));
    expected.backward(d_weight);
    const auto d_logits = at::empty_like(logits.detach());
    route_tokens_backward(logits.detach(), renormalise, r.expert, r.weight, d_weight, d_logits);
    EXPECT_TRUE(at::allclose(d_logits, logits.grad(), 1e-10, 1e-13));
  }
}

TEST(Experts, SigmoidRouterChoosesByScoreAndBiasWithinGroups) {
  const auto logits = at::zeros({1, 6}, at::kDouble), bias = at::tensor({9.0, 0.0, 4.0, 6.0, 5.0, 5.0}, at::kDouble);
  const auto expert = at::empty({1, 3}, at::kLong), weight = at::empty({1, 3}, at::kDouble);
  route_tokens_by_sigmoid(logits, bias, {3, 2, true, 6.0}, expert, weight);
  EXPECT_TRUE(at::equal(expert, at::tensor({3, 4, 5}, at::kLong).view({1, 3})));  // groups 9 + 0, 4 + 6, 5 + 5
  EXPECT_TRUE(at::allclose(weight, at::full({1, 3}, 2.0, at::kDouble)));
}

TEST(Experts, SigmoidRoutingWeightsAndGradientsMatchAten) {
  for (const bool renormalise : {false, true}) {
    const auto logits = randn({11, 8}, 1, at::kDouble).set_requires_grad(true), bias = randn({8}, 3, at::kDouble),
               d_weight = randn({11, 3}, 2, at::kDouble);
    const SigmoidRouter router{1, 1, renormalise, 2.5};
    const auto expert = at::empty({11, 3}, at::kLong), weight = at::empty({11, 3}, at::kDouble);
    route_tokens_by_sigmoid(logits.detach(), bias, router, expert, weight);
    const auto scores = at::sigmoid(logits);
    auto expected = scores.gather(1, expert);
    if (renormalise) expected = expected / (expected.sum(-1, /*keepdim=*/true) + 1e-20);
    expected = 2.5 * expected;
    EXPECT_TRUE(at::equal(expert, std::get<1>((scores.detach() + bias).topk(3))));
    EXPECT_TRUE(at::allclose(weight, expected.detach(), 1e-12, 1e-14));
    expected.backward(d_weight);
    const auto d_logits = at::empty_like(logits.detach());
    route_tokens_by_sigmoid_backward(logits.detach(), router, expert, weight, d_weight, d_logits);
    EXPECT_TRUE(at::allclose(d_logits, logits.grad(), 1e-10, 1e-13));
  }
}

TEST(Experts, GroupingBySortingEqualsGroupingByCounting) {
  const auto expert = at::tensor({4, 1, 1, 0, 4, 0, 1, 4}, at::kLong).view({4, 2});  // none chooses 2, 3 and 5
  const auto counted = group_by_expert(expert, 6), sorted = group_by_sorting(expert, 6);
  EXPECT_EQ(sorted.begin, (std::vector<std::int64_t>{0, 2, 5, 5, 5, 8, 8}));
  EXPECT_TRUE(at::equal(sorted.pair, at::tensor({3, 5, 1, 2, 6, 0, 4, 7}, at::kLong)));
  EXPECT_EQ(sorted.begin, counted.begin);
  for (const auto part : {&ExpertGroups::pair, &ExpertGroups::token, &ExpertGroups::row})
    EXPECT_TRUE(at::equal(sorted.*part, counted.*part));
}

TEST(Experts, SigmoidRouterOfNanLogitsChoosesDistinctExperts) {
  const auto expert = at::empty({1, 3}, at::kLong), weight = at::empty({1, 3}, at::kFloat);
  route_tokens_by_sigmoid(at::full({1, 4}, std::nan(""), at::kFloat), at::zeros({4}, at::kFloat), {2, 2, true, 1.0},
                          expert, weight);
  EXPECT_TRUE(at::equal(expert, at::tensor({0, 1, 2}, at::kLong).view({1, 3})));
}

TEST(Experts, TokensRoutedToAnExpertKeepTheirOrderInTheBatch) {
  const auto groups = group_by_expert(at::tensor({2, 0, 0, 2, 2, 1}, at::kLong).view({3, 2}), 4);
  EXPECT_EQ(groups.begin, (std::vector<std::int64_t>{0, 2, 3, 6, 6}));
  EXPECT_TRUE(at::equal(groups.pair, at::tensor({1, 2, 5, 0, 3, 4}, at::kLong)));
  EXPECT_TRUE(at::equal(groups.token, at::tensor({0, 1, 2, 0, 1, 2}, at::kLong)));
  EXPECT_TRUE(at::equal(groups.pair.index_select(0, groups.row), at::arange(6, at::kLong)));
}

TEST(Experts, WeightedSumOfATokensExpertsDoesNotDependOnOtherTokens) {
  const std::int64_t T = 40, k = 3, D = 300;
  const auto rows = randn({T * k, D}, 3, at::kFloat), weight = randn({T, k}, 4, at::kFloat),
             row = at::arange(T * k, at::kLong).flip(0).contiguous(), all = at::ones({T, D}, at::kFloat);
  add_up_experts(rows, row, weight, k, all, /*accumulate=*/true);
  for (const std::int64_t t : {0, 17, 39}) {
    const auto one = at::ones({1, D}, at::kFloat);
    add_up_experts(rows.index_select(0, row.narrow(0, t * k, k)), {}, weight.narrow(0, t, 1), k, one, true);
    EXPECT_TRUE(at::equal(one[0], all[t]));
  }
}

}  // namespace
}  // namespace nemo_rl::ops
