// A [rows, columns] array with unit stride along a row, and the reciprocal of a global count.
#pragma once
#include <cmath>
#include <cstdint>

#include "common/host_device.h"

namespace nemo_rl::kernels {

template <class T>
struct MatrixView {
  const T* data = nullptr;
  std::int64_t row_stride = 0;
  NRL_INLINE_MEMBER const T* row(std::int64_t b) const { return data + b * row_stride; }
};

/// 1 / (count + 1e-8), the sum rounded as the tensors' type rounds it.
template <class T>
NRL_INLINE double reciprocal_count(double count) {
  return 1.0 / static_cast<double>(static_cast<T>(count) + static_cast<T>(1e-8));
}

/// How the rows' entries of one column become the batch's.
enum class RowMerge { sum, min, max };

NRL_INLINE double merge_identity(RowMerge how) {
  return how == RowMerge::sum ? 0.0 : (how == RowMerge::min ? HUGE_VAL : -HUGE_VAL);
}

NRL_INLINE double merge_rows(RowMerge how, double a, double b) {
  if (how == RowMerge::sum) return a + b;
  return how == RowMerge::min ? (b < a ? b : a) : (b > a ? b : a);
}

}  // namespace nemo_rl::kernels
