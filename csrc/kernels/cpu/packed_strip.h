// Packed weights (kernels/packed_weights.h) in registers: a block is four words of 16 rows each (word 0 of rows 0-15
// and of rows 16-31, then word 1), packed into 192 bytes: 32 x 4 exponents, then sign and mantissa of the first two
// words in the halves of 16 bits, then of the others. With AVX2 a register has a word of 8 rows, so each part of 64
// bytes is two registers.
#pragma once
#include "kernels/cpu/linear_store.h"
#include "kernels/packed_weights.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

#if defined(__AVX2__)
/// A word of each of 16 rows, with AVX2 of 8.
using PackedBits = std::uint16_t __attribute__((vector_size(kRegisterBytes)));
[[gnu::always_inline]] inline PackedBits every(int x) { return PackedBits{} + static_cast<std::uint16_t>(x); }
[[gnu::always_inline]] inline PackedBits load_bits(const void* at) {
  PackedBits x;
  __builtin_memcpy(&x, at, sizeof(x));
  return x;
}
[[gnu::always_inline]] inline void store_bits(void* at, PackedBits x) { __builtin_memcpy(at, &x, sizeof(x)); }

/// The bytes of every 16 bits in turn: what is sign and mantissa there is where the other word has its exponent.
[[gnu::always_inline]] inline PackedBits turned_bytes(PackedBits x) {
  const __m128i order = _mm_setr_epi8(1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
#if defined(__AVX512BW__)
  return __builtin_bit_cast(PackedBits, _mm512_shuffle_epi8((__m512i)x, _mm512_broadcast_i32x4(order)));
#else
  return __builtin_bit_cast(PackedBits, _mm256_shuffle_epi8((__m256i)x, _mm256_broadcastsi128_si256(order)));
#endif
}

struct PackedBlock {
  static constexpr std::int64_t kBytes = 192, kTerms = 4;
  static constexpr int kRows = sizeof(PackedBits) / 4, kParts = kLanes / kRows;
  PackedBits words[4][kParts];

  static PackedBits exponents() { return every(0x7f80); }
  static PackedBits sign_and_mantissa() { return every(0x807f); }

  PackedBlock() = default;
  [[gnu::always_inline]] PackedBlock(const std::byte* at, PackedBits lowest) {
#pragma GCC unroll 2
    for (int i = 0; i < kParts; ++i, at += sizeof(PackedBits)) {
      const PackedBits codes = load_bits(at), first = load_bits(at + 64), second = load_bits(at + 128);
      words[0][i] = weights(first, codes << 7, lowest);
      words[1][i] = weights(turned_bytes(first), codes << 3, lowest);
      words[2][i] = weights(second, codes >> 1, lowest);
      words[3][i] = weights(turned_bytes(second), codes >> 5, lowest);
    }
  }

  /// Writes it to `at`; of a strip whose exponents lie above `lowest`. Returns which of its words hold a weight that
  /// does not fit.
  [[gnu::always_inline]] std::uint64_t pack(PackedBits lowest, std::byte* at) const {
    std::uint64_t misfits = 0;
    for (int part = 0; part < kParts; ++part, at += sizeof(PackedBits)) {
      PackedBits codes[4], rest[4];
      for (int i = 0; i < 4; ++i) {
        const PackedBits exponent = words[i][part] & exponents();
        codes[i] = exponent > lowest ? exponent - lowest : PackedBits{};
        rest[i] = words[i][part] & sign_and_mantissa();
        misfits |= any_of_pairs((exponent != 0) & (codes[i] == 0)) << (kLanes * i + kRows * part);
      }
      store_bits(at, codes[0] >> 7 | codes[1] >> 3 | codes[2] << 1 | codes[3] << 5);
      store_bits(at + 64, rest[0] | turned_bytes(rest[1]));
      store_bits(at + 128, rest[2] | turned_bytes(rest[3]));
    }
    return misfits;
  }

  /// All words as numbers: of 16 rows each.
  void to_memory(std::uint32_t (&to)[64]) const {
    for (int i = 0; i < 4; ++i)
      for (int part = 0; part < kParts; ++part) store_bits(to + kLanes * i + kRows * part, words[i][part]);
  }
  void from_memory(const std::uint32_t (&from)[64]) {
    for (int i = 0; i < 4; ++i)
      for (int part = 0; part < kParts; ++part) words[i][part] = load_bits(from + kLanes * i + kRows * part);
  }

 private:
  /// codes: four bits where a bfloat16 has its exponent's lowest; zero stays zero.
  [[gnu::always_inline]] static PackedBits weights(PackedBits rest, PackedBits codes, PackedBits lowest) {
    const PackedBits code = codes & every(0x0780);
#if defined(__AVX512BW__)
    const auto bits = (__m512i)code;
    const __m512i exponent = _mm512_mask_add_epi16(bits, _mm512_test_epi16_mask(bits, bits), bits, (__m512i)lowest);
    return __builtin_bit_cast(PackedBits,
                              _mm512_ternarylogic_epi32((__m512i)rest, (__m512i)sign_and_mantissa(), exponent, 0xea));
#else
    return (rest & sign_and_mantissa()) | (code + ((code != 0) & lowest));
#endif
  }
  /// A bit for each pair of lanes: whether one of the two is not zero.
  [[gnu::always_inline]] static std::uint64_t any_of_pairs(PackedBits lanes) {
    std::uint64_t any = 0;
    for (int row = 0; row < kRows; ++row)
      any |= static_cast<std::uint64_t>((lanes[2 * row] | lanes[2 * row + 1]) != 0) << row;
    return any;
  }
};

NRL_VEC ShortVec<float> lanes_of(PackedBits bits) {
  ShortVec<float> v;
  v.part[0] = __builtin_bit_cast(Register<float>, bits);
  return v;
}

/// The blocks of a packed strip, one after another, with their patches.
class PackedBlocks {
 public:
  PackedBlocks(const PackedMatrix& packed, std::int64_t strip)
      : at_(packed.strips + strip * packed_strip_bytes(packed.K)),
        patch_(packed.patches + strip * packed_patches(packed.K)),
        lowest_(every(static_cast<int>(patch_++->pair))) {}

  /// The next block that has patches: it is not next() but next_patched().
  std::int64_t patched() const { return patch_->block; }
  [[gnu::always_inline]] PackedBlock next() {
    for (int offset = 0; offset < PackedBlock::kBytes; offset += 64)
      __builtin_prefetch(at_ + kPackedAheadBytes + offset, 0, 3);
    const PackedBlock block(at_, lowest_);
    at_ += PackedBlock::kBytes;
    return block;
  }
  PackedBlock next_patched() {
    alignas(64) std::uint32_t words[64];
    const std::int64_t number = patch_->block;
    PackedBlock block(at_, lowest_);
    block.to_memory(words);
    for (; patch_->block == number; ++patch_) words[patch_->place] = patch_->pair;
    block.from_memory(words);
    at_ += PackedBlock::kBytes;
    return block;
  }

 private:
  const std::byte* at_;
  const PackedPatch* patch_;
  PackedBits lowest_;
};

/// Rows of packed x, as linear_pack leaves them: few lie one after another, more side by side.
template <bool kSideBySide>
struct StripRows {
  using X = Terms<bfloat16>;
  const X::Word* at;
  std::int64_t row_step;
  explicit StripRows(const LinearInput<bfloat16>& p)
      : at(static_cast<const X::Word*>(p.packed)), row_step(kSideBySide ? 1 : packed_row_words<bfloat16>(p.K)) {}
  void next_word() { at += kSideBySide ? X::V::kLanes : 1; }
  /// sum + a column of weights times the words at hand of row r.
  [[gnu::always_inline]] X::V add(PackedBits column, int r, X::V sum) const {
    const auto* word = at + r * row_step;
    if constexpr (kSideBySide && X::kPerColumn > 1) {
      const X::Word pair[] = {word[0], word[X::V::kLanes]};
      return X::add_column(lanes_of(column), pair, sum);
    } else {
      return X::add_column(lanes_of(column), word, sum);
    }
  }
};

/// out[r][width] = sums of a strip's rows with kRows rows of packed x: the operations of few_rows_tile, in its order.
/// kHalves halves of the strip, from kFirst on.
template <int kRows, int kFirst, int kHalves>
[[gnu::noinline]] void packed_strip(const LinearInput<bfloat16>& p, const PackedMatrix& packed, std::int64_t strip,
                                    std::int64_t width, float* out) {
  using X = Terms<bfloat16>;
  PackedBlocks from(packed, strip);
  const std::int64_t blocks = p.K / PackedBlock::kTerms;
  StripRows<(kRows > kLinearFewRows)> x(p);
  constexpr int kParts = PackedBlock::kParts;
  X::V sums[kRows][kHalves][kParts];
  for (auto& row : sums)
    for (auto& half : row)
      for (auto& part : half) part = X::V{};
  const auto multiply = [&](const PackedBlock& block) __attribute__((always_inline)) {
#pragma GCC unroll 2
    for (int word = 0; word < 2; ++word) {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r)
        for (int half = 0; half < kHalves; ++half)
          for (int part = 0; part < kParts; ++part)
            sums[r][half][part] = x.add(block.words[2 * word + kFirst + half][part], r, sums[r][half][part]);
      for (int i = 0; i < X::kPerColumn; ++i) x.next_word();
    }
  };
  for (std::int64_t b = 0;; ++b) {
    for (const std::int64_t next = smaller(from.patched(), blocks); b < next; ++b) multiply(from.next());
    if (b == blocks) break;
    multiply(from.next_patched());
  }
  for (int r = 0; r < kRows; ++r)
    for (int half = 0; half < kHalves; ++half)
      for (int part = 0; part < kParts; ++part)
        store(out + r * width + kLanes * (kFirst + half) + PackedBlock::kRows * part, sums[r][half][part]);
}

#if defined(__AVX512BW__)
/// The strip's next terms, from block `first` to `last`, as float32: out[term][32].
[[gnu::noinline]] inline void unpack_terms(PackedBlocks& from, std::int64_t first, std::int64_t last, float* out) {
  using Pairs = Register<std::uint32_t>;
  for (std::int64_t b = first; b < last; ++b) {
    const PackedBlock block = b == from.patched() ? from.next_patched() : from.next();
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      float* const even = out + i / 2 * 2 * kPackedStrip + i % 2 * kLanes;
      store(even, lanes_of(__builtin_bit_cast(PackedBits, __builtin_bit_cast(Pairs, block.words[i][0]) << 16)));
      store(even + kPackedStrip,
            lanes_of(__builtin_bit_cast(PackedBits, __builtin_bit_cast(Pairs, block.words[i][0]) & 0xffff0000u)));
    }
    out += PackedBlock::kTerms * kPackedStrip;
  }
}

/// sums[r][32] = or += `terms` terms of kRows rows of x, side by side at x and x_step apart, times w[term][32].
template <int kRows>
[[gnu::noinline]] void unpacked_rows(const float* x, std::int64_t x_step, const float* w, std::int64_t terms,
                                     bool goes_on, float* sums) {
  using V = ShortVec<float>;
  V low[kRows], high[kRows];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    low[r] = goes_on ? load<V>(sums + r * kPackedStrip) : V{};
    high[r] = goes_on ? load<V>(sums + r * kPackedStrip + kLanes) : V{};
  }
  for (std::int64_t k = 0; k < terms; ++k, x += x_step, w += kPackedStrip) {
    const V first = load<V>(w), second = load<V>(w + kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const V each(x[r]);
      low[r] = mul_add(each, first, low[r]);
      high[r] = mul_add(each, second, high[r]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    store(sums + r * kPackedStrip, low[r]);
    store(sums + r * kPackedStrip + kLanes, high[r]);
  }
}

/// Where pairs are taken apart, many rows share that work: some of a strip's terms at a time become float32, and go to
/// the rows in groups of kGroup, whose sums fit in registers. The chains are those of packed_strip.
template <std::int64_t kGroup, std::int64_t kMostRows>
void unpacked_strip(const LinearInput<bfloat16>& p, const PackedMatrix& packed, std::int64_t strip, std::int64_t width,
                    float* out) {
  alignas(64) float w[kPackedUnpackedTerms * kPackedStrip], sums[kMostRows * kPackedStrip];
  PackedBlocks from(packed, strip);
  const std::int64_t x_step = (p.M + kLanes - 1) / kLanes * kLanes;
  for (std::int64_t k = 0; k < p.K; k += kPackedUnpackedTerms) {
    const std::int64_t terms = smaller(p.K - k, kPackedUnpackedTerms);
    unpack_terms(from, k / PackedBlock::kTerms, (k + terms) / PackedBlock::kTerms, w);
    const float* const x = static_cast<const float*>(p.packed) + k * x_step;
    std::int64_t fours = (p.M + 3) / 4, m = 0;
    for (std::int64_t groups = (4 * fours + kGroup - 1) / kGroup; groups > 0; --groups) {  // of nearly one size
      const std::int64_t taken = (fours + groups - 1) / groups;
      with_constant<kGroup / 4>(static_cast<int>(taken), [&](auto n) {
        unpacked_rows<4 * n()>(x + m, x_step, w, terms, k > 0, sums + m * kPackedStrip);
      });
      fours -= taken, m += 4 * taken;
    }
  }
  for (std::int64_t m = 0; m < p.M; ++m)
    for (std::int64_t j = 0; j < kPackedStrip; j += kLanes)
      store(out + m * width + j, load<ShortVec<float>>(sums + m * kPackedStrip + j));
}

/// The sums of up to kMost rows of x by Terms<bfloat16>. Numbers of rows above kLinearFewRows share code, because those
/// rows lie side by side in one panel, whose absent rows are zero.
struct PackedChains {
  static constexpr SumOrder kOrder = Terms<bfloat16>::kOrder;
  static constexpr bool kSingle = Terms<bfloat16>::kPerWord == 1;
  static constexpr int kFew = static_cast<int>(kLinearFewRows), kSome = static_cast<int>(kPackedMostRows),
                       kMore = static_cast<int>(kPackedMostRowsHalves),
                       kMost = static_cast<int>(kSingle ? kPackedMostRowsSingle : kSome);
  static_assert(kFew < kSome && kSome < kMore && kMore <= Terms<bfloat16>::V::kLanes && kMost <= kLinearTileM);
  static constexpr int kKinds = kFew + (kSingle ? 3 : 1);  ///< of numbers of rows that have code of their own
  static constexpr int kind_of(int rows) {
    return rows <= kFew ? rows : rows <= kSome ? kFew + 1 : rows <= kMore ? kFew + 2 : kKinds;
  }
  static constexpr int rows_of(int kind) {
    return kind <= kFew ? kind : kind == kFew + 1 ? kSome : kind < kKinds ? kMore : kMost;
  }
  template <int kRows>
  static void strip(const LinearInput<bfloat16>& p, const PackedMatrix& packed, std::int64_t number, std::int64_t width,
                    float* out) {
    if constexpr (kRows <= kSome) {
      packed_strip<kRows, 0, 2>(p, packed, number, width, out);
    } else if constexpr (kRows <= kMore) {  // the sums of one half fit; the strip is still near when it is read again
      packed_strip<kRows, 0, 1>(p, packed, number, width, out);
      packed_strip<kRows, 1, 1>(p, packed, number, width, out);
    } else {
      unpacked_strip<kSome, kMost>(p, packed, number, width, out);
    }
  }
};

#else
/// The sums of up to kMost rows of x by Terms<bfloat16>; those of some rows fit for half a strip only.
struct PackedChains {
  static constexpr SumOrder kOrder = Terms<bfloat16>::kOrder;
  static constexpr int kMost = static_cast<int>(kPackedMostRowsShort), kKinds = kMost;
  static_assert(kMost <= kLinearFewRows);
  static constexpr int kind_of(int rows) { return rows; }
  static constexpr int rows_of(int kind) { return kind; }
  template <int kRows>
  static void strip(const LinearInput<bfloat16>& p, const PackedMatrix& packed, std::int64_t number, std::int64_t width,
                    float* out) {
    if constexpr (kRows <= 2) {
      packed_strip<kRows, 0, 2>(p, packed, number, width, out);
    } else {
      packed_strip<kRows, 0, 1>(p, packed, number, width, out);
      packed_strip<kRows, 1, 1>(p, packed, number, width, out);
    }
  }
};
#endif

/// For every tile of kStrips strips, its rows' sums to store_of(tile)(row, sums).
template <class Chains, int kStrips, class StoreOf>
void run_packed_strips(const LinearInput<bfloat16>& p, const PackedMatrix& packed, std::int64_t begin, std::int64_t end,
                       const StoreOf& store_of) {
  constexpr std::int64_t kWidth = kStrips * kPackedStrip;
  with_constant<Chains::kKinds>(Chains::kind_of(static_cast<int>(p.M)), [&](auto kind) {
    constexpr int kRows = Chains::rows_of(kind());
    alignas(64) float sums[kRows * kWidth];
    for (std::int64_t tile = begin; tile < end; ++tile) {
      for (int s = 0; s < kStrips; ++s)
        Chains::template strip<kRows>(p, packed, tile * kStrips + s, kWidth, sums + s * kPackedStrip);
      const auto store = store_of(tile);
      for (std::int64_t m = 0; m < p.M; ++m) store(m, sums + m * kWidth);
    }
  });
}
#else
struct PackedChains {
  static constexpr int kMost = 0;
};
/// Never called: packed_weights_rows says so.
template <class Chains, int kStrips, class StoreOf>
void run_packed_strips(const LinearInput<bfloat16>&, const PackedMatrix&, std::int64_t, std::int64_t, const StoreOf&) {}
#endif

template <class Chains, class O>
void packed_weights_forward(const LinearForwardArgs<bfloat16, O>& p, const PackedMatrix& packed, std::int64_t begin,
                            std::int64_t end) {
  run_packed_strips<Chains, 1>(p.input, packed, begin, end, [&](std::int64_t strip) {
    return StoreColumns<bfloat16, O>{p, strip * kPackedStrip, static_cast<int>(kPackedStrip)};
  });
}

template <class Chains>
void packed_weights_swiglu(const LinearSwigluArgs<bfloat16>& p, const PackedMatrix& packed, std::int64_t begin,
                           std::int64_t end) {
  constexpr int kStrip = static_cast<int>(kPackedStrip);
  run_packed_strips<Chains, 2>(p.input, packed, begin, end, [&](std::int64_t tile) {
    return StoreSwiglu<bfloat16, kStrip>{p, tile * kStrip, kStrip};
  });
}

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
