// Hidden states to log-probabilities of given tokens and back, in chunks of rows: [tokens, vocabulary] never exists.
#pragma once
#include "model/decoder.h"

namespace nemo_rl::model {

/// Which log-probabilities are wanted. A row that several tokens follow (the last token of a shared prompt) is computed
/// once: pair i asks for token targets[i] after hidden row rows[pair_row[i]]; pair_row is non-decreasing.
struct LogprobQuery {
  std::vector<std::int64_t> rows;      ///< [U] rows of the hidden states, each once
  std::vector<std::int64_t> pair_row;  ///< [R] index into rows
  std::vector<std::int64_t> targets;   ///< [R] token ids
};

class LmHead {
 public:
  /// logprobs [R] in A: log_softmax(logits / temperature)[target].
  at::Tensor forward(const Decoder& decoder, const at::Tensor& h, const LogprobQuery& query, double temperature, Workspace& workspace);

  /// From d_logprobs [R] of the last forward (same h and query): adds the gradients of head and final norm to `grads` and
  /// returns dh [T, D], zero in rows nobody asked for. Logits are computed again, chunk by chunk.
  at::Tensor backward(const Decoder& decoder, const at::Tensor& h, const LogprobQuery& query, const at::Tensor& d_logprobs, double temperature,
                      const DecoderParameters& grads, Workspace& workspace);

  /// Rows of logits in a chunk: about 64 MiB of them.
  static std::int64_t chunk_rows(std::int64_t vocab_size);

 private:
  void gather(const Decoder& decoder, const at::Tensor& h, const LogprobQuery& query, Workspace& workspace);
  at::Tensor hidden_, normed_, rstd_;  // [U, D], [U, D], [U, 1]
  std::vector<double> max_, log_sum_;  // [U] of the last forward
};

}  // namespace nemo_rl::model
