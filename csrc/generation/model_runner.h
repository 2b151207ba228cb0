// The interface between engine and model: one forward pass over the new tokens of several sequences.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "common/check.h"
#include "kernels/log_softmax.h"

namespace nemo_rl::model {
class DecoderModel;
}

namespace nemo_rl::generation {

/// The KV-cache blocks of a sequence in one pool: entry i holds the positions [i * block_size, (i + 1) * block_size).
/// It is kNoBlock once no later token reads these positions.
using BlockTable = std::vector<std::int32_t>;
inline constexpr std::int32_t kNoBlock = -1;

/// A table for each pool; empty: no blocks are held.
using BlockTables = std::vector<BlockTable>;

/// The KV cache of all layers with one attention window. Its blocks are numbered from 0.
struct CachePool {
  std::int64_t window = 0;           ///< tokens that attention reads at most, its own included; 0: all
  std::int64_t bytes_per_block = 0;  ///< of these layers, keys and values
};

/// The new tokens of one sequence in this step. The keys and values of its earlier positions are in the cache blocks of
/// `block_tables`; the forward pass writes those of the new tokens there.
struct SequenceSlice {
  std::int64_t query_start = 0;     ///< first row in ForwardBatch::token_ids
  std::int64_t query_length = 0;    ///< new tokens: many in prefill, one in decode and its drafts
  std::int64_t context_length = 0;  ///< tokens already in the cache = absolute position of the first new token
  BlockTables block_tables;
  std::int64_t state = -1;                       ///< slot of its recurrent layers' states; -1: the model has none
  const model::DecoderModel* adapted = nullptr;  ///< as PromptGroup::adapted
};

/// Copy the first `length` positions of cache block `from` of a pool into `to` (copy-on-write of a shared prompt's last
/// block).
struct BlockCopy {
  std::int32_t from = 0;
  std::int32_t to = 0;
  std::int32_t length = 0;
  std::int32_t pool = 0;
};

/// Copy all layers' states of slot `from` into slot `to`.
struct StateCopy {
  std::int64_t from = 0;
  std::int64_t to = 0;
};

/// One step of the engine: ragged, without padding.
struct ForwardBatch {
  std::vector<std::int64_t> token_ids;  ///< [T] of all slices, in order
  std::vector<SequenceSlice> slices;
  std::vector<BlockCopy> copies;          ///< done before the forward pass, in order
  std::vector<StateCopy> state_copies;    ///< the same for states
  std::vector<std::int64_t> logits_rows;  ///< the R rows of token_ids whose next-token logits are requested
};

/// The model that an engine runs. The result for a row depends only on the tokens of its sequence, never on the batch.
class ModelRunner {
 public:
  virtual ~ModelRunner() = default;
  virtual std::int64_t vocab_size() const = 0;
  /// The number of vocabulary entries that the log-softmax sums as one block (kernels/sampling.h).
  virtual std::int64_t vocab_block() const { return kernels::kVocabBlock; }
  virtual std::int64_t block_size() const = 0;  ///< positions in one cache block
  /// One pool for each attention window among the layers.
  virtual std::vector<CachePool> cache_pools() const = 0;
  /// (Re)allocates cache storage for num_blocks[p] blocks of pool p; contents are undefined afterwards.
  virtual void allocate_cache(const std::vector<std::int64_t>& num_blocks) = 0;
  /// Whether the model has recurrent states. allocate_states() allocates the number that may be in use at once.
  virtual bool has_states() const { return false; }
  virtual void allocate_states(std::int64_t) {}
  /// The number of rows up to which a step takes drafts (generation/drafts.h); 0: it never does.
  virtual std::int64_t draft_rows() const { return 0; }
  /// Frees the storage of cache and states (between generation phases).
  virtual void release_cache() = 0;
  /// Sets whether activations of later forward passes may be kept for training, if the runner supports it
  /// (model/kept_activations.h).
  virtual void keep_activations(bool) {}
  /// Throws ValueError if this runner does not support the adapters of a model, see SequenceSlice::adapted.
  virtual void check_adapted(const model::DecoderModel* adapted) const {
    NRL_CHECK_ARG(adapted == nullptr, "this model runner computes with no adapters but its own");
  }
  /// Float32 logits [R, V] of batch.logits_rows, in that order; valid until the next call.
  virtual at::Tensor forward(const ForwardBatch& batch) = 0;
};

}  // namespace nemo_rl::generation
