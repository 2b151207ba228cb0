// Stands in for csrc/kernels/cuda/tensor_core.cuh: the same functions by the layouts that the PTX manual gives. A copy
// is done only where its thread waits for it, so what is read too early is not there yet.
#pragma once
#include <cuda_runtime_api.h>

#include "common/bfloat16.h"

namespace nemo_rl::kernels {

using emulation::Place;

namespace emulated {

inline float half_of(std::uint32_t pair, int right) { return __uint_as_float(right ? pair & 0xffff0000u : pair << 16); }

/// The words that all lanes show.
template <int Words>
struct WarpWords {
  std::uint32_t of[32][Words];
  WarpWords(const std::uint32_t (&mine)[Words], const char* what, const Place& place) {
    struct Held {
      std::uint32_t words[Words];
    } held;
    std::memcpy(held.words, mine, sizeof held);
    std::uint32_t present = 0;
    const emulation::Shown shown = emulation::show(held, what, place, present);
    if (present != 0xffffffffu)
      emulation::fail(std::string(what) + " without all lanes of a warp: " + emulation::name_of(place));
    for (int lane = 0; lane < 32; ++lane) std::memcpy(of[lane], shown[lane], sizeof held);
  }
};

/// Rows of the four matrices.
struct MatrixRows {
  const bfloat16* row[32];
  MatrixRows(const bfloat16* mine, const Place& place) {
    const char* const begin = reinterpret_cast<const char*>(mine);
    if (reinterpret_cast<std::uintptr_t>(mine) % 16 != 0)
      emulation::fail("matrix row that is not 16-byte aligned: " + emulation::name_of(place));
    if (begin < emulation::shared_bytes || begin + 16 > emulation::shared_bytes + emulation::kMostSharedBytes)
      emulation::fail("matrix row outside of shared memory: " + emulation::name_of(place));
    std::uint32_t present = 0;
    const emulation::Shown shown = emulation::show(mine, "matrix load", place, present);
    if (present != 0xffffffffu)
      emulation::fail("matrix load without all lanes of a warp: " + emulation::name_of(place));
    for (int lane = 0; lane < 32; ++lane) std::memcpy(&row[lane], shown[lane], sizeof row[lane]);
  }
};

inline std::uint32_t pair_of(bfloat16 left, bfloat16 right) {
  return left.bits | static_cast<std::uint32_t>(right.bits) << 16;
}

}  // namespace emulated

inline void multiply_add(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1,
                         const Place place = Place::current()) {
  const std::uint32_t b[2] = {b0, b1};
  const emulated::WarpWords<4> all_a(a, "matrix product", place);
  const emulated::WarpWords<2> all_b(b, "matrix product", place);
  const int g = emulation::lane() / 4, t = emulation::lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int row_half = i / 2, column = 2 * t + i % 2;
    for (int k = 0; k < 16; ++k) {
      const int lane = k % 8 / 2, upper = k / 8;
      const float x = emulated::half_of(all_a.of[4 * g + lane][2 * upper + row_half], k % 2);
      const float y = emulated::half_of(all_b.of[4 * column + lane][upper], k % 2);
      d[i] += x * y;
    }
  }
}

inline void load_matrices(const bfloat16* row, std::uint32_t (&to)[4], const Place place = Place::current()) {
  const emulated::MatrixRows rows(row, place);
  const int g = emulation::lane() / 4, t = emulation::lane() % 4;
  for (int i = 0; i < 4; ++i) to[i] = emulated::pair_of(rows.row[8 * i + g][2 * t], rows.row[8 * i + g][2 * t + 1]);
}

inline void load_matrices_transposed(const bfloat16* row, std::uint32_t (&to)[4],
                                     const Place place = Place::current()) {
  const emulated::MatrixRows rows(row, place);
  const int g = emulation::lane() / 4, t = emulation::lane() % 4;
  for (int i = 0; i < 4; ++i) to[i] = emulated::pair_of(rows.row[8 * i + 2 * t][g], rows.row[8 * i + 2 * t + 1][g]);
}

inline std::uint32_t bfloat16_pair(float left, float right) {
  return emulated::pair_of(bfloat16(left), bfloat16(right));
}

inline float power_of_2(float x) { return x < -126.0f ? 0.0f : std::exp2(x); }

template <int Bytes>
void copy_async(void* to, const void* from, bool present, const Place place = Place::current()) {
  const char* const begin = static_cast<char*>(to);
  if (begin < emulation::shared_bytes || begin + Bytes > emulation::shared_bytes + emulation::kMostSharedBytes)
    emulation::fail("copy to outside of shared memory: " + emulation::name_of(place));
  if (reinterpret_cast<std::uintptr_t>(to) % Bytes != 0 || reinterpret_cast<std::uintptr_t>(from) % Bytes != 0)
    emulation::fail("copy between addresses that are no multiples of " + std::to_string(Bytes) + ": " +
                    emulation::name_of(place));
  emulation::block.fibers[emulation::block.current].copies.back().push_back({to, present ? from : nullptr, Bytes});
}

inline void commit_copies() { emulation::block.fibers[emulation::block.current].copies.emplace_back(); }

template <int Newest>
void wait_for_copies() {
  auto& groups = emulation::block.fibers[emulation::block.current].copies;
  for (; groups.size() > Newest + 1; groups.erase(groups.begin()))
    for (const emulation::Copy& copy : groups.front()) {
      if (copy.from == nullptr) std::memset(copy.to, 0, copy.bytes);
      else std::memcpy(copy.to, copy.from, copy.bytes);
    }
}

}  // namespace nemo_rl::kernels
