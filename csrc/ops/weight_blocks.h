// Matrices whose weights lie in blocks of 32 (kernels/weight_blocks.h): frozen ones, in a quarter or half of the memory
// of bfloat16, on the CPU or on a CUDA device. As a tensor such a matrix is uint8 [N, bytes of a row]; its format
// follows from K. Its memory are tiles of 16 rows, which only the kernels read; a part of it (`narrow`) begins at a row
// that is a multiple of 16. Products are in ops/linear.h.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>

#include "kernels/weight_blocks.h"
#include "runtime/cuda_dispatch.h"

namespace nemo_rl::ops {

using kernels::BlockFormat;

/// "q8_0", "q4_0" or "nf4"; throws ArgumentError for another name.
BlockFormat block_format(const std::string& name);

/// Whether the matrix lies in blocks.
inline bool in_blocks(const at::Tensor& w) { return w.scalar_type() == at::kByte; }

/// w [N, K] as its kernels read it.
class BlockMatrix {
 public:
  /// `blocks`: uint8 [N, bytes of a row], contiguous, with memory for whole tiles. Throws ArgumentError where no format
  /// has rows of so many bytes.
  BlockMatrix(const at::Tensor& blocks, std::int64_t columns);

  BlockFormat format() const { return format_; }
  std::int64_t rows() const { return rows_; }
  std::int64_t columns() const { return columns_; }
  std::byte* tiles() const { return at_; }

 private:
  BlockFormat format_;
  std::int64_t rows_, columns_;
  std::byte* at_;
};

/// A matrix of zeros.
at::Tensor zero_blocks(std::int64_t rows, std::int64_t columns, BlockFormat format);
/// Quantises w [n, K], float32 or bfloat16 with contiguous rows, into rows [first, first + n) of a matrix.
void pack_blocks(const at::Tensor& w, const at::Tensor& blocks, std::int64_t first = 0);
/// Writes `rows`, uint8 [n, bytes of a row] with block after block as in a file, to rows [first, first + n) of a
/// matrix.
void write_block_rows(const at::Tensor& rows, const at::Tensor& blocks, std::int64_t columns, std::int64_t first = 0);
/// Rows [first, first + count) of a matrix in that order.
at::Tensor read_block_rows(const at::Tensor& blocks, std::int64_t columns, std::int64_t first, std::int64_t count);
/// Writes the weights of rows [first, first + n) to w [n, K], float32 or bfloat16 with contiguous rows: scale · q,
/// rounded once to bfloat16. w is on the device of `blocks` or on the CPU.
void unpack_blocks(const at::Tensor& blocks, const at::Tensor& w, std::int64_t first = 0);

extern runtime::CudaSlot<void(const BlockMatrix& from, const at::Tensor& w, std::int64_t first)> unpack_blocks_cuda;

}  // namespace nemo_rl::ops
