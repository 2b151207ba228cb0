// The weights of a block and of a tile of blocks (kernels/weight_blocks.h) as float32 or bfloat16.
#pragma once
#include "kernels/cpu/vec.h"
#include "kernels/weight_blocks.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

constexpr std::int64_t kHalfBlock = kBlockTerms / 2;

/// Calls f with the format as a constant.
template <class F>
[[gnu::always_inline]] inline void with_format(BlockFormat format, const F& f) {
  if (format == BlockFormat::q8_0) f(std::integral_constant<BlockFormat, BlockFormat::q8_0>());
  else if (format == BlockFormat::q4_0) f(std::integral_constant<BlockFormat, BlockFormat::q4_0>());
  else f(std::integral_constant<BlockFormat, BlockFormat::nf4>());
}

[[gnu::always_inline, maybe_unused]] inline float scale_of(const std::byte* block) {
  std::uint16_t bits;
  __builtin_memcpy(&bits, block, sizeof(bits));
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#else
  return half_value(bits);
#endif
}

[[gnu::always_inline, maybe_unused]] inline float single_scale_of(const std::byte* block) {
  float scale;
  __builtin_memcpy(&scale, block, sizeof(scale));
  return scale;
}

/// The scale of row r of a tile.
template <BlockFormat kFormat>
[[gnu::always_inline]] inline float tile_scale(const std::byte* tile, std::int64_t r) {
  const std::byte* const at = tile + r * scale_bytes(kFormat);
  return kFormat == BlockFormat::nf4 ? single_scale_of(at) : scale_of(at);
}

/// Asks for the memory of a tile.
template <BlockFormat kFormat>
[[gnu::always_inline]] inline void ask_for(const std::byte* tile) {
  for (std::int64_t i = 0; i < block_tile_bytes(kFormat); i += 64) __builtin_prefetch(tile + i, 0, 2);
}

/// Sixteen bytes of codes of a row lie in runs, 64 bytes apart: where byte i of them is once the runs are joined.
template <BlockFormat kFormat>
constexpr int kCodeRun = kFormat == BlockFormat::q4_0 ? 4 : 8;
template <BlockFormat kFormat>
constexpr int joined_place(int i) {
  return i / kCodeRun<kFormat> * kCodeRun<kFormat> + static_cast<int>(code_place(kFormat, 0, i) % 64);
}
template <BlockFormat kFormat>
constexpr int byte_at(int place) {
  int i = 0;
  while (joined_place<kFormat>(i) != place) ++i;
  return i;
}

/// Bytes 16 part to 16 part + 15 of the codes of row r of a tile.
template <BlockFormat kFormat>
class SixteenCodes {
  using Bytes = std::uint8_t __attribute__((vector_size(16)));
  using Quarters = std::uint32_t __attribute__((vector_size(16)));
  using Halves = std::uint64_t __attribute__((vector_size(16)));
  using Runs = std::conditional_t<kCodeRun<kFormat> == 4, Quarters, Halves>;
  using Run = std::conditional_t<kCodeRun<kFormat> == 4, std::uint32_t, std::uint64_t>;
  static constexpr int kRuns = 16 / kCodeRun<kFormat>;
  static std::int64_t place(std::int64_t r, std::int64_t part) {
    return kBlockTileRows * scale_bytes(kFormat) + code_place(kFormat, r, 0) + part * kRuns * 64;
  }

 public:
  [[gnu::always_inline]] static void load(const std::byte* tile, std::int64_t r, std::int64_t part, void* out) {
    Runs runs;
    for (int i = 0; i < kRuns; ++i) {
      Run run;
      __builtin_memcpy(&run, tile + place(r, part) + i * 64, sizeof(run));
      runs[i] = run;
    }
    [&]<int... kByte>(std::integer_sequence<int, kByte...>) __attribute__((always_inline)) {
      const auto joined = __builtin_bit_cast(Bytes, runs);
      const Bytes in_order = shuffled<Bytes, joined_place<kFormat>(kByte)...>(joined, joined);
      __builtin_memcpy(out, &in_order, sizeof(in_order));
    }(std::make_integer_sequence<int, 16>());
  }
  [[gnu::always_inline]] static void store(const void* from, std::byte* tile, std::int64_t r, std::int64_t part) {
    Bytes in_order;
    __builtin_memcpy(&in_order, from, sizeof(in_order));
    [&]<int... kPlace>(std::integer_sequence<int, kPlace...>) __attribute__((always_inline)) {
      in_order = shuffled<Bytes, byte_at<kFormat>(kPlace)...>(in_order, in_order);
    }(std::make_integer_sequence<int, 16>());
    const auto runs = __builtin_bit_cast(Runs, in_order);
    for (int i = 0; i < kRuns; ++i) {
      const Run run = runs[i];
      __builtin_memcpy(tile + place(r, part) + i * 64, &run, sizeof(run));
    }
  }
};
template <BlockFormat kFormat>
constexpr std::int64_t kCodeParts = (block_bytes(kFormat) - scale_bytes(kFormat)) / 16;

/// Puts a block into a tile as its row r.
template <BlockFormat kFormat>
inline void put_block(const std::byte* block, std::int64_t r, std::byte* tile) {
  constexpr std::int64_t kScale = scale_bytes(kFormat);
  __builtin_memcpy(tile + r * kScale, block, kScale);
  for (std::int64_t part = 0; part < kCodeParts<kFormat>; ++part)
    SixteenCodes<kFormat>::store(block + kScale + 16 * part, tile, r, part);
}
/// Takes it out again.
template <BlockFormat kFormat>
inline void take_block(const std::byte* tile, std::int64_t r, std::byte* block) {
  constexpr std::int64_t kScale = scale_bytes(kFormat);
  __builtin_memcpy(block, tile + r * kScale, kScale);
  for (std::int64_t part = 0; part < kCodeParts<kFormat>; ++part)
    SixteenCodes<kFormat>::load(tile, r, part, block + kScale + 16 * part);
}

/// As many bytes as a register has floats.
using Codes = std::int8_t __attribute__((vector_size(kRegisterBytes / 4)));
using Halves = std::int16_t __attribute__((vector_size(kRegisterBytes / 2)));  // GCC widens by one step at a time

/// out[32] = the weights of row r of a tile.
template <BlockFormat kFormat, class T>
inline void unpack_row(const std::byte* tile, std::int64_t r, T* out) {
  const float scale = tile_scale<kFormat>(tile, r);
  for (std::int64_t part = 0; part < kCodeParts<kFormat>; ++part) {
    std::uint8_t q[kHalfBlock];
    SixteenCodes<kFormat>::load(tile, r, part, q);
    if constexpr (kFormat == BlockFormat::nf4) {
      for (std::int64_t j = 0; j < kHalfBlock; ++j)
        out[j] = static_cast<T>(kNormalFloat[q[j] & 15] * scale),
        out[j + kHalfBlock] = static_cast<T>(kNormalFloat[q[j] >> 4] * scale);
      continue;
    }
    constexpr std::int64_t kWidth = kRegisterLanes<float>;
    const auto put = [&](std::int64_t at, Codes values) __attribute__((always_inline)) {
      const auto whole = __builtin_convertvector(__builtin_convertvector(values, Halves), RegisterBits<float>);
      store(out + at, __builtin_convertvector(whole, Register<float>) * splat(scale));
    };
    for (std::int64_t j = 0; j < kHalfBlock; j += kWidth) {
      Codes codes_at;
      __builtin_memcpy(&codes_at, q + j, sizeof(codes_at));
      if constexpr (kFormat == BlockFormat::q8_0) {
        put(part * kHalfBlock + j, codes_at);
      } else {
        put(j, (codes_at & 15) - 8);
        put(j + kHalfBlock, (codes_at >> 4 & 15) - 8);
      }
    }
  }
}

#if defined(__AVX512BW__)
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

/// The scale of row r of a tile in every lane.
template <BlockFormat kFormat>
[[gnu::always_inline]] inline __m512 scale_of_row(const std::byte* tile, int r) {
  if constexpr (kFormat == BlockFormat::nf4) return _mm512_set1_ps(single_scale_of(tile + 4 * r));
  std::uint16_t bits;
  __builtin_memcpy(&bits, tile + 2 * r, sizeof(bits));
  return _mm512_cvtph_ps(_mm256_set1_epi16(static_cast<short>(bits)));
}

/// The codes of a tile row by row, 16 bytes in each quarter of a register: of row 4 quarter + i in register i (q4_0);
/// of rows 2 quarter and 2 quarter + 1 of every eight in a register each (nf4, and q8_0 for each half of its blocks).
/// In a quarter the bytes are in the order of the tile.
template <BlockFormat kFormat>
struct CodesOfRows {
  __m512i part[kFormat == BlockFormat::q8_0 ? 8 : 4];
  [[gnu::always_inline]] explicit CodesOfRows(const std::byte* tile) {
    constexpr int kCount = static_cast<int>(sizeof(part) / sizeof(part[0]));
    for (int i = 0; i < kCount; ++i)
      part[i] = _mm512_loadu_si512(tile + kBlockTileRows * scale_bytes(kFormat) + 64 * i);
    if constexpr (kFormat == BlockFormat::q4_0) {
      const __m512i low = _mm512_unpacklo_epi32(part[0], part[1]), high = _mm512_unpackhi_epi32(part[0], part[1]),
                    next_low = _mm512_unpacklo_epi32(part[2], part[3]),
                    next_high = _mm512_unpackhi_epi32(part[2], part[3]);
      part[0] = _mm512_unpacklo_epi64(low, next_low), part[1] = _mm512_unpackhi_epi64(low, next_low);
      part[2] = _mm512_unpacklo_epi64(high, next_high), part[3] = _mm512_unpackhi_epi64(high, next_high);
    } else {
      for (int i = 0; i < kCount; i += 2) {
        const __m512i even = _mm512_unpacklo_epi64(part[i], part[i + 1]);
        part[i + 1] = _mm512_unpackhi_epi64(part[i], part[i + 1]);
        part[i] = even;
      }
    }
  }
};

/// For each byte of a row in order, zero-extended to kBytes (sign-extended after an arithmetic shift from the top:
/// kAtTop), where it lies in its quarter.
template <BlockFormat kFormat, int kBytes, bool kAtTop = false>
struct Spread {
  alignas(64) std::uint8_t from[64];
  constexpr Spread() : from() {
    for (int at = 0; at < 64; ++at) {
      const bool holds = at % kBytes == (kAtTop ? kBytes - 1 : 0);
      from[at] = holds ? static_cast<std::uint8_t>(joined_place<kFormat>(at / kBytes % 16)) : 0x80;
    }
  }
  /// Of the row in quarter kQuarter.
  template <int kQuarter>
  [[gnu::always_inline]] __m512i operator()(__m512i rows) const {
    return _mm512_shuffle_epi8(_mm512_shuffle_i32x4(rows, rows, kQuarter * 0x55), _mm512_load_si512(from));
  }
};
template <BlockFormat kFormat, int kBytes, bool kAtTop = false>
constexpr Spread<kFormat, kBytes, kAtTop> kSpread;

/// The sixteen weights that a block of such a scale may have.
template <BlockFormat kFormat>
[[gnu::always_inline]] inline __m512 table_of(__m512 scale) {
  if constexpr (kFormat == BlockFormat::nf4) return _mm512_mul_ps(scale, _mm512_loadu_ps(kNormalFloat));
  return _mm512_mul_ps(scale, _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7));
}

/// Rows kRow and kRow + 1 of a tile. The tables of 4-bit weights share a register where they are bfloat16.
template <BlockFormat kFormat, int kRow, class T>
[[gnu::always_inline]] inline void unpack_two_rows(const std::byte* tile, const CodesOfRows<kFormat>& codes, T* out,
                                                   std::int64_t ldo) {
  constexpr bool kLanesOfRows = kFormat == BlockFormat::q4_0;
  constexpr int kQuarter = kLanesOfRows ? kRow / 4 : kRow % 8 / 2;
  const __m512 scales[] = {scale_of_row<kFormat>(tile, kRow), scale_of_row<kFormat>(tile, kRow + 1)};
  if constexpr (kFormat == BlockFormat::q8_0) {
    for (int r = 0; r < 2; ++r) {
      const auto weights = [&](int half) __attribute__((always_inline)) {
        const __m512i top =
            kSpread<kFormat, 4, true>.template operator()<kQuarter>(codes.part[kRow / 8 * 4 + 2 * half + r]);
        return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_srai_epi32(top, 24)), scales[r]);
      };
      put(weights(0), weights(1), out + r * ldo);
    }
    return;
  }
  const __m512 tables[] = {table_of<kFormat>(scales[0]), table_of<kFormat>(scales[1])};
  const __m512i* const rows = codes.part + (kLanesOfRows ? kRow % 4 : kRow / 8 * 2);
  if constexpr (sizeof(T) == 4) {
    for (int r = 0; r < 2; ++r) {
      const __m512i places = kSpread<kFormat, 4>.template operator()<kQuarter>(rows[r]);  // a look-up takes 4 bits
      put(_mm512_permutexvar_ps(places, tables[r]), _mm512_permutexvar_ps(_mm512_srli_epi32(places, 4), tables[r]),
          out + r * ldo);
    }
  } else {
    const __m512i both = rounded(tables[0], tables[1]),
                  shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
    const auto places = [&](int r) __attribute__((always_inline)) {
      return _mm512_srlv_epi16(kSpread<kFormat, 2>.template operator()<kQuarter>(rows[r]), shifts);
    };
    const __m512i four_bits = _mm512_set1_epi16(15), of_second = _mm512_set1_epi16(16);
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16(_mm512_and_si512(places(0), four_bits), both));
    _mm512_storeu_si512(out + ldo, _mm512_permutexvar_epi16(_mm512_or_si512(places(1), of_second), both));
  }
}
#elif defined(__AVX2__)
/// Where each byte of a register comes from in its half of another one.
struct alignas(32) ByteOrder {
  std::uint8_t from[32];
  template <class Place>
  constexpr explicit ByteOrder(const Place& place) : from() {
    for (int i = 0; i < 32; ++i) from[i] = static_cast<std::uint8_t>(place(i));
  }
  [[gnu::always_inline]] __m256i operator()(__m256i bytes) const {
    return _mm256_shuffle_epi8(bytes, _mm256_load_si256(reinterpret_cast<const __m256i*>(from)));
  }
};
constexpr int kZeroByte = 0x80;
/// Sixteen bytes of the codes of a row in order.
template <BlockFormat kFormat>
constexpr ByteOrder kInOrder([](int i) { return joined_place<kFormat>(i % 16); });
/// Code kFirst + kStep i at the top of 32-bit lane i, with zeros below, of codes that both halves hold.
template <BlockFormat kFormat, int kFirst, int kStep>
constexpr ByteOrder kAtTop([](int i) {
  return i % 4 == 3 ? joined_place<kFormat>(kFirst + kStep * (i / 4)) : kZeroByte;
});

/// put(row, other, part, codes) for all bytes of codes of a tile: 16 bytes of a row in the lower half, of another in
/// the upper one, in the order of the tile.
template <BlockFormat kFormat, class Put>
[[gnu::always_inline]] inline void for_each_two_rows(const std::byte* tile, const Put& put) {
  const std::byte* const codes = tile + kBlockTileRows * scale_bytes(kFormat);
  const auto load = [&](std::int64_t at) __attribute__((always_inline)) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + at));
  };
  for (int half = 0; half < 2; ++half) {
    if constexpr (kFormat == BlockFormat::q4_0) {
      const __m256i run[] = {load(32 * half), load(32 * half + 64), load(32 * half + 128), load(32 * half + 192)};
      const __m256i low = _mm256_unpacklo_epi32(run[0], run[1]), next_low = _mm256_unpacklo_epi32(run[2], run[3]),
                    high = _mm256_unpackhi_epi32(run[0], run[1]), next_high = _mm256_unpackhi_epi32(run[2], run[3]);
      put(8 * half, 8 * half + 4, 0, _mm256_unpacklo_epi64(low, next_low));
      put(8 * half + 1, 8 * half + 5, 0, _mm256_unpackhi_epi64(low, next_low));
      put(8 * half + 2, 8 * half + 6, 0, _mm256_unpacklo_epi64(high, next_high));
      put(8 * half + 3, 8 * half + 7, 0, _mm256_unpackhi_epi64(high, next_high));
    } else {
      for (int part = 0; part < kCodeParts<kFormat>; ++part)
        for (int row = 0; row < 8; row += 4) {
          const std::int64_t at = (half * 2 * kCodeParts<kFormat> + 2 * part) * 64 + 8 * row;
          const __m256i first = load(at), second = load(at + 64);
          put(8 * half + row, 8 * half + row + 2, part, _mm256_unpacklo_epi64(first, second));
          put(8 * half + row + 1, 8 * half + row + 3, part, _mm256_unpackhi_epi64(first, second));
        }
    }
  }
}

/// The bfloat16 numbers nearest to finite ones, as floats.
[[gnu::always_inline]] inline __m256 nearest_bfloat16(__m256 v) {
  const __m256i bits = _mm256_castps_si256(v),
                odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1)),
                sum = _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff));
  return _mm256_castsi256_ps(_mm256_and_si256(sum, _mm256_set1_epi32(-0x10000)));
}

/// kNormalFloat[lowest four bits of each lane]; a look-up takes three.
[[gnu::always_inline]] inline __m256 normal_floats(__m256i codes, __m256 low, __m256 high) {
  return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, codes), _mm256_permutevar8x32_ps(high, codes),
                          _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
}

/// out[0, 16) = the weights of sixteen codes of q8_0, which both halves hold.
[[gnu::always_inline]] inline void put_q8_0(__m256i codes, float scale, float* out) {
  const __m256 unit = _mm256_set1_ps(scale * 0x1p-24f);
  const auto weights = [&](const ByteOrder& at_top) __attribute__((always_inline)) {
    return _mm256_mul_ps(_mm256_cvtepi32_ps(at_top(codes)), unit);
  };
  _mm256_storeu_ps(out, weights(kAtTop<BlockFormat::q8_0, 0, 1>));
  _mm256_storeu_ps(out + 8, weights(kAtTop<BlockFormat::q8_0, 8, 1>));
}
[[gnu::always_inline]] inline void put_q8_0(__m256i codes, float scale, bfloat16* out) {
  const __m256 unit = _mm256_set1_ps(scale * 0x1p-24f);
  const auto weights = [&](const ByteOrder& at_top) __attribute__((always_inline)) {
    return _mm256_castps_si256(nearest_bfloat16(_mm256_mul_ps(_mm256_cvtepi32_ps(at_top(codes)), unit)));
  };
  const __m256i even = weights(kAtTop<BlockFormat::q8_0, 0, 2>), odd = weights(kAtTop<BlockFormat::q8_0, 1, 2>);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_or_si256(_mm256_srli_epi32(even, 16), odd));
}

/// The sixteen weights that a block of such a scale may have are made first; its codes choose among them.
template <BlockFormat kFormat>
[[gnu::always_inline]] inline __m256 levels(int first) {
  if constexpr (kFormat == BlockFormat::nf4) return _mm256_loadu_ps(kNormalFloat + first);
  const auto level = static_cast<float>(first - 8);
  return _mm256_add_ps(_mm256_set1_ps(level), _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7));
}
/// out[row ldo + 0 ... 31] and out[other ldo + 0 ... 31] = the weights of two rows of 4-bit codes.
template <BlockFormat kFormat>
[[gnu::always_inline]] inline void put_4_bits(__m256i codes, const float (&scales)[2], float* const (&out)[2]) {
  for (int i = 0; i < 2; ++i) {
    const __m128i of_row = i == 0 ? _mm256_castsi256_si128(codes) : _mm256_extracti128_si256(codes, 1);
    const __m256 scale = _mm256_set1_ps(scales[i]), low = _mm256_mul_ps(levels<kFormat>(0), scale),
                 high = _mm256_mul_ps(levels<kFormat>(8), scale);
    for (int j = 0; j < 2; ++j) {
      const __m256i lanes = _mm256_cvtepu8_epi32(j == 0 ? of_row : _mm_srli_si128(of_row, 8));
      _mm256_storeu_ps(out[i] + 8 * j, normal_floats(lanes, low, high));
      _mm256_storeu_ps(out[i] + 8 * j + 16, normal_floats(_mm256_srli_epi32(lanes, 4), low, high));
    }
  }
}
template <BlockFormat kFormat>
[[gnu::always_inline]] inline void put_4_bits(__m256i codes, const float (&scales)[2], bfloat16* const (&out)[2]) {
  const __m256 scale = _mm256_set_m128(_mm_set1_ps(scales[1]), _mm_set1_ps(scales[0]));
  const auto four = [&](int first) __attribute__((always_inline)) {
    const __m256 of = levels<kFormat>(first / 8 * 8);
    const __m256 each = _mm256_permute2f128_ps(of, of, first % 8 == 0 ? 0x00 : 0x11);
    return _mm256_srli_epi32(_mm256_castps_si256(nearest_bfloat16(_mm256_mul_ps(each, scale))), 16);
  };
  const __m256i first = _mm256_packus_epi32(four(0), four(4)), second = _mm256_packus_epi32(four(8), four(12)),
                byte = _mm256_set1_epi16(0xff);
  const __m256i low = _mm256_packus_epi16(_mm256_and_si256(first, byte), _mm256_and_si256(second, byte)),
                high = _mm256_packus_epi16(_mm256_srli_epi16(first, 8), _mm256_srli_epi16(second, 8));
  for (int j = 0; j < 2; ++j) {
    const __m256i each = _mm256_and_si256(j == 0 ? codes : _mm256_srli_epi16(codes, 4), _mm256_set1_epi8(15)),
                  lower = _mm256_shuffle_epi8(low, each), upper = _mm256_shuffle_epi8(high, each),
                  eight = _mm256_unpacklo_epi8(lower, upper), next = _mm256_unpackhi_epi8(lower, upper);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out[0] + 16 * j), _mm256_permute2x128_si256(eight, next, 0x20));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out[1] + 16 * j), _mm256_permute2x128_si256(eight, next, 0x31));
  }
}

/// Whether a scale of the tile is infinite or no number. Such weights are rounded one by one.
template <BlockFormat kFormat>
[[gnu::always_inline]] inline bool has_wild_scale(const std::byte* tile) {
  const __m256i exponent = kFormat == BlockFormat::nf4 ? _mm256_set1_epi32(0x7f800000) : _mm256_set1_epi16(0x7c00);
  __m256i wild = _mm256_setzero_si256();
  for (int i = 0; i < kBlockTileRows * scale_bytes(kFormat) / 32; ++i) {
    const __m256i bits = _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile) + i), exponent);
    wild = _mm256_or_si256(
        wild, kFormat == BlockFormat::nf4 ? _mm256_cmpeq_epi32(bits, exponent) : _mm256_cmpeq_epi16(bits, exponent));
  }
  return !_mm256_testz_si256(wild, wild);
}
#endif

/// out[16][32], ldo apart = the weights of a tile.
template <BlockFormat kFormat, class T>
inline void unpack_tile(const std::byte* tile, T* out, std::int64_t ldo) {
#if defined(__AVX512BW__)
  const CodesOfRows<kFormat> codes(tile);
  [&]<int... kPair>(std::integer_sequence<int, kPair...>) __attribute__((always_inline)) {
    (unpack_two_rows<kFormat, 2 * kPair>(tile, codes, out + 2 * kPair * ldo, ldo), ...);
  }(std::make_integer_sequence<int, kBlockTileRows / 2>());
#else
#if defined(__AVX2__)
  if (!has_wild_scale<kFormat>(tile))
    return for_each_two_rows<kFormat>(
        tile, [&](int row, int other, int part, __m256i codes) __attribute__((always_inline)) {
          const float scales[] = {tile_scale<kFormat>(tile, row), tile_scale<kFormat>(tile, other)};
          T* const rows[] = {out + row * ldo, out + other * ldo};
          if constexpr (kFormat == BlockFormat::q8_0) {
            put_q8_0(_mm256_permute2x128_si256(codes, codes, 0x00), scales[0], rows[0] + 16 * part);
            put_q8_0(_mm256_permute2x128_si256(codes, codes, 0x11), scales[1], rows[1] + 16 * part);
          } else {
            put_4_bits<kFormat>(kInOrder<kFormat>(codes), scales, rows);
          }
        });
#endif
  for (std::int64_t r = 0; r < kBlockTileRows; ++r) unpack_row<kFormat>(tile, r, out + r * ldo);
#endif
}

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
