// Matrices whose weights lie in blocks of 32 (kernels/weight_blocks.h): frozen ones, in a quarter or half of the memory
// of bfloat16. As a tensor such a matrix is uint8 [N, bytes of a row]; its format follows from K. Products are in
// ops/linear.h.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>

#include "kernels/weight_blocks.h"

namespace nemo_rl::ops {

using kernels::BlockFormat;

/// "q8_0", "q4_0" or "nf4"; throws ArgumentError for another name.
BlockFormat block_format(const std::string& name);

/// Whether the matrix lies in blocks.
inline bool in_blocks(const at::Tensor& w) { return w.scalar_type() == at::kByte; }

/// w [N, K] as its kernels read it.
class BlockMatrix {
 public:
  /// `blocks`: uint8 [N, bytes of a row], contiguous, on the CPU. Throws ArgumentError where no format has rows of so
  /// many bytes.
  BlockMatrix(const at::Tensor& blocks, std::int64_t columns);

  BlockFormat format() const { return format_; }
  std::int64_t rows() const { return rows_; }
  std::int64_t columns() const { return columns_; }
  std::byte* row(std::int64_t n) const { return at_ + n * kernels::block_row_bytes(format_, columns_); }

 private:
  BlockFormat format_;
  std::int64_t rows_, columns_;
  std::byte* at_;
};

/// Writes w [N, K], float32 or bfloat16 with contiguous rows, as blocks to uint8 [N, bytes of a row].
void pack_blocks(const at::Tensor& w, const at::Tensor& blocks);
/// Writes the weights to w [N, K], float32 or bfloat16 with contiguous rows: scale · q, rounded once to bfloat16.
void unpack_blocks(const at::Tensor& blocks, const at::Tensor& w);

}  // namespace nemo_rl::ops
