// One product by cuBLASLt: a problem as the library sees it (column-major), the algorithms it offers, and a run with
// one of them. For csrc/ops/*_cuda.cpp only.
#pragma once
#include <cublasLt.h>

#include <cstdint>
#include <vector>

#include "runtime/cuda_launch.h"

namespace nemo_rl::runtime {

/// c [m, n] (+)= op(a) [m, k] · op(b) [k, n], all column-major. Sums are float32; float32 operands are multiplied as
/// such (no TF32).
struct CublasProblem {
  bool transpose_a = false, transpose_b = false;
  std::int64_t m = 0, n = 0, k = 0;
  std::int64_t lda = 0, ldb = 0, ldc = 0;
  cudaDataType_t in = CUDA_R_32F, out = CUDA_R_32F;
  std::uint32_t alignment = 16;  ///< bytes: of every pointer and of every column
};

struct CublasOperands {
  const void *a = nullptr, *b = nullptr;
  void* c = nullptr;
};

struct CublasAlgorithm {
  cublasLtMatmulAlgo_t algo;
  std::size_t workspace_bytes = 0;
};

cudaDataType_t cublas_type(at::ScalarType dtype, const char* op);

/// What the library offers, best first; with `whole_sums` only algorithms that compute each output in one go along k.
std::vector<CublasAlgorithm> cublas_algorithms(const CublasProblem& problem, bool whole_sums, int device);

/// False where the library refuses; the launch's own errors are the caller's to check.
bool cublas_run(const CublasProblem& problem, const CublasOperands& operands, const CublasAlgorithm& algorithm,
                bool accumulate, const CudaLaunch& launch);

}  // namespace nemo_rl::runtime
