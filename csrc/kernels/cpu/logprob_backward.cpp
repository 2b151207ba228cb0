#include "kernels/logprob_backward.h"

#include "kernels/cpu/vec_math.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

void store_lanes(float* out, f32x16 v) { store16(out, v); }
/// Rounds to nearest even; NaN stays NaN.
void store_lanes(bfloat16* out, f32x16 v) {
  using Bits = std::uint32_t __attribute__((vector_size(kNativeBytes)));
  using Half = std::uint16_t __attribute__((vector_size(kNativeBytes / 2)));
  for (int i = 0; i < kParts; ++i) {
    Bits bits;
    std::memcpy(&bits, &v.part[i], sizeof(bits));
    const Bits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const Half half = __builtin_convertvector(v.part[i] == v.part[i] ? rounded : Bits{} + 0x7fc0u, Half);
    std::memcpy(out + i * kNativeLanes, &half, sizeof(half));
  }
}

template <class O>
void backward_row(const float* logits, std::int64_t V, float temperature, const LogSumExp& row, float g, O* out) {
  const float inverse = 1.0f / temperature, shift = row.max + row.log_sum, scale = -g * inverse;
  std::int64_t v = 0;
  for (; v + kLanes <= V; v += kLanes) store_lanes(out + v, exp16(load16(logits + v) * inverse - shift) * scale);
  if (v < V) {
    alignas(64) float lanes[kLanes];
    store16(lanes, exp16(load16_partial(logits + v, V - v, 0.0f) * inverse - shift) * scale);
    for (int i = 0; v + i < V; ++i) out[v + i] = static_cast<O>(lanes[i]);
  }
}

}  // namespace

void logprob_backward_row_f32(const float* logits, std::int64_t V, float temperature, const LogSumExp& row, float g, float* out) {
  backward_row(logits, V, temperature, row, g, out);
}
void logprob_backward_row_bf16(const float* logits, std::int64_t V, float temperature, const LogSumExp& row, float g, bfloat16* out) {
  backward_row(logits, V, temperature, row, g, out);
}

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
