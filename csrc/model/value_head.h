// The value head: one scalar per row of the hidden states, score · norm(h), and the backward pass.
#pragma once
#include "model/head_rows.h"

namespace nemo_rl::model {

class ValueHead {
 public:
  /// Returns values [R] in A: the value of the state before each token of the query, from the row of the token before
  /// it.
  at::Tensor forward(const Decoder& decoder, const at::Tensor& h, const TokenQuery& query, Workspace& workspace);

  /// From d_values [R] of the last forward (same h and query): adds the gradients of head and final norm to `grads`.
  /// Returns dh [T, D], zero in all rows that were not requested.
  at::Tensor backward(const Decoder& decoder, const at::Tensor& h, const TokenQuery& query, const at::Tensor& d_values,
                      const DecoderParameters& grads, Workspace& workspace);

 private:
  HeadRows rows_;
};

}  // namespace nemo_rl::model
