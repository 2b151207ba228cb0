// Hidden states to values of given tokens' states and back: one scalar a row, score · norm(h).
#pragma once
#include "model/head_rows.h"

namespace nemo_rl::model {

class ValueHead {
 public:
  /// values [R] in A: V of the state before each token of the query, from the row of the token before it.
  at::Tensor forward(const Decoder& decoder, const at::Tensor& h, const TokenQuery& query, Workspace& workspace);

  /// From d_values [R] of the last forward (same h and query): adds the gradients of head and final norm to `grads` and
  /// returns dh [T, D], zero in rows nobody asked for.
  at::Tensor backward(const Decoder& decoder, const at::Tensor& h, const TokenQuery& query, const at::Tensor& d_values,
                      const DecoderParameters& grads, Workspace& workspace);

 private:
  HeadRows rows_;
};

}  // namespace nemo_rl::model
