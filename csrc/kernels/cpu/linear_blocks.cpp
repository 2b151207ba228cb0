// Weights in blocks (kernels/weight_blocks.h): packed when a model is loaded, unpacked strip by strip for the products.
// Unpacked weights are the same bits in every capability, since each is one product that float32 holds exactly.
#include "kernels/cpu/plain.h"
#include "kernels/cpu/vec.h"
#include "kernels/weight_blocks.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

constexpr std::int64_t kHalfBlock = kBlockTerms / 2;
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

/// The sixteen weights that a block of q4_0 may have.
[[gnu::always_inline]] inline __m512 table_of(const std::byte* block) {
  return _mm512_mul_ps(scales_of(block), _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7));
}

[[gnu::always_inline]] inline void unpack_q4_0(const std::byte* block, float* out) {
  const __m512 table = table_of(block);
  const __m512i places = _mm512_cvtepu8_epi32(sixteen_bytes(block + 2));  // a look-up takes four bits
  put(_mm512_permutexvar_ps(places, table), _mm512_permutexvar_ps(_mm512_srli_epi32(places, 4), table), out);
}

/// Places of the weights of a block in a table of sixteen, in four bits of sixteen. Above them there may be other bits.
[[gnu::always_inline]] inline __m512i places_of(const std::byte* block) {
  const __m512i bytes_of_words = _mm512_cvtepu8_epi16(_mm256_setr_epi8(
      0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
  const __m512i words = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(sixteen_bytes(block + 2)), bytes_of_words);
  return _mm512_srlv_epi16(words, shifts);
}
[[gnu::always_inline]] inline void unpack_q4_0(const std::byte* block, bfloat16* out) {
  const __m512 table = table_of(block);
  _mm512_storeu_si512(out, _mm512_permutexvar_epi16(places_of(block), rounded(table, table)));  // takes five bits
}

/// Two blocks, whose tables share a register.
[[gnu::always_inline]] inline void unpack_two_q4_0(const std::byte* block, bfloat16* out) {
  const std::byte* const next = block + block_bytes(BlockFormat::q4_0);
  const __m512i tables = rounded(table_of(block), table_of(next));
  _mm512_storeu_si512(out, _mm512_permutexvar_epi16(_mm512_and_si512(places_of(block), _mm512_set1_epi16(15)), tables));
  _mm512_storeu_si512(out + kBlockTerms,
                      _mm512_permutexvar_epi16(_mm512_or_si512(places_of(next), _mm512_set1_epi16(16)), tables));
}
#else
template <class T>
void unpack_q8_0(const std::byte* block, T* out) {
  const float scale = scale_of(block);
  const auto* q = reinterpret_cast<const std::int8_t*>(block + 2);
  for (std::int64_t i = 0; i < kBlockTerms; ++i) out[i] = static_cast<T>(static_cast<float>(q[i]) * scale);
}

template <class T>
void unpack_q4_0(const std::byte* block, T* out) {
  const float scale = scale_of(block);
  const auto* q = reinterpret_cast<const std::uint8_t*>(block + 2);
  for (std::int64_t i = 0; i < kHalfBlock; ++i) {
    out[i] = static_cast<T>(static_cast<float>((q[i] & 15) - 8) * scale);
    out[i + kHalfBlock] = static_cast<T>(static_cast<float>((q[i] >> 4) - 8) * scale);
  }
}
#endif

/// One row of K weights.
template <class T>
void unpack_row(BlockFormat format, const std::byte* blocks, std::int64_t K, T* out) {
  const std::int64_t bytes = block_bytes(format);
  std::int64_t k = 0;
#if defined(__AVX512BW__)
  if constexpr (sizeof(T) == 2)
    for (; format == BlockFormat::q4_0 && k + 2 * kBlockTerms <= K; k += 2 * kBlockTerms, blocks += 2 * bytes) {
      __builtin_prefetch(blocks + kBlocksAhead, 0, 2);
      unpack_two_q4_0(blocks, out + k);
    }
#endif
  for (; k < K; k += kBlockTerms, blocks += bytes) {
    __builtin_prefetch(blocks + kBlocksAhead, 0, 2);
    if (format == BlockFormat::q8_0) unpack_q8_0(blocks, out + k);
    else unpack_q4_0(blocks, out + k);
  }
}

template <class T>
void unpack_blocks(BlockFormat format, const std::byte* blocks, std::int64_t rows, std::int64_t K, T* out,
                   std::int64_t ldo) {
  for (std::int64_t row = 0; row < rows; ++row)
    unpack_row(format, blocks + row * block_row_bytes(format, K), K, out + row * ldo);
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

template <class T>
void pack_blocks(BlockFormat format, const T* w, std::int64_t ldw, std::int64_t rows, std::int64_t K,
                 std::byte* blocks) {
  float terms[kBlockTerms];
  for (std::int64_t row = 0; row < rows; ++row, w += ldw)
    for (std::int64_t k = 0; k < K; k += kBlockTerms, blocks += block_bytes(format)) {
      for (std::int64_t i = 0; i < kBlockTerms; ++i) terms[i] = static_cast<float>(w[k + i]);
      if (format == BlockFormat::q8_0) pack_q8_0(terms, blocks);
      else pack_q4_0(terms, blocks);
    }
}

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

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
