// Packs bfloat16 weights into twelve bits each; their products are in linear_forward.cpp and linear_swiglu.cpp.
#include "kernels/cpu/product_table.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

#if defined(__AVX512BW__)
/// The highest exponent of 32 rows, where a bfloat16 has it.
int highest_exponent(const bfloat16* w, std::int64_t ldw, std::int64_t K) {
  __m512i most = _mm512_setzero_si512();
  for (std::int64_t row = 0; row < kPackedStrip; ++row, w += ldw)
    for (std::int64_t k = 0; k < K; k += 32) {
      const __mmask32 present = K - k >= 32 ? ~__mmask32{0} : static_cast<__mmask32>((1u << (K - k)) - 1);
      most =
          _mm512_max_epu16(most, _mm512_and_si512(_mm512_maskz_loadu_epi16(present, w + k), PackedBlock::exponents()));
    }
  alignas(64) std::uint16_t lanes[32];
  _mm512_store_si512(lanes, most);
  int highest = 0;
  for (const int lane : lanes) highest = larger(highest, lane);
  return highest;
}

/// Adds patches for the misfits among a block's words; false: there is no room.
bool add_patches(const PackedBlock& block, std::int64_t number, std::uint64_t misfits, PackedPatch*& patch,
                 const PackedPatch* last) {
  alignas(64) std::uint32_t words[64];
  for (int i = 0; i < 4; ++i) _mm512_store_si512(words + kLanes * i, block.words[i]);
  for (; misfits != 0; misfits &= misfits - 1, ++patch) {
    if (patch == last) return false;
    const int place = __builtin_ctzll(misfits);
    *patch = {static_cast<std::uint16_t>(number), static_cast<std::uint16_t>(place), words[place]};
  }
  return true;
}

bool pack_strip(const bfloat16* w, std::int64_t ldw, const PackedMatrix& packed, std::int64_t strip) {
  const std::int64_t K = packed.K;
  const int lowest = larger(highest_exponent(w, ldw, K) - (15 << 7), 0);
  const __m512i lowest_lanes = _mm512_set1_epi16(static_cast<short>(lowest));
  auto* at = packed.strips + strip * packed_strip_bytes(K);
  PackedPatch* patch = packed.patches + strip * packed_patches(K);
  const PackedPatch* const last = patch + packed_patches(K) - 1;
  *patch++ = {0, 0, static_cast<std::uint32_t>(lowest)};
  const bfloat16* rows[kPackedStrip];
  for (std::int64_t i = 0; i < kPackedStrip; ++i) rows[i] = w + i * ldw;
  for (std::int64_t k = 0; k < K; k += kPackedTerms) {
    const Turned<bfloat16> low(rows, k), high(rows + kLanes, k);
    for (int q = 0; q < 4; q += 2, at += PackedBlock::kBytes) {
      PackedBlock block;
      for (int word = 0; word < 2; ++word) {
        block.words[2 * word] = _mm512_castps_si512(low.column[q + word].part[0]);
        block.words[2 * word + 1] = _mm512_castps_si512(high.column[q + word].part[0]);
      }
      const std::uint64_t misfits = block.pack(lowest_lanes, at);
      if (misfits != 0 && !add_patches(block, k / PackedBlock::kTerms + q / 2, misfits, patch, last)) return false;
    }
  }
  *patch = {0xffff, 0, 0};
  return true;
}
#else
bool pack_strip(const bfloat16*, std::int64_t, const PackedMatrix&, std::int64_t) { return false; }
#endif

}  // namespace

bool packed_weights_pack(const bfloat16* w, std::int64_t ldw, const PackedMatrix& packed, std::int64_t strip) {
  return pack_strip(w, ldw, packed, strip);
}
void packed_weights_pack_rows(const LinearInput<bfloat16>& input) { linear_pack_bf16(input, 0, 1); }
std::int64_t packed_weights_rows() { return ProductTable<bfloat16>::packed.to; }

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
