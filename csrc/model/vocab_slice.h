// The part of the vocabulary whose logits a process computes, and how all of them become whole rows of logits or their
// sums. Every process ends with the same bits.
#pragma once
#include <ATen/core/Tensor.h>

#include <cmath>
#include <vector>

#include "distributed/peers.h"
#include "kernels/log_softmax.h"
#include "model/config.h"

namespace nemo_rl::model {

/// Sums and target logits of U rows, over the whole vocabulary.
struct WholeSums {
  std::vector<kernels::VocabBlockSum> blocks;  ///< [U, count]
  std::int64_t count = 0;
  std::vector<float> target_logits;  ///< one a pair
};

/// row[v] = c * tanh(row[v] / c); a softcap c of 0 changes nothing.
template <class A>
void cap_row(A* row, std::int64_t n, double softcap) {
  if (softcap == 0) return;
  const A c = static_cast<A>(softcap);
  for (std::int64_t v = 0; v < n; ++v) row[v] = c * std::tanh(row[v] / c);
}
/// The gradient of a logit before its cap is the capped one's times this.
template <class A>
A cap_slope(A capped, double softcap) {
  const A t = softcap == 0 ? A(0) : capped / static_cast<A>(softcap);
  return A(1) - t * t;
}

/// By default all of the vocabulary is here.
class VocabSlice {
 public:
  VocabSlice() = default;
  /// `peers`: nullptr, or the processes of config.slice.
  VocabSlice(const ModelConfig& config, distributed::Peers* peers);

  bool is_whole() const { return peers_ == nullptr; }
  /// The first entry that is here.
  std::int64_t begin() const { return is_whole() ? 0 : rows_[static_cast<std::size_t>(peers_->rank())].begin; }
  /// V, where `own` entries are here.
  std::int64_t vocab_size(std::int64_t own) const { return is_whole() ? own : rows_.back().end; }
  /// Entries that the log-softmax sums together.
  std::int64_t block() const { return block_; }
  /// As in ModelConfig.
  double softcap() const { return softcap_; }
  /// The logits of the head's product, [R, n] float32 or float64 with any stride of rows, become those of the model.
  void cap(const at::Tensor& logits) const;

  /// whole [R, V] from `own` [R, entries that are here] of every process.
  void gather_rows(const at::Tensor& own, const at::Tensor& whole) const;
  /// From the block sums [U, blocks that are here] and the logits of those pairs whose target is here.
  WholeSums gather_sums(std::int64_t U, const std::vector<kernels::VocabBlockSum>& own,
                        const std::vector<float>& own_targets, const std::int64_t* targets, std::int64_t pairs) const;
  /// x becomes the sum over all slices.
  void sum(const at::Tensor& x) const;

 private:
  std::int64_t blocks_of(const VocabRows& rows) const { return (rows.size() + block_ - 1) / block_; }
  distributed::Peers* peers_ = nullptr;
  std::vector<VocabRows> rows_;  ///< of each process
  std::int64_t block_ = kernels::kVocabBlock;
  double softcap_ = 0;
};

}  // namespace nemo_rl::model
