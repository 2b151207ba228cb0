// Kept activations on their way from the rank that generated some rows to the rank that trains them.
#pragma once
#include <cstdint>
#include <vector>

#include "distributed/shards.h"
#include "model/kept_activations.h"
#include "trainer/packed_batch.h"

namespace nemo_rl::trainer {

struct KeptMove {
  std::vector<std::int64_t> rows;  ///< of the batch
  int from, to;                    ///< ranks
};

/// Rank `to` of each move copies what rank `from` has kept of the rows, as far as it has room. All ranks call it with
/// the same moves. Nothing is copied of a move whose rows were not kept as a whole, nor where ranks cannot read each
/// other's memory: a forward pass then gives the same bits. What was copied must stay as it is until the ranks have met
/// again.
void move_kept(distributed::Shards& ranks, model::KeptActivations& kept, const RowBatch& batch,
               const std::vector<KeptMove>& moves);

}  // namespace nemo_rl::trainer
