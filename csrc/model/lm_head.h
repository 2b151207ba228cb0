// Hidden states to log-probabilities of given tokens and back, in chunks of rows: [tokens, vocabulary] never exists.
#pragma once
#include "model/filtered_row.h"
#include "model/head_rows.h"

namespace nemo_rl::model {

/// One value for each pair of a query, [R] in A. `unfiltered` ignores top-k and top-p; undefined where it is not wanted.
struct PairValues {
  at::Tensor logprobs, unfiltered;
};

class LmHead {
 public:
  /// Log-probabilities of the targets, as the sampler reports them under `scoring`: -inf where its filter removes the
  /// token, NaN where a row of logits is not finite. Without a filter `unfiltered` is not filled.
  PairValues forward(const Decoder& decoder, const at::Tensor& h, const TokenQuery& query, const TokenScoring& scoring, bool with_unfiltered,
                     Workspace& workspace);

  /// From the gradient of the last forward's values (same h, query and scoring): adds the gradients of head and final
  /// norm to `grads` and returns dh [T, D], zero in rows nobody asked for. Logits are computed again, chunk by chunk.
  at::Tensor backward(const Decoder& decoder, const at::Tensor& h, const TokenQuery& query, const PairValues& d_values,
                      const TokenScoring& scoring, const DecoderParameters& grads, Workspace& workspace);

  /// Rows of logits in a chunk: about 64 MiB of them.
  static std::int64_t chunk_rows(std::int64_t vocab_size);

 private:
  struct PairRange { std::int64_t begin, end; };
  static std::vector<PairRange> pairs_of_rows(const TokenQuery& query);
  /// d_logits of the rows [begin, begin + count) of the query.
  void chunk_gradient(const TokenQuery& query, const std::vector<PairRange>& pairs, const PairValues& d_values, const TokenScoring& scoring,
                      std::int64_t begin, const at::Tensor& logits, const at::Tensor& d_logits) const;
  HeadRows rows_;
  std::vector<double> max_, log_sum_;  // [U] of the last forward's unfiltered rows
};

}  // namespace nemo_rl::model
