// Low-rank adapters that matrix products add to a frozen matrix: y = x · Wᵀ + (x · Aᵀ) · (s B)ᵀ with s = alpha / dim.
// Letters and types as in decoder.h. A and B are multiplied in type A, float32 for a bfloat16 model, so that small
// updates are not lost by rounding.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "model/parameters.h"

namespace nemo_rl::model {

/// The adapters of one matrix of a layer or of an expert, which may join several matrices of the checkpoint (q, k, v;
/// gate, up).
struct AddedToMatrix {
  /// Rows [begin, begin + b.size(0)) of the matrix are adapted.
  struct Part {
    std::int64_t begin = 0;
    at::Tensor b;                ///< [rows, dim] A: s B
    at::Tensor b_for_gradients;  ///< [dim, rows] S: the same, transposed and rounded
  };
  at::Tensor a;                ///< [parts · dim, in] A: one after the other
  at::Tensor a_for_gradients;  ///< the same in S, rounded
  std::vector<Part> parts;
  std::int64_t dim() const { return a.size(0) / static_cast<std::int64_t>(parts.size()); }
};

/// The adapters of a layer; matrices without adapters are omitted.
using AddedToLayer = ByMatrix<AddedToMatrix>;

/// The adapters of all layers of one model.
using AddedAdapters = std::vector<AddedToLayer>;

/// `count` rows of a batch that have the same adapters; nullptr: none.
struct AdapterRows {
  std::int64_t count = 0;
  const AddedAdapters* adapters = nullptr;
};
/// All rows of a batch, in order. Empty: all rows have the model's adapters, or none.
using RowAdapters = std::span<const AdapterRows>;

}  // namespace nemo_rl::model
