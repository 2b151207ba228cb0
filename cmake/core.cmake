# What knows nothing of Python: nemo_rl_core, nemo_rl_config and the objects of the CUDA kernels. A build for one more Python takes them
# as they are (cmake/built.cmake), so that the wheels of a release share one core, to the bit.

# ---- core: a shared library without Python, so that _C, _cuda and the GoogleTest binary use one copy
file(GLOB NEMO_CORE_SOURCES CONFIGURE_DEPENDS csrc/common/*.cpp csrc/kernels/*.cpp csrc/batching/*.cpp csrc/runtime/*.cpp csrc/ops/*.cpp csrc/distributed/*.cpp
     csrc/model/*.cpp csrc/trainer/*.cpp csrc/generation/*.cpp csrc/refit/*.cpp)
list(FILTER NEMO_CORE_SOURCES EXCLUDE REGEX "_cuda\\.cpp$|nccl_[a-z_]*\\.cpp$")     # these belong to _cuda
add_library(nemo_rl_core SHARED ${NEMO_CORE_SOURCES} ${NEMO_KERNEL_OBJECTS})
target_include_directories(nemo_rl_core PUBLIC csrc)
target_link_libraries(nemo_rl_core PUBLIC nemo::torch)
# -fopenmp: without it at::parallel_for runs on one thread, silently. Compile-time only: torch's own libgomp serves at run time.
target_compile_options(nemo_rl_core PRIVATE -fopenmp -Wall -Wno-psabi -Wno-unknown-pragmas)
set_target_properties(nemo_rl_core PROPERTIES INSTALL_RPATH "${NEMO_RPATH}")
if(NOT NEMO_RL_BUILD_TESTS)
  set_target_properties(nemo_rl_core PROPERTIES BUILD_WITH_INSTALL_RPATH ON)     # nothing runs in the build folder; the file can be taken from there
endif()
if(NEMO_RL_BUILD_PYTHON)
  install(TARGETS nemo_rl_core LIBRARY DESTINATION nemo_rl_cpp)
endif()
nemo_precompile(nemo_rl_core <string> <vector> <runtime/tensor.h>)
nemo_compile_together(nemo_rl_core 6 ${NEMO_CORE_SOURCES})

# ---- config: yaml-cpp only, no torch
file(GLOB NEMO_CONFIG_SOURCES CONFIGURE_DEPENDS csrc/config/*.cpp)
add_library(nemo_rl_config STATIC ${NEMO_CONFIG_SOURCES})
target_include_directories(nemo_rl_config PUBLIC csrc)
target_compile_options(nemo_rl_config PRIVATE -Wall)
nemo_compile_together(nemo_rl_config 5 ${NEMO_CONFIG_SOURCES})
target_link_libraries(nemo_rl_config PUBLIC nemo::yaml_cpp)

# ---- CUDA: the objects of the module _cuda, which is one Python's
set(NEMO_CUDA_OBJECTS "")
if(NEMO_HAVE_CUDA)
  file(GLOB NEMO_CUDA_SOURCES CONFIGURE_DEPENDS csrc/kernels/cuda/*.cu csrc/runtime/*_cuda.cpp csrc/ops/*_cuda.cpp)
  add_library(nemo_rl_cuda OBJECT ${NEMO_CUDA_SOURCES})
  target_include_directories(nemo_rl_cuda PRIVATE csrc)
  target_include_directories(nemo_rl_cuda SYSTEM PRIVATE $<$<COMPILE_LANGUAGE:CXX>:${NEMO_CUBLASLT_INCLUDE}>)
  target_link_libraries(nemo_rl_cuda PRIVATE nemo::torch nemo::torch_cuda nemo::cuda)
  target_compile_options(nemo_rl_cuda PRIVATE -fvisibility=hidden -Wall "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;-lineinfo;-Xfatbin=-compress-all>")
  if(TARGET nemo::nccl)
    file(GLOB NEMO_NCCL_SOURCES CONFIGURE_DEPENDS csrc/distributed/nccl_*.cpp)
    target_sources(nemo_rl_cuda PRIVATE ${NEMO_NCCL_SOURCES})
    # before the toolkit's include folder, which may hold an older nccl.h
    target_include_directories(nemo_rl_cuda SYSTEM BEFORE PRIVATE $<TARGET_PROPERTY:nemo::nccl,INTERFACE_SYSTEM_INCLUDE_DIRECTORIES>)
  endif()
  set(NEMO_CUDA_OBJECTS $<TARGET_OBJECTS:nemo_rl_cuda>)
endif()
file(GENERATE OUTPUT "${CMAKE_BINARY_DIR}/cuda_objects.txt" CONTENT "${NEMO_CUDA_OBJECTS}")
