# The host side of NCCL's back end, csrc/distributed/nccl_*.cpp, with tests/nccl_emulation/ in the place of NCCL and CUDA: an object library
# for the C++ tests. The emulation's headers are found before torch's of the same names.
file(GLOB _emulated CONFIGURE_DEPENDS csrc/distributed/nccl_*.cpp tests/nccl_emulation/*.cpp)
add_library(nemo_rl_nccl_emulation OBJECT EXCLUDE_FROM_ALL ${_emulated})
target_include_directories(nemo_rl_nccl_emulation PRIVATE tests/nccl_emulation csrc tests)
target_link_libraries(nemo_rl_nccl_emulation PUBLIC nemo::torch)
target_compile_options(nemo_rl_nccl_emulation PRIVATE -Wall -Wno-psabi)
