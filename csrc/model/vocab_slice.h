// The part of the vocabulary whose logits a process computes, and how the parts of all processes are combined into
// whole rows of logits or their sums. The results are bit-identical on all processes.
#pragma once
#include <ATen/core/Tensor.h>

#include <cmath>
#include <vector>

#include "distributed/peers.h"
#include "kernels/log_softmax.h"
#include "model/config.h"

namespace nemo_rl::model {

/// The sums and target logits of U rows, over the whole vocabulary.
struct WholeSums {
  std::vector<kernels::VocabBlockSum> blocks;  ///< [U, count]
  std::int64_t count = 0;
  std::vector<float> target_logits;  ///< one per pair
};

/// row[v] = c * tanh(row[v] / c); a softcap c of 0 changes nothing.
inline void cap_row(float* row, std::int64_t n, double softcap) {
  if (softcap != 0) kernels::softcap_row(row, n, static_cast<float>(softcap));
}
inline void cap_row(double* row, std::int64_t n, double softcap) {
  for (std::int64_t v = 0; softcap != 0 && v < n; ++v) row[v] = softcap * std::tanh(row[v] / softcap);
}
/// Returns the derivative of a capped logit with respect to the logit before the cap.
template <class A>
A cap_slope(A capped, double softcap) {
  const A t = softcap == 0 ? A(0) : capped / static_cast<A>(softcap);
  return A(1) - t * t;
}

/// A process's slice of the vocabulary; by default all of it.
class VocabSlice {
 public:
  VocabSlice() = default;
  /// `peers`: nullptr, or the processes of config.slice.
  VocabSlice(const ModelConfig& config, distributed::Peers* peers);

  bool is_whole() const { return peers_ == nullptr; }
  /// The first vocabulary entry of this process.
  std::int64_t begin() const { return is_whole() ? 0 : rows_[static_cast<std::size_t>(peers_->rank())].begin; }
  /// The size V of the whole vocabulary, given the number `own` of this process's entries.
  std::int64_t vocab_size(std::int64_t own) const { return is_whole() ? own : rows_.back().end; }
  /// The number of entries that the log-softmax sums as one block.
  std::int64_t block() const { return block_; }
  /// ModelConfig::logit_softcap.
  double softcap() const { return softcap_; }
  /// Applies the softcap in place to the head's logits, [R, n] float32 or float64 with any row stride.
  void cap(const at::Tensor& logits) const;

  /// Fills `whole` [R, V] from `own` [R, entries of this process] of every process.
  void gather_rows(const at::Tensor& own, const at::Tensor& whole) const;
  /// Combines the block sums [U, blocks of this process] of all processes, and the logits of all targets, each from the
  /// process that holds it.
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
