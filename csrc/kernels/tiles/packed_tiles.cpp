// Products of few rows of x with weights in twelve bits, where tiles form the other products. Vectors add up here, in
// the tiles' order (kernels/tiles/software_tiles.h): of 32 terms an even and an odd chain from zero, then the two, then
// the sum. So the bits are those of the tiles, and such a step has fewer bytes of weights to wait for.
#include "kernels/cpu/packed_strip.h"
#include "kernels/tiles/tile_block.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

#if defined(__AVX512BW__)
/// As long as it lives, denormal operands and results of vectors are zeros, as they are of tiles. What is computed
/// under it is loaded and stored while it lives: nothing else keeps the compiler from moving it out.
class DenormalsAreZero {
 public:
  [[gnu::always_inline]] DenormalsAreZero() {
    constexpr unsigned kOperands = 0x40, kResults = 0x8000;
    asm volatile("stmxcsr %0" : "=m"(before_));
    const unsigned now = before_ | kOperands | kResults;
    asm volatile("ldmxcsr %0" : : "m"(now) : "memory");
  }
  DenormalsAreZero(const DenormalsAreZero&) = delete;
  DenormalsAreZero& operator=(const DenormalsAreZero&) = delete;
  [[gnu::always_inline]] ~DenormalsAreZero() { asm volatile("ldmxcsr %0" : : "m"(before_) : "memory"); }

 private:
  unsigned before_;
};

constexpr int kStepBlocks = static_cast<int>(kTileTerms / PackedBlock::kTerms);

/// Words of 16 rows of weights as numbers: their even and their odd terms.
NRL_VEC __m512 even_terms(PackedBits words) { return _mm512_castsi512_ps(_mm512_slli_epi32((__m512i)words, 16)); }
NRL_VEC __m512 odd_terms(PackedBits words) {
  return _mm512_castsi512_ps(_mm512_and_si512((__m512i)words, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

/// out[r][width] = sums of a strip's rows with kRows rows of x, which lie side by side as floats.
template <int kRows>
[[gnu::noinline]] void packed_strip_by_steps(const float* x, const PackedMatrix& packed, std::int64_t strip,
                                             std::int64_t width, float* out) {
  const DenormalsAreZero as_of_tiles;
  PackedBlocks from(packed, strip);
  __m512 sums[kRows][2], even[kRows][2], odd[kRows][2];
  for (int r = 0; r < kRows; ++r)
    for (int half = 0; half < 2; ++half) sums[r][half] = _mm512_setzero_ps();
  const auto multiply = [&](const PackedBlock& block) __attribute__((always_inline)) {
#pragma GCC unroll 2
    for (int word = 0; word < 2; ++word, x += 2 * kRows)
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const __m512 first = even_terms(block.words[2 * word + half][0]),
                     second = odd_terms(block.words[2 * word + half][0]);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          even[r][half] = _mm512_fmadd_ps(first, _mm512_set1_ps(x[r]), even[r][half]);
          odd[r][half] = _mm512_fmadd_ps(second, _mm512_set1_ps(x[kRows + r]), odd[r][half]);
        }
      }
  };
  const std::int64_t blocks = packed.K / PackedBlock::kTerms;
  for (std::int64_t b = 0; b < blocks;) {
    for (int r = 0; r < kRows; ++r)
      for (int half = 0; half < 2; ++half) even[r][half] = odd[r][half] = _mm512_setzero_ps();
    for (const std::int64_t end = smaller(b + kStepBlocks, blocks); b < end; ++b)
      multiply(b == from.patched() ? from.next_patched() : from.next());
    const bool is_whole = b % kStepBlocks == 0;  // otherwise the step ends with terms that are zero
    for (int r = 0; r < kRows; ++r)
      for (int half = 0; half < 2; ++half) {
        if (!is_whole) even[r][half] += 0.0f, odd[r][half] += 0.0f;
        sums[r][half] += even[r][half] + odd[r][half];
      }
  }
  for (int r = 0; r < kRows; ++r)
    for (int half = 0; half < 2; ++half) _mm512_storeu_ps(out + r * width + kLanes * half, sums[r][half]);
}

struct PackedSteps {
  static constexpr SumOrder kOrder = Tiles::kOrder;
  static constexpr int kKinds = static_cast<int>(kPackedMostRowsTiles);
  static constexpr int kind_of(int rows) { return rows; }
  static constexpr int rows_of(int kind) { return kind; }
  template <int kRows>
  static void strip(const LinearInput<bfloat16>& p, const PackedMatrix& packed, std::int64_t number, std::int64_t width,
                    float* out) {
    packed_strip_by_steps<kRows>(static_cast<const float*>(p.packed), packed, number, width, out);
  }
};
constexpr std::int64_t kMostRows = PackedSteps::kKinds;
#else
using PackedSteps = PackedChains;
constexpr std::int64_t kMostRows = 0;
#endif

}  // namespace

std::int64_t packed_weights_rows() { return kMostRows; }

/// Term by term, all rows side by side.
void packed_weights_pack_rows(const LinearInput<bfloat16>& p) {
  auto* to = static_cast<float*>(p.packed);
  for (std::int64_t k = 0; k < p.K; ++k)
    for (std::int64_t m = 0; m < p.M; ++m) *to++ = static_cast<float>(p.x[m * p.ldx + k]);
}

void packed_weights_forward_bf16(const LinearForwardArgs<bfloat16, bfloat16>& p, const PackedMatrix& w, std::int64_t b,
                                 std::int64_t e) {
  packed_weights_forward<PackedSteps>(p, w, b, e);
}
void packed_weights_forward_bf16_f32(const LinearForwardArgs<bfloat16, float>& p, const PackedMatrix& w, std::int64_t b,
                                     std::int64_t e) {
  packed_weights_forward<PackedSteps>(p, w, b, e);
}
void packed_weights_swiglu_bf16(const LinearSwigluArgs<bfloat16>& p, const PackedMatrix& w, std::int64_t b,
                                std::int64_t e) {
  packed_weights_swiglu<PackedSteps>(p, w, b, e);
}

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
