#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "model/kept_activations.h"
#include "runtime/tensor.h"

namespace nemo_rl::model {
namespace {

using Node = KeptActivations::Node;
constexpr auto kNone = KeptActivations::kNone;
constexpr auto kRoot = KeptActivations::kRoot;

/// Two layers of 3 + 1 floats a token, then 2 floats.
KeptActivations small(std::int64_t rows) {
  KeptActivations kept(std::array<std::int64_t, 3>{16, 16, 8});
  kept.set_max_bytes(rows * 40 + 39);
  return kept;
}

/// Adds the tokens one behind the other; their nodes.
std::vector<Node> add(KeptActivations& kept, Node parent, const std::vector<std::int64_t>& tokens) {
  std::vector<Node> nodes;
  for (const auto token : tokens) nodes.push_back(parent = kept.add(parent, token).node);
  return nodes;
}

TEST(KeptActivations, SequencesShareTheStoredActivationsOfTheirCommonPrefix) {
  auto kept = small(10);
  const auto first = add(kept, kRoot, {7, 8, 9});
  EXPECT_EQ(kept.tokens(), 3);
  const auto again = kept.add(first[0], 8);
  EXPECT_EQ(again.node, first[1]);
  EXPECT_FALSE(again.is_new);
  const auto other = kept.add(first[0], 9);
  EXPECT_TRUE(other.is_new);
  EXPECT_EQ(kept.tokens(), 4);
  EXPECT_EQ(kept.find(kRoot, 7), first[0]);
  EXPECT_EQ(kept.find(first[1], 9), first[2]);
  EXPECT_EQ(kept.find(kRoot, 9), kNone);
  EXPECT_EQ(kept.find(kNone, 7), kNone);
  EXPECT_EQ(kept.add(kNone, 7).node, kNone) << "a token behind one that is not kept";
}

TEST(KeptActivations, DroppingASequenceKeepsThePrefixThatOtherSequencesShare) {
  auto kept = small(5);
  const auto prompt = add(kept, kRoot, {1, 2});
  const auto a = add(kept, prompt[1], {3, 4}), b = add(kept, prompt[1], {5});
  EXPECT_TRUE(kept.full());
  EXPECT_EQ(kept.add(b[0], 6).node, kNone);
  EXPECT_EQ(kept.add(b[0], 6).node, kNone);
  EXPECT_FALSE(kept.drop(prompt[1])) << "others resume from it";
  EXPECT_TRUE(kept.drop(a[1]));
  EXPECT_EQ(kept.tokens(), 3);
  EXPECT_EQ(kept.find(kept.find(kRoot, 1), 2), prompt[1]);
  EXPECT_EQ(kept.find(prompt[1], 3), kNone);
  const auto next = add(kept, b[0], {6, 7});
  EXPECT_TRUE(kept.full());
  EXPECT_NE(next[0], a[0]);
  EXPECT_NE(next[0], a[1]) << "a row that is used again is another node";
  EXPECT_EQ(kept.add(a[0], 9).node, kNone);
  EXPECT_FALSE(kept.drop(a[1]));
  EXPECT_TRUE(kept.drop(next[1]));
  EXPECT_TRUE(kept.empty()) << "nobody else needs the prompt";
}

TEST(KeptActivations, ClearInvalidatesAllStoredActivations) {
  auto kept = small(4);
  const auto old = add(kept, kRoot, {1, 2});
  kept.clear();
  EXPECT_TRUE(kept.empty());
  EXPECT_EQ(kept.find(kRoot, 1), kNone);
  EXPECT_EQ(kept.add(old[1], 3).node, kNone);
  const auto now = add(kept, kRoot, {1, 2, 3, 4});
  EXPECT_NE(now[0], old[0]);
  EXPECT_TRUE(kept.full());
  const auto bytes = kept.bytes();
  EXPECT_GT(bytes, 0);
  kept.set_max_bytes(0);
  EXPECT_EQ(kept.bytes(), 0);
  EXPECT_FALSE(kept.enabled());
  EXPECT_EQ(kept.add(kRoot, 1).node, kNone);
}

TEST(KeptActivations, StoredActivationsAreReadBackInAnyTokenOrder) {
  auto kept = small(200);
  std::vector<Node> nodes;
  for (std::int64_t t = 0; t < 150; ++t) nodes.push_back(kept.add(t % 2 ? nodes.back() : kRoot, t).node);
  LayerActivations in[2], last;
  for (auto& a : in) a.h_in = at::randn({150, 3}), a.lse = at::randn({150, 1});
  last.h_in = at::randn({150, 2});
  auto some = nodes;
  some[4] = kNone;
  for (int l = 0; l < 2; ++l) kept.put(l, in[l], nodes);
  kept.put(2, last, some);

  const std::vector<Node> order(nodes.rbegin(), nodes.rend());
  for (int l = 0; l < 2; ++l) {
    LayerActivations out;
    out.h_in = at::empty({150, 3}), out.lse = at::empty({150, 1});
    kept.get(l, out, order);
    EXPECT_TRUE(at::equal(out.h_in, in[l].h_in.flip(0)));
    EXPECT_TRUE(at::equal(out.lse, in[l].lse.flip(0)));
  }
  LayerActivations out;
  out.h_in = at::empty({1, 2});
  kept.get(2, out, {&nodes[149], 1});
  EXPECT_TRUE(at::equal(out.h_in[0], last.h_in[149]));
  LayerActivations wrong;
  wrong.h_in = at::empty({1, 3});
  EXPECT_ANY_THROW(kept.get(0, wrong, {&nodes[0], 1})) << "half of a row";
}

}  // namespace
}  // namespace nemo_rl::model
