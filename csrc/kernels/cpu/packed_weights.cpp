// Packs bfloat16 weights into twelve bits each; their products are in linear_forward.cpp and linear_swiglu.cpp.
#include "kernels/cpu/product_table.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

#if defined(__AVX2__)
/// The highest exponent of 32 rows, where a bfloat16 has it.
int highest_exponent(const bfloat16* w, std::int64_t ldw, std::int64_t K) {
  std::uint16_t highest = 0;
  for (std::int64_t row = 0; row < kPackedStrip; ++row, w += ldw)
    for (std::int64_t k = 0; k < K; ++k) highest = larger(highest, static_cast<std::uint16_t>(w[k].bits & 0x7f80u));
  return highest;
}

/// Adds patches for the misfits among a block's words; false: there is no room.
bool add_patches(const PackedBlock& block, std::int64_t number, std::uint64_t misfits, PackedPatch*& patch,
                 const PackedPatch* last) {
  alignas(64) std::uint32_t words[64];
  block.to_memory(words);
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
  const PackedBits lowest_lanes = every(lowest);
  auto* at = packed.strips + strip * packed_strip_bytes(K);
  PackedPatch* patch = packed.patches + strip * packed_patches(K);
  const PackedPatch* const last = patch + packed_patches(K) - 1;
  *patch++ = {0, 0, static_cast<std::uint32_t>(lowest)};
  const bfloat16* rows[kPackedStrip];
  for (std::int64_t i = 0; i < kPackedStrip; ++i) rows[i] = w + i * ldw;
  for (std::int64_t k = 0; k < K; k += kPackedTerms) {
    PackedBlock blocks[2];
    for (int part = 0; part < 2 * PackedBlock::kParts; ++part) {
      const Turned<bfloat16> turned(rows + PackedBlock::kRows * part, k);
      for (int q = 0; q < 4; ++q)
        blocks[q / 2].words[q % 2 * 2 + part / PackedBlock::kParts][part % PackedBlock::kParts] =
            __builtin_bit_cast(PackedBits, turned.column[q].part[0]);
    }
    for (int i = 0; i < 2; ++i, at += PackedBlock::kBytes) {
      const std::uint64_t misfits = blocks[i].pack(lowest_lanes, at);
      if (misfits != 0 && !add_patches(blocks[i], k / PackedBlock::kTerms + i, misfits, patch, last)) return false;
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
