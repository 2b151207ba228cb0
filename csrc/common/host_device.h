// Marks functions that both the CPU and the CUDA kernels compile, so that the CPU tests run the arithmetic of CUDA.
#pragma once

#if defined(__CUDACC__)
#define NRL_HOST_DEVICE __host__ __device__
#define NRL_INLINE __host__ __device__ static __forceinline__
#define NRL_INLINE_MEMBER __host__ __device__ __forceinline__
#else
#define NRL_HOST_DEVICE
// Never an external symbol: each CPU capability compiles its own copy, and the linker must not merge them.
#if defined(NRL_SANITIZED)  // with everything in one function a sanitizer takes a compiler minutes for it
#define NRL_INLINE static inline
#else
#define NRL_INLINE static inline __attribute__((always_inline))
#endif
#define NRL_INLINE_MEMBER inline __attribute__((always_inline))
#endif
