// The rows of the hidden states that a head reads, after the final norm, and the backward pass from their gradient.
#pragma once
#include "model/decoder.h"

namespace nemo_rl::model {

/// The outputs requested of a head. Pair i requests the output for token targets[i] from hidden row rows[pair_row[i]],
/// the row of the token before it. A row that several tokens follow (the last token of a shared prompt) is listed once;
/// pair_row is non-decreasing.
struct TokenQuery {
  std::vector<std::int64_t> rows;      ///< [U] rows of the hidden states, each once
  std::vector<std::int64_t> pair_row;  ///< [R] index into rows
  std::vector<std::int64_t> targets;   ///< [R] token ids
};

class HeadRows {
 public:
  /// Gathers the requested rows of h [T, D] and normalises them.
  void gather(const Decoder& decoder, const at::Tensor& h, const TokenQuery& query, Workspace& workspace);

  /// Returns the buffer d_normed [U, D] in A, which the caller must fill before `backward`.
  at::Tensor d_normed(Workspace& workspace) const;

  /// Adds the final norm's gradient, from d_normed, to `grads`. Returns dh [T, D], zero in all rows that were not
  /// requested.
  at::Tensor backward(const Decoder& decoder, const at::Tensor& h, const TokenQuery& query, const at::Tensor& d_normed,
                      const DecoderParameters& grads, Workspace& workspace) const;

  std::int64_t size() const { return hidden_.defined() ? hidden_.size(0) : 0; }
  const at::Tensor& normed() const { return normed_; }  ///< [U, D] S

 private:
  at::Tensor hidden_, normed_, rstd_;  // [U, D], [U, D], [U, 1]
};

}  // namespace nemo_rl::model
