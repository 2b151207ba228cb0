#include "generation/kept_rows.h"

namespace nemo_rl::generation {

using model::KeptActivations;

void KeptRows::begin(std::int64_t num_blocks) {
  nodes_.assign(static_cast<std::size_t>(num_blocks * block_size_), KeptActivations::kNone);
}

const std::vector<KeptRows::Node>& KeptRows::plan(const ForwardBatch& batch, KeptActivations& kept) {
  for (const auto& copy : batch.copies)
    for (std::int64_t i = 0; copy.pool == 0 && i < copy.length; ++i)
      nodes_[static_cast<std::size_t>(copy.to * block_size_ + i)] =
          nodes_[static_cast<std::size_t>(copy.from * block_size_ + i)];
  put_.assign(batch.token_ids.size(), KeptActivations::kNone);
  for (std::size_t i = 0; i < batch.slices.size(); ++i) {
    const SequenceSlice& slice = batch.slices[i];
    Node parent = last(slice);
    for (std::int64_t t = 0; t < slice.query_length; ++t) {
      const auto row = static_cast<std::size_t>(slice.query_start + t);
      auto added = kept.add(parent, batch.token_ids[row]);
      if (added.node == KeptActivations::kNone && kept.full() && make_room(batch, i, kept))
        added = kept.add(parent, batch.token_ids[row]);
      if (added.is_new) put_[row] = added.node;
      parent = at(slice, slice.context_length + t) = added.node;
    }
  }
  return put_;
}

/// Gives up the last sequence of the step that has rows of its own, be it that of `slice` itself.
bool KeptRows::make_room(const ForwardBatch& batch, std::size_t slice, KeptActivations& kept) {
  for (std::size_t i = batch.slices.size(); i-- > slice;)
    if (kept.drop(last(batch.slices[i]))) return true;
  return false;
}

}  // namespace nemo_rl::generation
