// Chooses the rows of the engine's steps whose activations are kept for training (model/kept_activations.h).
#pragma once
#include <cstdint>
#include <vector>

#include "generation/model_runner.h"
#include "model/kept_activations.h"

namespace nemo_rl::generation {

/// Tracks the kept node of every token in the first pool of the KV cache, which holds the last token of every sequence
/// even behind a window. A new token's node becomes a child of the node of the token
/// before it. If memory runs out, the last sequence of the step is dropped, so that the sequences before it are kept
/// completely.
class KeptRows {
 public:
  using Node = model::KeptActivations::Node;
  explicit KeptRows(std::int64_t block_size) : block_size_(block_size) {}

  /// Starts with a cache of `num_blocks` blocks, and forgets all earlier tokens.
  void begin(std::int64_t num_blocks);
  /// Returns the node for the activations of every row of the step; kNone if they are already kept, or cannot be kept.
  const std::vector<Node>& plan(const ForwardBatch& batch, model::KeptActivations& kept);

 private:
  Node& at(const SequenceSlice& slice, std::int64_t position) {
    const std::int64_t block = slice.block_tables.front()[static_cast<std::size_t>(position / block_size_)];
    return nodes_[static_cast<std::size_t>(block * block_size_ + position % block_size_)];
  }
  Node last(const SequenceSlice& slice) {
    return slice.context_length > 0 ? at(slice, slice.context_length - 1) : model::KeptActivations::kRoot;
  }
  bool make_room(const ForwardBatch& batch, std::size_t slice, model::KeptActivations& kept);

  std::int64_t block_size_;
  std::vector<Node> nodes_;  ///< of every position of every block
  std::vector<Node> put_;
};

}  // namespace nemo_rl::generation
