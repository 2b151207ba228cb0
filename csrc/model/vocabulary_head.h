// Rows of (normed) hidden states to log-probabilities of tokens, and back. Logits exist for a tile of the vocabulary at
// a time: [tokens, vocabulary] never does.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "kernels/sampling.h"
#include "model/filtered_row.h"
#include "model/vocab_slice.h"

namespace nemo_rl::model {

/// Which log-probabilities are wanted. A row that several tokens follow (the last token of a shared prompt) is computed
/// once: pair i asks for token targets[i] after row r for first[r] <= i < first[r + 1].
struct RowTargets {
  const std::int64_t* first;    ///< [U + 1]
  const std::int64_t* targets;  ///< indexed by pair
};

/// One value for each pair. `unfiltered` ignores top-k and top-p; undefined where it is not wanted.
struct PairValues {
  at::Tensor logprobs, unfiltered;
};

/// Log-sum-exp of each row without a filter, and its entropy where the forward was asked for it: what a forward leaves
/// for the backward.
struct RowSums {
  double max = 0, log_sum = 0, entropy = 0;
};

/// A loss whose gradient at a pair needs that pair's log-probability only: writes d_logprobs of pairs [begin, end),
/// given theirs; both arrays start at pair `begin`.
using PairLoss = std::function<void(std::int64_t begin, std::int64_t end, const float* logprobs, float* d_logprobs)>;

/// On a CUDA device the tensors lie there, targets on the CPU, and nothing is kept in `sums`: a backward computes them
/// again.
class VocabularyHead {
 public:
  /// `slice`: w holds these entries of the vocabulary alone, and other processes, which make the same calls, the rest.
  /// Targets are of the whole vocabulary; d_x is the sum over all slices.
  explicit VocabularyHead(VocabSlice slice = {}) : slice_(std::move(slice)) {}

  /// Log-probabilities of the targets after the rows x [U, D], as the sampler reports them under `scoring`: -inf where
  /// its filter removes the token, NaN where a row of logits is not finite. w [V, D]. `values` are [R] in A, defined
  /// where wanted; without a filter `unfiltered` must not be. sums [U] and entropy ([U], nats, of the distribution at
  /// this temperature; may be undefined) are filled for the unfiltered distribution, where that is computed.
  void forward(const at::Tensor& x, const at::Tensor& w, const RowTargets& wanted, const TokenScoring& scoring,
               const PairValues& values, RowSums* sums, const at::Tensor& entropy);

  /// From the gradient of those values, and of the entropy (d_entropy [U] in A, or undefined): d_x [U, D] in A is
  /// overwritten, d_w [V, D] added to (undefined: the head is frozen). Logits are computed again.
  void backward(const at::Tensor& x, const at::Tensor& w, const RowTargets& wanted, const TokenScoring& scoring,
                const PairValues& d_values, const RowSums* sums, const at::Tensor& d_x, const at::Tensor& d_w,
                const at::Tensor& d_entropy = {});

  /// The likeliest tokens of each row without a filter, likeliest first and equal ones by id: ids [U, k] int64 and
  /// their log-probabilities [U, k] in A, on the CPU.
  void likeliest(const at::Tensor& x, const at::Tensor& w, double temperature, const at::Tensor& ids,
                 const at::Tensor& logprobs);

  /// Both at once, without a filter, in float32 or bfloat16: the log-probabilities of `forward`, bit for bit, and the
  /// gradients from what `loss` makes of them. The logits of some rows are kept until their loss is known, so that
  /// three products are enough instead of four.
  void forward_backward(const at::Tensor& x, const at::Tensor& w, const RowTargets& wanted, const TokenScoring& scoring,
                        const at::Tensor& logprobs, const PairLoss& loss, const at::Tensor& d_x, const at::Tensor& d_w);

 private:
  struct RowRange {
    std::int64_t start, count;
  };
  // Whole rows of logits, where a filter or the float64 build needs them; else tiles of the vocabulary. `kept` [tiles,
  // count, kVocabBlock] takes the logits of the range to its backward; null: they are computed again there.
  at::Tensor scratch(at::Tensor& buffer, at::IntArrayRef shape, at::ScalarType dtype);
  void score_tiles(const at::Tensor& x, const at::Tensor& w, const RowTargets& wanted, float temperature,
                   RowRange range, float* kept, float* logprobs, RowSums* sums, const at::Tensor& entropy);
  void forward_rows(const at::Tensor& x, const at::Tensor& w, const RowTargets& wanted, const TokenScoring& scoring,
                    const PairValues& values, RowSums* sums, const at::Tensor& entropy);
  void backward_tiles(const at::Tensor& x, const at::Tensor& w, const RowTargets& wanted, float temperature,
                      RowRange range, const float* kept, const float* d_logprobs, const float* d_entropy,
                      const RowSums* sums, const at::Tensor& d_x, const at::Tensor& d_w);
  void backward_rows(const at::Tensor& x, const at::Tensor& w, const RowTargets& wanted, const TokenScoring& scoring,
                     const PairValues& d_values, const RowSums* sums, const at::Tensor& d_x, const at::Tensor& d_w,
                     const at::Tensor& d_entropy);
  // On a CUDA device: chunks of whole rows of logits, whatever the scoring (vocabulary_head_device.cpp).
  struct DevicePairs {
    at::Tensor first, targets;
    kernels::SamplingRule rule;
  };
  DevicePairs device_pairs(const at::Tensor& x, const RowTargets& wanted, const TokenScoring& scoring) const;
  void forward_on_device(const at::Tensor& x, const at::Tensor& w, const RowTargets& wanted,
                         const TokenScoring& scoring, const PairValues& values, const at::Tensor& entropy);
  void backward_on_device(const at::Tensor& x, const at::Tensor& w, const RowTargets& wanted,
                          const TokenScoring& scoring, const PairValues& d_values, const at::Tensor& d_x,
                          const at::Tensor& d_w, const at::Tensor& d_entropy);
  void forward_backward_on_device(const at::Tensor& x, const at::Tensor& w, const RowTargets& wanted,
                                  const TokenScoring& scoring, const at::Tensor& logprobs, const PairLoss& loss,
                                  const at::Tensor& d_x, const at::Tensor& d_w);
  at::Tensor device_scratch(at::Tensor& buffer, at::IntArrayRef shape, const at::TensorOptions& options);
  void chunk_gradient(std::int64_t start, const RowTargets& wanted, const TokenScoring& scoring,
                      const PairValues& d_values, const RowSums* sums, const at::Tensor& logits,
                      const at::Tensor& d_logits, const at::Tensor& d_entropy) const;
  void check(const at::Tensor& x, const at::Tensor& w, const RowTargets& wanted) const;
  at::Tensor whole_logits(const at::Tensor& x, const at::Tensor& w, at::ScalarType dtype);
  VocabSlice slice_;
  at::Tensor logits_, d_logits_, own_logits_;
  std::vector<kernels::VocabBlockSum> block_sums_;
  std::vector<float> target_logits_, pair_gradients_;
  std::vector<RowSums> fused_sums_;
};

}  // namespace nemo_rl::model
