// Where the rows of arrays of tokens lie: [rows, num_tokens], or without padding, one row after the other. `Args` is a
// struct of arguments with num_tokens and offsets ([num_rows + 1], or null where there is padding).
#pragma once
#include "kernels/matrix_view.h"

namespace nemo_rl::kernels {

template <class Args>
NRL_INLINE std::int64_t row_begin(const Args& a, std::int64_t b) {
  return a.offsets != nullptr ? a.offsets[b] : b * a.num_tokens;
}
template <class Args>
NRL_INLINE std::int64_t row_length(const Args& a, std::int64_t b) {
  return a.offsets != nullptr ? a.offsets[b + 1] - a.offsets[b] : a.num_tokens;
}
/// Row b of an input, which without padding lies as the outputs do.
template <class Args, class T>
NRL_INLINE const T* row_of(const Args& a, const MatrixView<T>& m, std::int64_t b) {
  return a.offsets != nullptr ? m.data + a.offsets[b] : m.row(b);
}

}  // namespace nemo_rl::kernels
