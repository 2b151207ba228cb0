#include "trainer/kept_moves.h"

#include <unordered_map>

#include "common/check.h"
#include "runtime/tensor.h"

namespace nemo_rl::trainer {
namespace {

using model::KeptActivations;
using Node = KeptActivations::Node;

constexpr auto kPhase = "moving kept activations";

/// One node of the tree of tokens, parents first. As it travels: three int64.
struct Entry {
  std::int64_t parent;  ///< the number of its entry; -1: the root
  std::int64_t token;
  std::int64_t address;  ///< of its row in the sender's memory
};
static_assert(sizeof(Entry) == 3 * sizeof(std::int64_t));

/// The nodes of rows, each once; none where one of them was not kept.
std::vector<Entry> entries_of(const KeptActivations& kept, const RowBatch& batch,
                              const std::vector<std::int64_t>& rows) {
  const auto tokens = row_tokens(batch);
  const auto* const ids = batch.token_ids.const_data_ptr<std::int64_t>();
  const auto* const starts = batch.starts.const_data_ptr<std::int64_t>();
  std::unordered_map<Node, std::int64_t> numbers;
  std::vector<Entry> entries;
  for (const auto row : rows) {
    Node node = KeptActivations::kRoot;
    std::int64_t parent = -1;
    for (std::int64_t t = 0; t < tokens[static_cast<std::size_t>(row)].read; ++t) {
      const auto token = ids[starts[row] + t];
      node = kept.find(node, token);
      if (node == KeptActivations::kNone) return {};
      const auto [number, is_new] = numbers.try_emplace(node, static_cast<std::int64_t>(entries.size()));
      if (is_new)
        entries.push_back({parent, token, static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(kept.row(node)))});
      parent = number->second;
    }
  }
  return entries;
}

void send(distributed::Shards& ranks, std::vector<Entry> entries, int to) {
  const auto count = static_cast<std::int64_t>(entries.size());
  ranks.messages().send(at::full({1}, count, at::kLong), to, kPhase);
  if (count > 0) ranks.messages().send(at::from_blob(entries.data(), {count, 3}, at::kLong), to, kPhase);
}

void receive(distributed::Shards& ranks, const distributed::PeerMemory& memory, KeptActivations& kept, int from) {
  const auto count = at::zeros({1}, at::kLong);
  ranks.messages().receive(count, from, kPhase);
  std::vector<Entry> entries(static_cast<std::size_t>(count.item<std::int64_t>()));
  if (entries.empty()) return;
  const auto n = static_cast<std::int64_t>(entries.size());
  ranks.messages().receive(at::from_blob(entries.data(), {n, 3}, at::kLong), from, kPhase);
  std::vector<Node> nodes;
  for (const auto& [parent, token, address] : entries) {
    NRL_CHECK(parent < static_cast<std::int64_t>(nodes.size()), kPhase, ": an entry before its parent");
    const auto added = kept.add(parent < 0 ? KeptActivations::kRoot : nodes[static_cast<std::size_t>(parent)], token);
    if (added.is_new)
      memory.read(from, static_cast<std::uint64_t>(address), kept.row(added.node),
                  static_cast<std::size_t>(kept.bytes_per_token()), kPhase);
    nodes.push_back(added.node);
  }
}

}  // namespace

void move_kept(distributed::Shards& ranks, KeptActivations& kept, const RowBatch& batch,
               const std::vector<KeptMove>& moves) {
  if (moves.empty()) return;
  const auto* const memory = ranks.memory(kPhase);
  if (memory == nullptr) return;
  for (const auto& move : moves) {
    NRL_CHECK(move.from != move.to, kPhase, ": from rank ", move.from, " to itself");
    if (move.from == ranks.rank()) send(ranks, entries_of(kept, batch, move.rows), move.to);
    if (move.to == ranks.rank()) receive(ranks, *memory, kept, move.from);
  }
}

}  // namespace nemo_rl::trainer
