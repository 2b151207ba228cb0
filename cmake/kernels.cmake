# Each file of csrc/kernels/cpu/ is compiled once for every CPU capability; common/cpu_capability.h chooses at run time.
# No -march=native: one wheel serves every machine.
file(GLOB NEMO_CPU_KERNELS CONFIGURE_DEPENDS csrc/kernels/cpu/*.cpp)
set(NEMO_KERNEL_OBJECTS "")
function(nemo_kernel_capability name)
  add_library(nemo_kernels_${name} OBJECT ${NEMO_CPU_KERNELS})
  target_include_directories(nemo_kernels_${name} PRIVATE csrc)
  target_compile_definitions(nemo_kernels_${name} PRIVATE NRL_CAPABILITY=${name})
  # -ffp-contract=off: multiply-adds are written out, so that the same bits come from every compiler and path
  target_compile_options(nemo_kernels_${name} PRIVATE -O3 -fno-math-errno -fno-trapping-math -ffp-contract=off -Wall -Wno-psabi -Wno-uninitialized -Wno-maybe-uninitialized ${ARGN})
  set(NEMO_KERNEL_OBJECTS ${NEMO_KERNEL_OBJECTS} $<TARGET_OBJECTS:nemo_kernels_${name}> PARENT_SCOPE)
endfunction()
nemo_kernel_capability(base)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(_avx512 -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512)
  nemo_kernel_capability(avx2 -mavx2 -mfma -mf16c)
  nemo_kernel_capability(avx512 ${_avx512})
  nemo_kernel_capability(avx512_bf16 ${_avx512} -mavx512bf16)
endif()
