// Stands in for cuBLASLt's header: the types in the interface of csrc/runtime/cublaslt.h.
#pragma once
#include <cuda_runtime_api.h>

enum cudaDataType_t { CUDA_R_32F, CUDA_R_16BF };
struct cublasLtMatmulAlgo_t {};
