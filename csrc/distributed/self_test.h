// A test of the connections between the ranks of a run, before it begins.
#pragma once
#include "distributed/communicator.h"

namespace nemo_rl::distributed {

/// Sends known numbers from `device` by every operation that a run uses: sums along the tree, broadcasts of every rank,
/// and messages between all pairs, each once small and once `elements` float32 numbers long. Every rank computes on the
/// CPU what must come. CommunicatorError, with this rank and the operation, where one bit differs. All ranks call it.
void self_test(const std::shared_ptr<Communicator>& ranks, at::Device device, std::int64_t elements);

}  // namespace nemo_rl::distributed
