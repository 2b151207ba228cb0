// Weights in blocks (kernels/weight_blocks.h): packed when a model is loaded, unpacked strip by strip for the products.
// Unpacked weights are the same bits in every capability, since each is one product in float32.
#include "kernels/cpu/block_rows.h"
#include "kernels/cpu/plain.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

constexpr int kBlocksAhead = 4096;  ///< bytes asked for ahead: about as long as memory takes

std::uint16_t half_bits_of(float value) {
  const auto bits = __builtin_bit_cast(std::uint32_t, value), magnitude = bits & 0x7fffffffu;
  const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000u);
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // 65,520 and more
  if (magnitude < 0x38800000u) {  // subnormal: half its unit, 2^-24, is that of the numbers from 0.5 on
    const auto shifted = __builtin_bit_cast(std::uint32_t, __builtin_bit_cast(float, magnitude) + 0.5f);
    return static_cast<std::uint16_t>(sign | (shifted - 0x3f000000u));
  }
  return static_cast<std::uint16_t>(sign | ((magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13));
}

/// One row of K weights.
template <BlockFormat kFormat, class T>
void unpack_row(const std::byte* blocks, std::int64_t K, T* out) {
  constexpr std::int64_t kBytes = block_bytes(kFormat);
  std::int64_t k = 0;
#if defined(__AVX512BW__)
  if constexpr (sizeof(T) == 2 && kFormat != BlockFormat::q8_0)
    for (; k + 2 * kBlockTerms <= K; k += 2 * kBlockTerms, blocks += 2 * kBytes) {
      __builtin_prefetch(blocks + kBlocksAhead, 0, 2);
      unpack_two_halves<kFormat>(blocks, out + k, out + k + kBlockTerms);
    }
#endif
  for (; k < K; k += kBlockTerms, blocks += kBytes) {
    __builtin_prefetch(blocks + kBlocksAhead, 0, 2);
    if constexpr (kFormat == BlockFormat::q8_0) unpack_q8_0(blocks, out + k);
    else unpack_halves<kFormat>(blocks, out + k);
  }
}

template <class T>
void unpack_blocks(BlockFormat format, const std::byte* blocks, std::int64_t rows, std::int64_t K, T* out,
                   std::int64_t ldo) {
  const auto unpack = format == BlockFormat::q8_0   ? unpack_row<BlockFormat::q8_0, T>
                      : format == BlockFormat::q4_0 ? unpack_row<BlockFormat::q4_0, T>
                                                    : unpack_row<BlockFormat::nf4, T>;
  for (std::int64_t row = 0; row < rows; ++row) unpack(blocks + row * block_row_bytes(format, K), K, out + row * ldo);
}

/// The float32 reciprocal; 0 of 0.
float reciprocal(float scale) { return scale == 0 ? 0.0f : 1.0f / scale; }

void pack_q8_0(const float* w, std::byte* block) {
  float largest = 0;
  for (std::int64_t i = 0; i < kBlockTerms; ++i) largest = larger(largest, __builtin_fabsf(w[i]));
  const float scale = largest / 127, inverse = reciprocal(scale);
  const std::uint16_t bits = half_bits_of(scale);
  __builtin_memcpy(block, &bits, sizeof(bits));
  auto* q = reinterpret_cast<std::int8_t*>(block + sizeof(bits));
  for (std::int64_t i = 0; i < kBlockTerms; ++i) {
    const float each = w[i] * inverse, magnitude = __builtin_fabsf(each);
    auto whole = static_cast<std::int32_t>(magnitude);
    whole += magnitude - static_cast<float>(whole) >= 0.5f;
    q[i] = static_cast<std::int8_t>(each < 0 ? -whole : whole);
  }
}

void pack_q4_0(const float* w, std::byte* block) {
  float farthest = 0;
  for (std::int64_t i = 0; i < kBlockTerms; ++i)
    if (__builtin_fabsf(w[i]) > __builtin_fabsf(farthest)) farthest = w[i];
  const float scale = farthest / -8, inverse = reciprocal(scale);
  const std::uint16_t bits = half_bits_of(scale);
  __builtin_memcpy(block, &bits, sizeof(bits));
  const auto q = [&](std::int64_t i) { return smaller(static_cast<std::int32_t>(w[i] * inverse + 8.5f), 15); };
  for (std::int64_t i = 0; i < kHalfBlock; ++i)
    block[sizeof(bits) + i] = static_cast<std::byte>(q(i) | q(i + kHalfBlock) << 4);
}

/// `largest`: the magnitude of this block and its neighbour.
void pack_nf4(const float* w, float largest, std::byte* block) {
  const float scale = largest < kNormalFloatLeast ? 0.0f : largest, inverse = reciprocal(scale);
  __builtin_memcpy(block, &scale, sizeof(scale));
  const auto q = [&](std::int64_t i) {
    int code = 0;
    for (int c = 0; c < 15; ++c) code += w[i] * inverse > (kNormalFloat[c] + kNormalFloat[c + 1]) / 2;
    return code;
  };
  for (std::int64_t i = 0; i < kHalfBlock; ++i)
    block[sizeof(scale) + i] = static_cast<std::byte>(q(i) | q(i + kHalfBlock) << 4);
}

template <class T>
float largest_magnitude(const T* w, std::int64_t count) {
  float largest = 0;
  for (std::int64_t i = 0; i < count; ++i) largest = larger(largest, __builtin_fabsf(static_cast<float>(w[i])));
  return largest;
}

template <class T>
void pack_blocks(BlockFormat format, const T* w, std::int64_t ldw, std::int64_t rows, std::int64_t K,
                 std::byte* blocks) {
  float terms[kBlockTerms];
  for (std::int64_t row = 0; row < rows; ++row, w += ldw)
    for (std::int64_t k = 0; k < K; k += kBlockTerms, blocks += block_bytes(format)) {
      for (std::int64_t i = 0; i < kBlockTerms; ++i) terms[i] = static_cast<float>(w[k + i]);
      const std::int64_t first = k / kNormalFloatTerms * kNormalFloatTerms;
      if (format == BlockFormat::q8_0) pack_q8_0(terms, blocks);
      else if (format == BlockFormat::q4_0) pack_q4_0(terms, blocks);
      else pack_nf4(terms, largest_magnitude(w + first, smaller(kNormalFloatTerms, K - first)), blocks);
    }
}

template <int kStrips>
constexpr auto kRunStrips = [](const auto&... of) { run_block_strips<kStrips>(of...); };

}  // namespace

void unpack_blocks_f32(BlockFormat format, const std::byte* blocks, std::int64_t rows, std::int64_t K, float* out,
                       std::int64_t ldo) {
  unpack_blocks(format, blocks, rows, K, out, ldo);
}
void unpack_blocks_bf16(BlockFormat format, const std::byte* blocks, std::int64_t rows, std::int64_t K, bfloat16* out,
                        std::int64_t ldo) {
  unpack_blocks(format, blocks, rows, K, out, ldo);
}
void pack_blocks_f32(BlockFormat format, const float* w, std::int64_t ldw, std::int64_t rows, std::int64_t K,
                     std::byte* blocks) {
  pack_blocks(format, w, ldw, rows, K, blocks);
}
void pack_blocks_bf16(BlockFormat format, const bfloat16* w, std::int64_t ldw, std::int64_t rows, std::int64_t K,
                      std::byte* blocks) {
  pack_blocks(format, w, ldw, rows, K, blocks);
}

std::int64_t block_product_rows() { return kMostBlockRows; }
void linear_forward_blocks_bf16(const LinearForwardArgs<bfloat16, bfloat16>& p, const WeightBlocks& w, std::int64_t b,
                                std::int64_t e, bool more) {
  forward_blocks(p, w, b, e, more, kRunStrips<1>);
}
void linear_forward_blocks_bf16_f32(const LinearForwardArgs<bfloat16, float>& p, const WeightBlocks& w, std::int64_t b,
                                    std::int64_t e, bool more) {
  forward_blocks(p, w, b, e, more, kRunStrips<1>);
}
void linear_swiglu_blocks_bf16(const LinearSwigluArgs<bfloat16>& p, const WeightBlocks& w, std::int64_t b,
                               std::int64_t e, bool more) {
  swiglu_blocks(p, w, b, e, more, kRunStrips<2>);
}

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
