// The end of the decoder in training: final norm and LM head, from the residual stream to the log-probabilities of
// given tokens, and the backward pass.
#pragma once
#include "model/head_rows.h"
#include "model/vocabulary_head.h"

namespace nemo_rl::model {

class LmHead {
 public:
  explicit LmHead(VocabSlice slice = {}) : head_(std::move(slice)) {}

  /// Returns the log-probabilities of the targets [R], see VocabularyHead. Without top-k and top-p `unfiltered` is not
  /// filled. entropy: undefined, or [U] in A on the device, filled for the rows of the query.
  PairValues forward(const Decoder& decoder, const at::Tensor& h, const TokenQuery& query, const TokenScoring& scoring,
                     bool with_unfiltered, const at::Tensor& entropy, Workspace& workspace);

  /// From the gradient of the last forward's values (same h, query and scoring), and of its entropy (undefined, or
  /// [U]): adds the gradients of head and final norm to `grads`. Returns dh [T, D], zero in all rows that were not
  /// requested.
  at::Tensor backward(const Decoder& decoder, const at::Tensor& h, const TokenQuery& query, const PairValues& d_values,
                      const at::Tensor& d_entropy, const TokenScoring& scoring, const DecoderParameters& grads,
                      Workspace& workspace);

  /// Finds the most likely tokens of the query's rows (VocabularyHead::likeliest).
  void likeliest(const Decoder& decoder, const at::Tensor& h, const TokenQuery& query, double temperature,
                 const at::Tensor& ids, const at::Tensor& logprobs, Workspace& workspace);

  /// Runs the head's forward and backward pass at once, for a loss of single tokens (VocabularyHead::forward_backward).
  /// Returns the log-probabilities of the targets [R] and adds the head's gradient to `grads`; `finish_backward` then
  /// computes the backward pass of the final norm.
  at::Tensor forward_backward(const Decoder& decoder, const at::Tensor& h, const TokenQuery& query,
                              const TokenScoring& scoring, const PairLoss& loss, const DecoderParameters& grads,
                              Workspace& workspace);
  at::Tensor finish_backward(const Decoder& decoder, const at::Tensor& h, const TokenQuery& query,
                             const DecoderParameters& grads, Workspace& workspace);

 private:
  RowTargets targets(const TokenQuery& query);
  HeadRows rows_;
  VocabularyHead head_;
  std::vector<std::int64_t> first_;  // [U + 1] of the last forward: first pair of each row
  std::vector<RowSums> sums_;        // [U]
  at::Tensor d_normed_;              // of the last forward_backward
};

}  // namespace nemo_rl::model
