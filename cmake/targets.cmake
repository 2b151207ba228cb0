include(cmake/precompiled.cmake)

# ---- core: a shared library without Python, so that _C, _cuda and the GoogleTest binary use one copy
file(GLOB NEMO_CORE_SOURCES CONFIGURE_DEPENDS csrc/common/*.cpp csrc/kernels/*.cpp csrc/batching/*.cpp csrc/runtime/*.cpp csrc/ops/*.cpp csrc/distributed/*.cpp
     csrc/model/*.cpp csrc/trainer/*.cpp csrc/generation/*.cpp csrc/refit/*.cpp)
list(FILTER NEMO_CORE_SOURCES EXCLUDE REGEX "_cuda\\.cpp$|nccl_[a-z_]*\\.cpp$")     # these belong to _cuda
add_library(nemo_rl_core SHARED ${NEMO_CORE_SOURCES} ${NEMO_KERNEL_OBJECTS})
target_include_directories(nemo_rl_core PUBLIC csrc)
target_link_libraries(nemo_rl_core PUBLIC nemo::torch)
# -fopenmp: without it at::parallel_for runs on one thread, silently. Compile-time only: torch's own libgomp serves at run time.
target_compile_options(nemo_rl_core PRIVATE -fopenmp -Wall -Wno-psabi -Wno-unknown-pragmas)
set(NEMO_RPATH "$ORIGIN" "$ORIGIN/../torch/lib" "$ORIGIN/../nvidia/cu13/lib" "$ORIGIN/../nvidia/nccl/lib" "$ORIGIN/../cmeel.prefix/lib")
set_target_properties(nemo_rl_core PROPERTIES INSTALL_RPATH "${NEMO_RPATH}")

nemo_precompile(nemo_rl_core <string> <vector> <runtime/tensor.h>)

# ---- config: yaml-cpp only, no torch
file(GLOB NEMO_CONFIG_SOURCES CONFIGURE_DEPENDS csrc/config/*.cpp)
add_library(nemo_rl_config STATIC ${NEMO_CONFIG_SOURCES})
target_include_directories(nemo_rl_config PUBLIC csrc)
target_compile_options(nemo_rl_config PRIVATE -Wall)
target_link_libraries(nemo_rl_config PUBLIC nemo::yaml_cpp)

# ---- extension modules
if(NEMO_RL_BUILD_PYTHON)
  install(TARGETS nemo_rl_core LIBRARY DESTINATION nemo_rl_cpp)
  install(DIRECTORY configs DESTINATION nemo_rl_cpp)     # a wheel finds them without the source tree
  function(nemo_python_module name)
    Python_add_library(${name} MODULE WITH_SOABI ${ARGN})
    target_include_directories(${name} BEFORE PRIVATE ${NEMO_PYBIND11_INCLUDE})
    target_include_directories(${name} PRIVATE csrc)
    target_compile_options(${name} PRIVATE -fvisibility=hidden -Wall)
    set_target_properties(${name} PROPERTIES INSTALL_RPATH "${NEMO_RPATH}")
    install(TARGETS ${name} LIBRARY DESTINATION nemo_rl_cpp)
  endfunction()
  nemo_python_module(_config csrc/bindings/config_module.cpp)
  target_link_libraries(_config PRIVATE nemo_rl_config)
  find_package(Threads REQUIRED)
  nemo_python_module(_process csrc/bindings/process_module.cpp csrc/process/signal_watch.cpp csrc/process/unfinished.cpp)
  target_link_libraries(_process PRIVATE Threads::Threads)
  nemo_python_module(_text csrc/bindings/text_module.cpp)     # generation without torch's Python side, which takes seconds to load
  target_link_libraries(_text PRIVATE nemo_rl_core nemo::torch)
  file(GLOB NEMO_BINDINGS CONFIGURE_DEPENDS csrc/bindings/module.cpp csrc/bindings/bind_*.cpp)
  nemo_python_module(_C ${NEMO_BINDINGS})
  target_link_libraries(_C PRIVATE nemo_rl_core nemo::torch_python)
  target_compile_options(_C PRIVATE -O1)      # glue without arithmetic; higher levels only take time
  nemo_precompile(_C <pybind11/stl.h> <torch/csrc/utils/pybind.h> <runtime/tensor.h>)
  target_compile_definitions(_C PRIVATE NEMO_TORCH_VERSION="${NEMO_TORCH_VERSION}" NEMO_HAVE_CUDA=$<BOOL:${NEMO_HAVE_CUDA}>)
endif()

# ---- CUDA: a module of its own, imported only where torch itself is a CUDA build
file(GLOB NEMO_CUDA_SOURCES CONFIGURE_DEPENDS csrc/kernels/cuda/*.cu csrc/runtime/*_cuda.cpp csrc/ops/*_cuda.cpp csrc/bindings/cuda_module.cpp)
file(GLOB NEMO_NCCL_SOURCES CONFIGURE_DEPENDS csrc/distributed/nccl_*.cpp)
if(NEMO_HAVE_CUDA AND NEMO_RL_BUILD_PYTHON AND EXISTS "${CMAKE_SOURCE_DIR}/csrc/bindings/cuda_module.cpp")
  nemo_python_module(_cuda ${NEMO_CUDA_SOURCES})
  target_link_libraries(_cuda PRIVATE nemo_rl_core nemo::torch_python nemo::torch_cuda nemo::cuda nemo::cublaslt)
  target_include_directories(_cuda SYSTEM PRIVATE $<$<COMPILE_LANGUAGE:CXX>:${NEMO_CUBLASLT_INCLUDE}>)
  target_compile_options(_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -lineinfo -Xfatbin=-compress-all>)
  if(TARGET nemo::nccl)
    target_sources(_cuda PRIVATE ${NEMO_NCCL_SOURCES})
    target_link_libraries(_cuda PRIVATE nemo::nccl)
    # before the toolkit's include folder, which may hold an older nccl.h
    target_include_directories(_cuda SYSTEM BEFORE PRIVATE $<TARGET_PROPERTY:nemo::nccl,INTERFACE_SYSTEM_INCLUDE_DIRECTORIES>)
  endif()
endif()

# ---- GoogleTest: installed, else Debian's source package, else fetched; without it the build goes on
if(NEMO_RL_BUILD_TESTS)
  find_package(GTest QUIET)
  if(NOT GTest_FOUND AND EXISTS /usr/src/googletest/CMakeLists.txt)
    add_subdirectory(/usr/src/googletest gtest EXCLUDE_FROM_ALL)
  elseif(NOT GTest_FOUND AND NOT DEFINED ENV{NEMO_RL_NO_FETCH})
    # downloaded here, since a failed FetchContent of a URL ends the configuration
    set(_archive "${CMAKE_BINARY_DIR}/googletest-1.17.0.tar.gz")
    set(_sha256 65fab701d9829d38cb77c14acdc431d2108bfdbf8979e40eb8ae567edf10b27c)
    set(_got "")
    if(NOT EXISTS "${_archive}")
      message(STATUS "GoogleTest is not installed; trying to fetch it")
      file(DOWNLOAD https://github.com/google/googletest/archive/refs/tags/v1.17.0.tar.gz "${_archive}"
           TIMEOUT 60 INACTIVITY_TIMEOUT 10 STATUS _status)
    endif()
    if(EXISTS "${_archive}")
      file(SHA256 "${_archive}" _got)
    endif()
    if(_got STREQUAL _sha256)
      include(FetchContent)
      FetchContent_Declare(googletest URL "${_archive}" URL_HASH SHA256=${_sha256})
      FetchContent_MakeAvailable(googletest)
    else()
      file(REMOVE "${_archive}")
      message(STATUS "GoogleTest could not be fetched: ${_status}")
    endif()
  endif()
  file(GLOB_RECURSE NEMO_CPP_TESTS CONFIGURE_DEPENDS tests/cpp/*.cpp)
  if(NOT TARGET GTest::gtest_main AND NOT TARGET gtest_main)
    message(WARNING "GoogleTest was not found: the C++ tests are not built and `pytest` will say so (apt-get install libgtest-dev)")
  elseif(NEMO_CPP_TESTS)
    include(cmake/nccl_emulation.cmake)
    # not part of `all`: tests/unit/test_cpp_core.py builds it when it is first needed
    add_executable(nemo_core_tests EXCLUDE_FROM_ALL ${NEMO_CPP_TESTS} $<TARGET_OBJECTS:nemo_rl_nccl_emulation>)
    target_link_libraries(nemo_core_tests PRIVATE nemo_rl_core nemo_rl_config GTest::gtest_main)
    target_include_directories(nemo_core_tests PRIVATE tests/cpp tests tests/nccl_emulation)
    target_compile_options(nemo_core_tests PRIVATE -O1)
    nemo_precompile(nemo_core_tests <gtest/gtest.h> <ATen/ATen.h>)
  endif()
endif()

# ---- the torch version, readable without loading the extension: another torch is a sentence, not a crash
if(NEMO_RL_BUILD_PYTHON)
  file(WRITE "${CMAKE_BINARY_DIR}/_torch_version.txt" "${NEMO_TORCH_VERSION}\n")
  install(FILES "${CMAKE_BINARY_DIR}/_torch_version.txt" DESTINATION nemo_rl_cpp)
endif()
