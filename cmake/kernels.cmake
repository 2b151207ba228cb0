# Each file of csrc/kernels/cpu/ is compiled once for each variant that its kernels have; common/cpu_capability.h chooses at run time.
# No -march=native: one wheel serves every machine.
file(GLOB NEMO_CPU_KERNELS CONFIGURE_DEPENDS csrc/kernels/cpu/*.cpp)
set(NEMO_KERNEL_OBJECTS "")
set(NEMO_KERNEL_OPTIMIZATION -O3 CACHE STRING "of the CPU kernels")
# csrc/kernels/tiles/ holds the kernels that AMX has of its own; they are compiled for it, and with a tile in software.
file(GLOB NEMO_TILE_KERNELS CONFIGURE_DEPENDS csrc/kernels/tiles/*.cpp)
# GCC 12 looks for the last store to each lane of the loss's many vectors: half the time of that file, at no gain
set_source_files_properties(csrc/kernels/cpu/clipped_pg_loss.cpp PROPERTIES
  COMPILE_OPTIONS "$<$<CXX_COMPILER_ID:GNU>:--param=sccvn-max-alias-queries-per-access=30>")
# of a build that lacks NEMO_KERNELS_ELSEWHERE's variants, their objects of another build (cmake/checks.cmake)
function(nemo_kernel_objects name sources)
  if(name IN_LIST NEMO_KERNELS_ELSEWHERE)
    file(GLOB_RECURSE _found "${NEMO_RL_ORDINARY_BUILD}/CMakeFiles/nemo_kernels_${name}.dir/*.o")
    set(NEMO_KERNEL_OBJECTS ${NEMO_KERNEL_OBJECTS} ${_found} PARENT_SCOPE)
    return()
  endif()
  add_library(nemo_kernels_${name} OBJECT ${sources})
  target_include_directories(nemo_kernels_${name} PRIVATE csrc)
  target_compile_definitions(nemo_kernels_${name} PRIVATE NRL_CAPABILITY=${name})
  # -ffp-contract=off: multiply-adds are written out, so that the same bits come from every compiler and path
  target_compile_options(nemo_kernels_${name} PRIVATE ${NEMO_KERNEL_OPTIMIZATION} -fno-math-errno -fno-trapping-math -ffp-contract=off -Wall -Wno-psabi -Wno-uninitialized -Wno-maybe-uninitialized ${ARGN})
  nemo_precompile(nemo_kernels_${name} <kernels/cpu/vec.h>)
  set(NEMO_KERNEL_OBJECTS ${NEMO_KERNEL_OBJECTS} $<TARGET_OBJECTS:nemo_kernels_${name}> PARENT_SCOPE)
endfunction()
# what multiplies pairs of bfloat16, where there are instructions for them: the files of NRL_DECLARE_PAIR_KERNEL
set(NEMO_PAIR_KERNELS ${NEMO_CPU_KERNELS})
list(FILTER NEMO_PAIR_KERNELS INCLUDE REGEX "/(attention_[a-z]+|gemm|kv_cache|linear_[a-z]+|packed_weights)[.]cpp$")
if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  nemo_kernel_objects(base "${NEMO_CPU_KERNELS}")
else()
  # a fallback for processors older than AVX2, and what other bits are compared with: quick to compile rather than quick
  nemo_kernel_objects(base "${NEMO_CPU_KERNELS}" -O1)
  set(_avx512 -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512)
  nemo_kernel_objects(avx2 "${NEMO_CPU_KERNELS}" -mavx2 -mfma -mf16c)
  nemo_kernel_objects(avx512 "${NEMO_CPU_KERNELS}" ${_avx512})
  nemo_kernel_objects(avx512_bf16 "${NEMO_PAIR_KERNELS}" ${_avx512} -mavx512bf16)
  nemo_kernel_objects(software_tiles "${NEMO_TILE_KERNELS}" -mavx2 -mfma -mf16c)
  # -fno-exceptions: destructors release tiles and restore how denormals count; the compiler else leaves a mergeable symbol for them
  nemo_kernel_objects(software_tiles_avx512 "${NEMO_TILE_KERNELS}" ${_avx512} -fno-exceptions)
  nemo_kernel_objects(amx "${NEMO_TILE_KERNELS}" ${_avx512} -mavx512bf16 -DNRL_HARDWARE_TILES -fno-exceptions)
endif()
