// Causal attention over packed sequences and over a blocked KV cache: one arithmetic for both, so that training,
// prefill and decode give the same bits.
//
// For the query row of head n at absolute position p, with kv head k = n / (N/K) and natural scale c:
//   score(j) = sum_h (q[h] * c * log2(e)) * key_j[h]       h ascending, one chain of multiply-adds
//   keys j = 0..p go by in tiles of kKeyTile *absolute* positions; per tile: m' = max(m, max_j score(j)), r = 2^(m -
//   m'), w(j) = 2^(score(j) - m'),  l = l*r + sum_j w(j),  acc[h] = acc[h]*r, then acc[h] += w(j)*value_j[h]   j
//   ascending out[h] = acc[h] * (1/l),   lse = ln(2) * (m + log2(l))
// A layer with a sliding window w sees keys p-w+1..p: the tiles begin with that of key p-w+1, and keys before it have
// the weight 0 there. A tile of which a row sees no key does not change its sums.
// A head with a sink z has one more term e^z in the denominator, which no value belongs to: m begins with z * log2(e)
// and l with 1 instead of -infinity and 0 (gpt-oss; Xiao et al., 2024). With a softcap c the natural score s becomes c
// * tanh(s / c), and the gradient of s is that of the capped score times 1 - tanh(s / c)^2. Each of these is a chain of
// its own for every (row, lane): how rows are grouped into register blocks, chunks, batches or threads cannot change a
// bit. Keys after p are never multiplied, so their contents (even NaN) do not matter.
//
// A CPU with bfloat16 instructions multiplies bfloat16 in pairs, two terms of a chain at a time: q as it is, the sum of
// a score times c * log2(e) afterwards; w(j) rounded to bfloat16 where it is multiplied (l adds it unrounded), as
// FlashAttention does. The backward rounds P, dS and d_out likewise. Sums stay float. Where tiles multiply, terms come
// in steps of 32, which is a tile of keys (kernels/tiles/attention_tiles.h). CUDA multiplies bfloat16 so on tensor
// cores, sixteen terms at a time.
//
// Layouts: `qkv` [T, (N+2K)*H] row-major after RoPE: N query heads, K key heads, K value heads.
// Cache: [num_blocks, K, 2, H*kKeyTile], of each kv head a tile of keys [H, kKeyTile] (transposed: lanes run over
// keys), then one of values [kKeyTile, H]: a decode step reads a block from its beginning to its end. Where tiles
// multiply, blocks of bfloat16 hold the same numbers in pairs (PairCache, kernels/cpu/kv_cache_write.h).
#pragma once
#include <cstddef>
#include <cstdint>

#include "common/cpu_capability.h"
#include "common/host_device.h"

namespace nemo_rl::kernels {

/// The most columns of a head.
inline constexpr int kMostHeadDim = 512;
/// Positions in a key tile and in a cache block.
inline constexpr std::int64_t kKeyTile = 32;

/// Storage type of activations and caches. Arithmetic is float for the first two, double for the last.
enum class ElementType { float32, bfloat16, float64 };

/// One packed sequence: own rows [start, start+length); its keys are first rows [prefix_start,
/// prefix_start+prefix_length) (a prompt shared by several sequences), then its own rows. Own row i has absolute
/// position prefix_length + i.
struct AttentionSequence {
  std::int64_t start = 0;
  std::int64_t length = 0;
  std::int64_t prefix_start = 0;
  std::int64_t prefix_length = 0;
};

/// The new tokens of one sequence over a blocked cache: rows [query_start, query_start+query_length) at absolute
/// positions context_length..; `block_table[i]` is the cache block of positions [i*kKeyTile, (i+1)*kKeyTile).
struct PagedSlice {
  std::int64_t query_start = 0;
  std::int64_t query_length = 0;
  std::int64_t context_length = 0;
  const std::int32_t* block_table = nullptr;
  std::int64_t block_table_length = 0;
};

struct AttentionShape {
  std::int64_t num_heads = 0;     ///< N
  std::int64_t num_kv_heads = 0;  ///< K, divides N
  std::int64_t head_dim = 0;      ///< H, a multiple of 8
  double scale = 1.0;             ///< natural scale of the scores, usually 1/sqrt(H)
  ElementType type = ElementType::float32;
  std::int64_t window = 0;  ///< keys that a query sees at most, its own included; 0: all
  double softcap = 0;       ///< of the natural scores; 0: none

  NRL_HOST_DEVICE std::int64_t group() const { return num_heads / num_kv_heads; }
  NRL_HOST_DEVICE std::int64_t row_stride() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
  /// The first key that the query at `position` sees.
  NRL_HOST_DEVICE std::int64_t first_key(std::int64_t position) const {
    return window > 0 && position >= window ? position - window + 1 : 0;
  }
};

/// Query tokens that go through the tiles together: a power of two <= kKeyTile, about 128 rows with all heads of a
/// group.
inline std::int64_t attention_query_tokens(std::int64_t group) {
  std::int64_t tokens = kKeyTile;
  while (tokens > 1 && tokens * group > 128) tokens /= 2;
  return tokens;
}

// ---------------------------------------------------------------- packed forward

struct AttentionForwardArgs {
  AttentionShape shape;
  const void* qkv = nullptr;
  const AttentionSequence* sequences = nullptr;
  const void* sinks = nullptr;  ///< [N], of qkv's type; nullptr: there are none
  void* out = nullptr;          ///< [T, N*H]
  void* lse = nullptr;          ///< [T, N] natural log, float (double for float64), may be null
};

/// Work that one thread does in one go: one kv head of sequences [sequence_begin, sequence_end), which share one
/// prefix; of each sequence the own tokens [token_begin, min(token_end, length)).
struct AttentionItem {
  std::int32_t sequence_begin = 0;
  std::int32_t sequence_end = 0;
  std::int32_t kv_head = 0;
  std::int64_t token_begin = 0;
  std::int64_t token_end = 0;
};

/// Bytes of workspace for items whose sequences have at most `max_keys` keys (prefix + own).
using AttentionForwardWorkspace = std::size_t(const AttentionShape& shape, std::int64_t max_keys);
NRL_DECLARE_TILE_KERNEL(attention_forward_workspace, AttentionForwardWorkspace);

using AttentionForward = void(const AttentionForwardArgs& args, const AttentionItem& item, std::byte* workspace);
NRL_DECLARE_TILE_KERNEL(attention_forward_item, AttentionForward);

// ---------------------------------------------------------------- blocked KV cache

struct PagedAttentionArgs {
  AttentionShape shape;
  const void* qkv = nullptr;
  const PagedSlice* slices = nullptr;
  const void* sinks = nullptr;  ///< as in AttentionForwardArgs
  void* cache = nullptr;
  void* out = nullptr;  ///< [T, N*H]
  void* lse = nullptr;  ///< as in AttentionForwardArgs
};

/// Work that one thread does in one go: the pairs (slice, kv head) = (i / K, i % K) for i in [pair_begin, pair_end), of
/// each the query tokens [token_begin, min(token_end, query_length)). `store`: puts the pairs' new keys and values into
/// the cache first, all of them; items that share a pair find them there (kv_cache_write_slice).
struct PagedItem {
  std::int64_t pair_begin = 0;
  std::int64_t pair_end = 0;
  std::int64_t token_begin = 0;
  std::int64_t token_end = 0;
  bool store = false;
};

using PagedWorkspace = std::size_t(const AttentionShape& shape);
NRL_DECLARE_TILE_KERNEL(attention_paged_workspace, PagedWorkspace);

using PagedAttention = void(const PagedAttentionArgs& args, const PagedItem& item, std::byte* workspace);
NRL_DECLARE_TILE_KERNEL(attention_paged_item, PagedAttention);

/// Stores the keys and values of one slice's new tokens, all kv heads.
using KvCacheWrite = void(const AttentionShape& shape, const void* qkv, const PagedSlice& slice, void* cache);
NRL_DECLARE_TILE_KERNEL(kv_cache_write_slice, KvCacheWrite);

/// Copies the first `length` positions of block `from` into block `to`.
using KvCacheCopy = void(const AttentionShape& shape, void* cache, std::int64_t from, std::int64_t to,
                         std::int64_t length);
NRL_DECLARE_TILE_KERNEL(kv_cache_copy_block, KvCacheCopy);

// ---------------------------------------------------------------- packed backward
//
// With w = P (the weights after normalising), o = d_out:
//   dP[j] = o . value_j,  dS[j] = P[j] * (dP[j] - o . out),  d_value_j += P[j] * o,
//   d_q += scale * dS[j] * key_j,  d_key_j += scale * dS[j] * q
// P is computed anew from lse. The gradients of a key's row are summed over its query rows in a fixed order.

/// A sequence without prefix and those whose prefix it owns: their keys' gradients add up.
struct AttentionBackwardJob {
  std::int32_t owner = 0;        ///< sequence index
  std::int64_t token_begin = 0;  ///< the owner's own query tokens [token_begin, token_end) are part of this job
  std::int64_t token_end = 0;
  std::int32_t sharer_begin = 0;  ///< indices into AttentionBackwardArgs::sharers
  std::int32_t sharer_end = 0;
  std::int64_t key_end = 0;   ///< owner keys [0, key_end) get gradients from this job
  std::int64_t partial = -1;  ///< offset of this job's sums in `partials` for kv head 0; -1: the group's only job
};

struct AttentionBackwardArgs {
  AttentionShape shape;
  ElementType grad_type = ElementType::float32;  ///< of d_out and d_qkv: qkv's, or float32 under bfloat16
  const void* qkv = nullptr;
  const void* out = nullptr;
  const void* d_out = nullptr;
  const void* lse = nullptr;
  const AttentionSequence* sequences = nullptr;
  const std::int32_t* sharers = nullptr;
  void* d_qkv = nullptr;  ///< [T, (N+2K)*H]
  void* partials =
      nullptr;  ///< per job and kv head: keys [key_end][H], then values [key_end][H], of the arithmetic's type
};

/// Bytes of workspace for jobs with at most so many owner keys, and keys of one sharer after its whole prefix tiles.
using AttentionBackwardWorkspace = std::size_t(const AttentionShape& shape, std::int64_t owner_keys,
                                               std::int64_t sharer_keys);
NRL_DECLARE_TILE_KERNEL(attention_backward_workspace, AttentionBackwardWorkspace);

using AttentionBackward = void(const AttentionBackwardArgs& args, const AttentionBackwardJob& job, std::int64_t kv_head,
                               std::byte* workspace);
NRL_DECLARE_TILE_KERNEL(attention_backward_job, AttentionBackward);

/// Adds up the partial sums of the `count` jobs of one group, in order, and writes d_qkv of the owner's keys
/// [key_begin, key_end).
using AttentionBackwardReduce = void(const AttentionBackwardArgs& args, const AttentionBackwardJob* jobs,
                                     std::int64_t count, std::int64_t kv_head, std::int64_t key_begin,
                                     std::int64_t key_end);
NRL_DECLARE_TILE_KERNEL(attention_backward_reduce, AttentionBackwardReduce);

}  // namespace nemo_rl::kernels
