// Stands in for CUDA's header where csrc/distributed/nccl_*.cpp is compiled for machines without a GPU: streams hold
// the kernels of nccl.cpp beside this file, and device memory is host memory. C++ names, so that nothing of them meets
// the CUDA that torch itself is linked with.
#pragma once

namespace nccl_emulation {
struct Stream;
struct Event;
}  // namespace nccl_emulation

using cudaStream_t = nccl_emulation::Stream*;
using cudaEvent_t = nccl_emulation::Event*;
enum cudaError_t { cudaSuccess = 0, cudaErrorNotReady = 600, cudaErrorLaunchFailure = 719 };
enum { cudaEventDisableTiming = 2 };

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaGetLastError();
const char* cudaGetErrorString(cudaError_t error);
