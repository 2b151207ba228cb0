// Memory for what kernels pack: at an address that is a multiple of 64.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace nemo_rl::kernels {

struct Room {
  explicit Room(std::int64_t bytes) : memory(static_cast<std::size_t>(bytes) + 64) {}
  void* get() {
    void* at = memory.data();
    std::size_t space = memory.size();
    return std::align(64, memory.size() - 64, at, space);
  }
  std::vector<std::byte> memory;
};

}  // namespace nemo_rl::kernels
