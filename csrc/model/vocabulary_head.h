// Log-probabilities of tokens from rows of (normed) hidden states, and the backward pass. Logits exist only for one
// tile of the vocabulary at a time, never as [tokens, vocabulary].
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "kernels/sampling.h"
#include "model/filtered_row.h"
#include "model/vocab_slice.h"

namespace nemo_rl::model {

/// The requested log-probabilities. Pair i requests token targets[i] after row r, where first[r] <= i < first[r + 1].
/// So a row that several tokens follow (the last token of a shared prompt) is computed once.
struct RowTargets {
  const std::int64_t* first;    ///< [U + 1]
  const std::int64_t* targets;  ///< indexed by pair
};

/// One value per pair. `unfiltered` ignores top-k and top-p; undefined if it is not requested.
struct PairValues {
  at::Tensor logprobs, unfiltered;
};

/// The log-sum-exp of a row without top-k and top-p, and its entropy if requested. A forward pass stores them for the
/// backward pass.
struct RowSums {
  double max = 0, log_sum = 0, entropy = 0;
};

/// A loss whose gradient at a pair depends only on that pair's log-probability. It writes d_logprobs of the pairs
/// [begin, end) from their logprobs; both arrays start at pair `begin`.
using PairLoss = std::function<void(std::int64_t begin, std::int64_t end, const float* logprobs, float* d_logprobs)>;

/// On a CUDA device the tensors are on the device and the targets on the CPU. `sums` is not used then: the backward
/// pass recomputes the sums.
class VocabularyHead {
 public:
  /// `slice`: w holds only these vocabulary entries. Other processes, which must make the same calls, hold the rest.
  /// Targets are ids of the whole vocabulary; d_x is the sum over all slices.
  explicit VocabularyHead(VocabSlice slice = {}) : slice_(std::move(slice)) {}

  /// Computes the log-probabilities of the targets after the rows x [U, D], as the sampler reports them under
  /// `scoring`: -inf if top-k or top-p removes the token, NaN if a row of logits is not finite. w [V, D]. `values` are
  /// [R] in A, defined if requested; without top-k and top-p `unfiltered` must be undefined. sums [U] and entropy ([U],
  /// in nats, at this temperature; may be undefined) are those of the distribution without top-k and top-p, and are
  /// filled if it is computed.
  void forward(const at::Tensor& x, const at::Tensor& w, const RowTargets& wanted, const TokenScoring& scoring,
               const PairValues& values, RowSums* sums, const at::Tensor& entropy);

  /// From the gradient of those values, and of the entropy (d_entropy [U] in A, or undefined): overwrites d_x [U, D] in
  /// A and adds to d_w [V, D] (undefined: the head is frozen). Logits are recomputed.
  void backward(const at::Tensor& x, const at::Tensor& w, const RowTargets& wanted, const TokenScoring& scoring,
                const PairValues& d_values, const RowSums* sums, const at::Tensor& d_x, const at::Tensor& d_w,
                const at::Tensor& d_entropy = {});

  /// Finds the most likely tokens of each row without top-k and top-p, most likely first and ties by id: ids [U, k]
  /// int64 and their log-probabilities [U, k] in A, on the CPU.
  void likeliest(const at::Tensor& x, const at::Tensor& w, double temperature, const at::Tensor& ids,
                 const at::Tensor& logprobs);

  /// Computes forward and backward pass at once, without top-k and top-p, in float32 or bfloat16: the log-probabilities
  /// of `forward`, bit for bit, and the gradients that `loss` derives from them. The logits of some rows are kept until
  /// their loss is known, so three matrix products are needed instead of four.
  void forward_backward(const at::Tensor& x, const at::Tensor& w, const RowTargets& wanted, const TokenScoring& scoring,
                        const at::Tensor& logprobs, const PairLoss& loss, const at::Tensor& d_x, const at::Tensor& d_w);

 private:
  struct RowRange {
    std::int64_t start, count;
  };
  // *_rows use whole rows of logits, for top-k, top-p and float64; *_tiles use tiles of the vocabulary. `kept` [tiles,
  // count, kVocabBlock] keeps the logits of the range for its backward pass; null: they are recomputed there.
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
  // On a CUDA device: chunks of whole rows of logits for any scoring (vocabulary_head_device.cpp).
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
