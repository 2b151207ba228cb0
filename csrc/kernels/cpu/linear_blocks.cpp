// Weights in blocks (kernels/weight_blocks.h): packed when a model is loaded, unpacked strip by strip for the products.
// Unpacked weights are the same bits in every capability, since each is one product in float32.
#include "kernels/cpu/block_rows.h"
#include "kernels/cpu/plain.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

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

/// The tile of block b of row n.
template <class Byte>
Byte* tile_of(BlockFormat format, Byte* tiles, std::int64_t n, std::int64_t b, std::int64_t K) {
  return tiles + (n / kBlockTileRows * (K / kBlockTerms) + b) * block_tile_bytes(format);
}

template <class T>
void unpack_blocks(BlockFormat any, const std::byte* tiles, std::int64_t first, std::int64_t rows, std::int64_t K,
                   T* out, std::int64_t ldo) {
  with_format(any, [&](auto format) {
    for (std::int64_t n = first, end = first + rows, count; n < end; n += count, out += count * ldo) {
      const bool whole = n % kBlockTileRows == 0 && n + kBlockTileRows <= end;
      count = whole ? kBlockTileRows : 1;
      const std::byte* tile = tile_of(format(), tiles, n, 0, K);
      for (std::int64_t k = 0; k < K; k += kBlockTerms, tile += block_tile_bytes(format())) {
        if (whole) unpack_tile<format()>(tile, out + k, ldo);
        else unpack_row<format()>(tile, n % kBlockTileRows, out + k);
      }
    }
  });
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

/// One number of each of sixteen blocks.
using OfBlocks = float[kLanes];

/// The code of nf4 whose level, which is the weight of scale 1, is nearest to x, the lower of two; or that level.
template <bool kLevel>
[[gnu::always_inline]] inline float nearest(float x) {
  float found = kLevel ? kNormalFloat[0] : 0;
#pragma GCC unroll 16
  for (int c = 1; c < 16; ++c)
    found =
        x > (kNormalFloat[c - 1] + kNormalFloat[c]) / 2 ? (kLevel ? kNormalFloat[c] : static_cast<float>(c)) : found;
  return found;
}

/// The scales of sixteen blocks of nf4 (kernels/weight_blocks.h); NaN where a weight is not finite.
void best_scales(const OfBlocks (&w)[kBlockTerms], OfBlocks& scale) {
  OfBlocks farthest = {}, inverse, best, x[kBlockTerms];
  for (const OfBlocks& each : w)
    for (int b = 0; b < kLanes; ++b)
      farthest[b] = __builtin_fabsf(each[b]) > __builtin_fabsf(farthest[b]) ? each[b] : farthest[b];
  for (int b = 0; b < kLanes; ++b) inverse[b] = 1 / farthest[b], best[b] = -1;
  for (std::int64_t i = 0; i < kBlockTerms; ++i)
    for (int b = 0; b < kLanes; ++b) x[i][b] = w[i][b] * inverse[b];
  for (const float place : kNormalFloatPlaces) {
    OfBlocks products = {}, squares = {};
    for (const OfBlocks& each : x)
      for (int b = 0; b < kLanes; ++b) {
        const float level = nearest<true>(each[b] * place);
        products[b] += each[b] * level;
        squares[b] += level * level;
      }
    for (int b = 0; b < kLanes; ++b) {
      const float score = products[b] * products[b] / squares[b], fitting = farthest[b] * (products[b] / squares[b]);
      scale[b] = score <= best[b] ? scale[b] : fitting;
      best[b] = score <= best[b] ? best[b] : score;
    }
  }
  for (int b = 0; b < kLanes; ++b)
    if (__builtin_fabsf(farthest[b]) < kNormalFloatLeast || __builtin_fabsf(scale[b]) < kNormalFloatLeast) scale[b] = 0;
}

/// Up to sixteen blocks of nf4.
void pack_nf4(const float (&w)[kLanes][kBlockTerms], std::int64_t count, std::byte* block) {
  OfBlocks turned[kBlockTerms], scale, inverse, codes[kBlockTerms];
  for (std::int64_t i = 0; i < kBlockTerms; ++i)
    for (int b = 0; b < kLanes; ++b) turned[i][b] = w[b][i];
  best_scales(turned, scale);
  for (int b = 0; b < kLanes; ++b) inverse[b] = reciprocal(scale[b]);
  for (std::int64_t i = 0; i < kBlockTerms; ++i)
    for (int b = 0; b < kLanes; ++b) codes[i][b] = nearest<false>(turned[i][b] * inverse[b]);
  for (std::int64_t b = 0; b < count; ++b, block += block_bytes(BlockFormat::nf4)) {
    __builtin_memcpy(block, &scale[b], sizeof(float));
    const auto q = [&](std::int64_t i) { return static_cast<unsigned>(codes[i][b]); };
    for (std::int64_t i = 0; i < kHalfBlock; ++i)
      block[sizeof(float) + i] = static_cast<std::byte>(q(i) | q(i + kHalfBlock) << 4);
  }
}

template <class T>
void pack_blocks(BlockFormat any, const T* w, std::int64_t ldw, std::int64_t first, std::int64_t rows, std::int64_t K,
                 std::byte* tiles) {
  const std::int64_t of_row = K / kBlockTerms, total = rows * of_row;
  with_format(any, [&](auto format) {
    constexpr std::int64_t kBytes = block_bytes(format());
    for (std::int64_t block = 0; block < total; block += kLanes) {
      const std::int64_t count = smaller<std::int64_t>(kLanes, total - block);
      float terms[kLanes][kBlockTerms] = {};
      std::byte packed[kLanes * kBytes];
      for (std::int64_t b = 0; b < count; ++b) {
        const T* const from = w + (block + b) / of_row * ldw + (block + b) % of_row * kBlockTerms;
        for (std::int64_t i = 0; i < kBlockTerms; ++i) terms[b][i] = static_cast<float>(from[i]);
        if constexpr (format() == BlockFormat::q8_0) pack_q8_0(terms[b], packed + b * kBytes);
        if constexpr (format() == BlockFormat::q4_0) pack_q4_0(terms[b], packed + b * kBytes);
      }
      if constexpr (format() == BlockFormat::nf4) pack_nf4(terms, count, packed);
      for (std::int64_t b = block; b < block + count; ++b) {
        const std::int64_t n = first + b / of_row;
        put_block<format()>(packed + (b - block) * kBytes, n % kBlockTileRows,
                            tile_of(format(), tiles, n, b % of_row, K));
      }
    }
  });
}

template <int kStrips>
constexpr auto kRunStrips = [](const auto&... of) { run_block_strips<kStrips>(of...); };

}  // namespace

void unpack_blocks_f32(BlockFormat format, const std::byte* tiles, std::int64_t first, std::int64_t rows,
                       std::int64_t K, float* out, std::int64_t ldo) {
  unpack_blocks(format, tiles, first, rows, K, out, ldo);
}
void unpack_blocks_bf16(BlockFormat format, const std::byte* tiles, std::int64_t first, std::int64_t rows,
                        std::int64_t K, bfloat16* out, std::int64_t ldo) {
  unpack_blocks(format, tiles, first, rows, K, out, ldo);
}
void pack_blocks_f32(BlockFormat format, const float* w, std::int64_t ldw, std::int64_t first, std::int64_t rows,
                     std::int64_t K, std::byte* tiles) {
  pack_blocks(format, w, ldw, first, rows, K, tiles);
}
void pack_blocks_bf16(BlockFormat format, const bfloat16* w, std::int64_t ldw, std::int64_t first, std::int64_t rows,
                      std::int64_t K, std::byte* tiles) {
  pack_blocks(format, w, ldw, first, rows, K, tiles);
}
void write_block_rows(BlockFormat any, const std::byte* blocks, std::int64_t first, std::int64_t rows, std::int64_t K,
                      std::byte* tiles) {
  with_format(any, [&](auto format) {
    for (std::int64_t n = first; n < first + rows; ++n)
      for (std::int64_t b = 0; b < K / kBlockTerms; ++b, blocks += block_bytes(format()))
        put_block<format()>(blocks, n % kBlockTileRows, tile_of(format(), tiles, n, b, K));
  });
}
void read_block_rows(BlockFormat any, const std::byte* tiles, std::int64_t first, std::int64_t rows, std::int64_t K,
                     std::byte* blocks) {
  with_format(any, [&](auto format) {
    for (std::int64_t n = first; n < first + rows; ++n)
      for (std::int64_t b = 0; b < K / kBlockTerms; ++b, blocks += block_bytes(format()))
        take_block<format()>(tile_of(format(), tiles, n, b, K), n % kBlockTileRows, blocks);
  });
}

bool block_weights_are_single() { return Terms<bfloat16>::kPerWord == 1; }
std::int64_t block_product_rows(BlockFormat format) { return most_block_rows(format); }
void linear_pack_for_blocks([[maybe_unused]] BlockFormat format, const LinearInput<bfloat16>& p, std::int64_t b,
                            std::int64_t e) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  if (format == BlockFormat::q8_0) return pack_codes<BlockFormat::q8_0>(p, b, e);
  if (format == BlockFormat::q4_0) return pack_codes<BlockFormat::q4_0>(p, b, e);
#endif
  linear_pack_bf16(p, b, e);
}
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
