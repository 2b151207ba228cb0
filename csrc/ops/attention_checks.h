// What the attention ops check of their arguments and how they divide their work. Private to ops/attention*.cpp.
#pragma once
#include <algorithm>
#include <span>
#include <vector>

#include "ops/attention.h"

namespace nemo_rl::ops {

/// Shape of `qkv` [T, (N+2K)*H] on the CPU or a CUDA device, contiguous.
kernels::AttentionShape attention_shape(const at::Tensor& qkv, const AttentionHeads& heads);

/// Own rows within [0, T) without overlap, prefixes at the beginning of a sequence without prefix. Returns for each
/// sequence the index of the one that owns its prefix (its own index if it has none).
std::vector<std::int32_t> check_sequences(std::span<const AttentionSequence> sequences, std::int64_t tokens);

/// Rows within [0, tokens), tables as long as the positions need, of blocks within [0, num_blocks); before the window
/// of a slice's first token there may be none (-1).
void check_slices(std::span<const PagedSlice> slices, std::int64_t tokens, std::int64_t num_blocks,
                  std::int64_t window);

/// [T, columns], contiguous, on `device`.
void check_matrix(const char* name, const at::Tensor& x, std::int64_t tokens, std::int64_t columns,
                  at::ScalarType dtype, at::Device device);

/// Multiply-adds below which waking other threads costs more than it saves.
inline constexpr std::int64_t kAttentionSerialCost = 1 << 19;

/// Scored (query, key) pairs of own tokens [begin, end): an upper bound if each sees at most `window` > 0 keys.
inline std::int64_t attention_pairs(std::int64_t prefix, std::int64_t begin, std::int64_t end,
                                    std::int64_t window = 0) {
  const std::int64_t pairs = (end - begin) * prefix + (end - begin) * (begin + end + 1) / 2;
  return window > 0 ? std::min(pairs, (end - begin) * window) : pairs;
}

}  // namespace nemo_rl::ops
