// Moves kept activations from the rank that generated some rows to the rank that trains on them.
#pragma once
#include <cstdint>
#include <vector>

#include "distributed/shards.h"
#include "model/kept_activations.h"
#include "trainer/packed_batch.h"

namespace nemo_rl::trainer {

struct KeptMove {
  std::vector<std::int64_t> rows;  ///< rows of the batch
  int from, to;                    ///< ranks
};

/// In each move, rank `to` copies the activations that rank `from` has kept for the rows, as far as it has room. All
/// ranks must call this with the same moves. A move is skipped if any of its rows was not kept completely, or if ranks
/// cannot read each other's memory; a forward pass then gives bit-identical results. The copied memory must not change
/// until the ranks have synchronised again.
void move_kept(distributed::Shards& ranks, model::KeptActivations& kept, const RowBatch& batch,
               const std::vector<KeptMove>& moves);

}  // namespace nemo_rl::trainer
