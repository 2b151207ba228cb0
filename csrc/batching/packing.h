// Sequence packing: lengths in, bins out. A bin is a list of sequence indices whose lengths add up to at most the
// capacity. The bins, and the order inside and among them, are those of NeMo RL's packers; the time is O(n log n).
#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace nemo_rl::batching {

using Bins = std::vector<std::vector<std::int64_t>>;

/// In the given order; a new bin where the next sequence would overflow this one, or where it holds
/// `max_sequences_per_bin` sequences (negative: no such limit).
Bins pack_concatenative(std::span<const std::int64_t> lengths, std::int64_t capacity,
                        std::int64_t max_sequences_per_bin);

/// Sequences in the order of `order`, each into the first bin with room for it.
Bins pack_first_fit(std::span<const std::int64_t> lengths, std::span<const std::int64_t> order, std::int64_t capacity);

/// First fit, longest first; among equal lengths the larger index first.
Bins pack_first_fit_decreasing(std::span<const std::int64_t> lengths, std::int64_t capacity);

/// Modified first fit decreasing (Johnson and Garey, "A 71/60 theorem for bin packing", 1985), with NeMo RL's last
/// phase: left-over sequences go to the least loaded left-over bin. Lengths must be positive.
Bins pack_modified_first_fit_decreasing(std::span<const std::int64_t> lengths, std::int64_t capacity);

}  // namespace nemo_rl::batching
