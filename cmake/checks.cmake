# AddressSanitizer and UndefinedBehaviorSanitizer with gcc, and fuzz targets with clang (libFuzzer; with gcc a program that replays the
# corpus). Nothing here is installed; `.ci/checks` runs it.
#   sanitized_tests      all C++ tests on a core whose common, batching, configuration, generation and CPU kernels are sanitized. The
#                        tests and what uses torch (runtime, ops, distributed, refit, model, trainer) come from an ordinary build
#                        (NEMO_RL_ORDINARY_BUILD), in which nemo_core_tests is compiled
#   fuzz_<target>        tests/fuzz/fuzz_<target>.cpp
set(NEMO_RL_ORDINARY_BUILD "" CACHE PATH "build folder whose objects of the tests, runtime, ops, distributed, refit, model and trainer are taken")
set(NEMO_KERNELS_ELSEWHERE "" CACHE STRING "variants of the kernels that this machine cannot run: taken from there, too")
set(NEMO_KERNEL_OPTIMIZATION -O1 CACHE STRING "of the CPU kernels")     # NRL_SANITIZED keeps that to seconds a file
set(_sanitize -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
set(CMAKE_BUILD_TYPE "")
add_compile_definitions(NRL_SANITIZED)
add_compile_options(-g1 -O1 ${_sanitize} -Wall -Wno-psabi -Wno-unknown-pragmas)
add_link_options(${_sanitize})

file(GLOB NEMO_CONFIG_SOURCES CONFIGURE_DEPENDS csrc/config/*.cpp)
add_library(checked_config STATIC ${NEMO_CONFIG_SOURCES})
target_include_directories(checked_config PUBLIC csrc)
target_link_libraries(checked_config PUBLIC nemo::yaml_cpp)

find_package(GTest QUIET)
if(GTest_FOUND AND NEMO_RL_ORDINARY_BUILD)
  include(cmake/kernels.cmake)
  file(GLOB_RECURSE _tests "${NEMO_RL_ORDINARY_BUILD}/CMakeFiles/nemo_core_tests.dir/tests/*.o"
       "${NEMO_RL_ORDINARY_BUILD}/CMakeFiles/nemo_rl_nccl_emulation.dir/*.o")
  file(GLOB _core_sources CONFIGURE_DEPENDS csrc/common/*.cpp csrc/kernels/*.cpp csrc/batching/*.cpp csrc/generation/*.cpp)
  set(_objects "")
  foreach(_folder runtime ops distributed refit model trainer)
    file(GLOB _found "${NEMO_RL_ORDINARY_BUILD}/CMakeFiles/nemo_rl_core.dir/csrc/${_folder}/*.o"
         "${NEMO_RL_ORDINARY_BUILD}/CMakeFiles/nemo_rl_core.dir/Unity/unity_${_folder}_*.o")
    list(APPEND _objects ${_found})
  endforeach()
  # sanitized objects first: the linker keeps the first copy of an inline function
  add_executable(sanitized_tests ${_core_sources} ${NEMO_KERNEL_OBJECTS} ${_objects} ${_tests})
  target_include_directories(sanitized_tests PRIVATE csrc)
  set_target_properties(sanitized_tests PROPERTIES BUILD_RPATH "${T}/lib")
  nemo_precompile(sanitized_tests <ATen/ATen.h>)
  target_link_libraries(sanitized_tests PRIVATE checked_config nemo::torch "${T}/lib/libgomp.so.1" GTest::gtest_main)
endif()

if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  target_compile_options(checked_config PRIVATE -fsanitize=fuzzer-no-link)     # what libFuzzer follows
endif()
file(GLOB _fuzzers CONFIGURE_DEPENDS tests/fuzz/fuzz_*.cpp)
foreach(_file IN LISTS _fuzzers)
  get_filename_component(_name "${_file}" NAME_WE)
  add_executable(${_name} EXCLUDE_FROM_ALL ${_file} csrc/generation/stop_strings.cpp)
  target_link_libraries(${_name} PRIVATE checked_config)
  if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    target_compile_options(${_name} PRIVATE -fsanitize=fuzzer-no-link)
    target_link_options(${_name} PRIVATE -fsanitize=fuzzer)
  else()
    target_sources(${_name} PRIVATE tests/fuzz/replay.cpp)
  endif()
  list(APPEND NEMO_FUZZERS ${_name})
endforeach()
add_custom_target(fuzzers DEPENDS ${NEMO_FUZZERS})
