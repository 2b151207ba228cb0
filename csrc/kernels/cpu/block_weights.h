// The weights of one block (kernels/weight_blocks.h) as float32 or bfloat16.
#pragma once
#include "kernels/cpu/vec.h"
#include "kernels/weight_blocks.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

constexpr std::int64_t kHalfBlock = kBlockTerms / 2;

[[gnu::always_inline, maybe_unused]] inline float scale_of(const std::byte* block) {
  std::uint16_t bits;
  __builtin_memcpy(&bits, block, sizeof(bits));
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#else
  const std::uint32_t sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return __builtin_bit_cast(float, sign | 0x7f800000u | magnitude << 13);
  const float value = magnitude < 0x400u ? static_cast<float>(magnitude) * 0x1p-24f
                                         : __builtin_bit_cast(float, (magnitude << 13) + (112u << 23));
  return sign ? -value : value;
#endif
}

/// Bytes of the scale of a block of 4-bit weights.
template <BlockFormat kFormat>
constexpr std::int64_t kScaleBytes = kFormat == BlockFormat::nf4 ? 4 : 2;

[[gnu::always_inline, maybe_unused]] inline float single_scale_of(const std::byte* block) {
  float scale;
  __builtin_memcpy(&scale, block, sizeof(scale));
  return scale;
}

#if defined(__AVX512BW__)
/// The scale in every lane.
[[gnu::always_inline]] inline __m512 scales_of(const std::byte* block) {
  std::uint16_t bits;
  __builtin_memcpy(&bits, block, sizeof(bits));
  return _mm512_cvtph_ps(_mm256_set1_epi16(static_cast<short>(bits)));
}

/// Numbers 0 to 15 and 16 to 31 as bfloat16, rounded to nearest even.
[[gnu::always_inline]] inline __m512i rounded(__m512 first, __m512 second) {
#if defined(__AVX512BF16__)
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
#else
  const auto round = [](__m512 values) __attribute__((always_inline)) {
    const __m512i bits = _mm512_castps_si512(values),
                  odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_cvtepi32_epi16(
        _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff)), 16));
  };
  return _mm512_inserti64x4(_mm512_castsi256_si512(round(first)), round(second), 1);
#endif
}
[[gnu::always_inline]] inline void put(__m512 first, __m512 second, float* out) {
  _mm512_storeu_ps(out, first);
  _mm512_storeu_ps(out + kHalfBlock, second);
}
[[gnu::always_inline]] inline void put(__m512 first, __m512 second, bfloat16* out) {
  _mm512_storeu_si512(out, rounded(first, second));
}
[[gnu::always_inline]] inline __m128i sixteen_bytes(const std::byte* at) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
}

template <class T>
[[gnu::always_inline]] inline void unpack_q8_0(const std::byte* block, T* out) {
  const __m512 scale = scales_of(block);
  const auto weights = [&](std::int64_t i) __attribute__((always_inline)) {
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(sixteen_bytes(block + 2 + i))), scale);
  };
  put(weights(0), weights(kHalfBlock), out);
}

/// The sixteen weights that a block may have.
template <BlockFormat kFormat>
[[gnu::always_inline]] inline __m512 table_of(const std::byte* block) {
  if constexpr (kFormat == BlockFormat::nf4)
    return _mm512_mul_ps(_mm512_set1_ps(single_scale_of(block)), _mm512_loadu_ps(kNormalFloat));
  return _mm512_mul_ps(scales_of(block), _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7));
}

template <BlockFormat kFormat>
[[gnu::always_inline]] inline void unpack_halves(const std::byte* block, float* out) {
  const __m512 table = table_of<kFormat>(block);
  const __m512i places = _mm512_cvtepu8_epi32(sixteen_bytes(block + kScaleBytes<kFormat>));  // a look-up takes 4 bits
  put(_mm512_permutexvar_ps(places, table), _mm512_permutexvar_ps(_mm512_srli_epi32(places, 4), table), out);
}

/// Places of the weights of a block in a table of sixteen, in four bits of sixteen. Above them there may be other bits.
template <BlockFormat kFormat>
[[gnu::always_inline]] inline __m512i places_of(const std::byte* block) {
  const __m512i bytes_of_words = _mm512_cvtepu8_epi16(_mm256_setr_epi8(
      0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
  const __m512i words =
      _mm512_shuffle_epi8(_mm512_broadcast_i32x4(sixteen_bytes(block + kScaleBytes<kFormat>)), bytes_of_words);
  return _mm512_srlv_epi16(words, shifts);
}
template <BlockFormat kFormat>
[[gnu::always_inline]] inline void unpack_halves(const std::byte* block, bfloat16* out) {
  const __m512 table = table_of<kFormat>(block);
  _mm512_storeu_si512(out, _mm512_permutexvar_epi16(places_of<kFormat>(block), rounded(table, table)));  // takes 5 bits
}

/// Two blocks, whose tables share a register.
template <BlockFormat kFormat>
[[gnu::always_inline]] inline void unpack_two_halves(const std::byte* block, bfloat16* out, bfloat16* out_of_next) {
  const std::byte* const next = block + block_bytes(kFormat);
  const __m512i tables = rounded(table_of<kFormat>(block), table_of<kFormat>(next));
  const __m512i places = _mm512_and_si512(places_of<kFormat>(block), _mm512_set1_epi16(15)),
                places_of_next = _mm512_or_si512(places_of<kFormat>(next), _mm512_set1_epi16(16));
  _mm512_storeu_si512(out, _mm512_permutexvar_epi16(places, tables));
  _mm512_storeu_si512(out_of_next, _mm512_permutexvar_epi16(places_of_next, tables));
}
#else
template <class T>
inline void unpack_q8_0(const std::byte* block, T* out) {
  const float scale = scale_of(block);
  const auto* q = reinterpret_cast<const std::int8_t*>(block + 2);
  for (std::int64_t i = 0; i < kBlockTerms; ++i) out[i] = static_cast<T>(static_cast<float>(q[i]) * scale);
}

template <BlockFormat kFormat, class T>
inline void unpack_halves(const std::byte* block, T* out) {
  constexpr bool kNormal = kFormat == BlockFormat::nf4;
  const float scale = kNormal ? single_scale_of(block) : scale_of(block);
  const auto* q = reinterpret_cast<const std::uint8_t*>(block + kScaleBytes<kFormat>);
  const auto weight = [&](int code) {
    return static_cast<T>((kNormal ? kNormalFloat[code] : static_cast<float>(code - 8)) * scale);
  };
  for (std::int64_t i = 0; i < kHalfBlock; ++i) out[i] = weight(q[i] & 15), out[i + kHalfBlock] = weight(q[i] >> 4);
}
#endif

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
