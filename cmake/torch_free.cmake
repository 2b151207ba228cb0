# The sources that need no torch, and their GoogleTests, from GoogleTest's own sources: they are compiled for a processor that this
# machine is not (.ci/aarch64).
include(cmake/kernels.cmake)
set(NEMO_GOOGLETEST /usr/src/googletest CACHE PATH "GoogleTest's sources (Debian: googletest)")
set(BUILD_GMOCK OFF CACHE BOOL "" FORCE)
set(INSTALL_GTEST OFF CACHE BOOL "" FORCE)
add_subdirectory("${NEMO_GOOGLETEST}" googletest EXCLUDE_FROM_ALL)

file(GLOB _sources CONFIGURE_DEPENDS csrc/common/*.cpp csrc/kernels/*.cpp csrc/batching/*.cpp)
file(GLOB _tests CONFIGURE_DEPENDS tests/cpp/kernels/*.cpp tests/cpp/batching/*.cpp tests/cpp/test_random.cpp)
list(APPEND _tests tests/cpp/generation/test_stop_strings.cpp)
list(APPEND _sources csrc/generation/stop_strings.cpp)
add_executable(torch_free_tests ${_tests} ${_sources} ${NEMO_KERNEL_OBJECTS})
target_include_directories(torch_free_tests PRIVATE csrc tests/cpp tests)
target_link_libraries(torch_free_tests PRIVATE gtest_main)
