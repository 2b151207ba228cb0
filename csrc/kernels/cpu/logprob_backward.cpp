#include "kernels/logprob_backward.h"

#include "kernels/cpu/vec.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

template <class O>
void backward_row(const float* logits, std::int64_t V, float temperature, const LogSumExp& row, float g, O* out) {
  const float inverse = 1.0f / temperature, shift = row.max + row.log_sum, scale = -g * inverse;
  std::int64_t v = 0;
  for (; v + kLanes <= V; v += kLanes) store(out + v, exp_flushed(load<Floats>(logits + v) * inverse - shift) * scale);
  if (v < V) {
    alignas(64) float lanes[kLanes];
    store(lanes, exp_flushed(load<Floats>(logits + v, V - v, 0.0f) * inverse - shift) * scale);
    for (int i = 0; v + i < V; ++i) out[v + i] = static_cast<O>(lanes[i]);
  }
}

template <class O>
void entropy_backward_row(const float* logits, std::int64_t V, float temperature, const LogSumExp& row, float g,
                          float h, O* out) {
  const float inverse = 1.0f / temperature, shift = row.max + row.log_sum, scale = -g * inverse, slope = -h * inverse;
  const auto gradient = [&](Floats z) {
    const Floats logprob = z * inverse - shift;
    return exp_flushed(logprob) * ((logprob + row.entropy) * slope + scale);
  };
  std::int64_t v = 0;
  for (; v + kLanes <= V; v += kLanes) store(out + v, gradient(load<Floats>(logits + v)));
  if (v < V) {
    alignas(64) float lanes[kLanes];
    store(lanes, gradient(load<Floats>(logits + v, V - v, 0.0f)));
    for (int i = 0; v + i < V; ++i) out[v + i] = static_cast<O>(lanes[i]);
  }
}

}  // namespace

void logprob_backward_row_f32(const float* logits, std::int64_t V, float temperature, const LogSumExp& row, float g,
                              float* out) {
  backward_row(logits, V, temperature, row, g, out);
}
void logprob_backward_row_bf16(const float* logits, std::int64_t V, float temperature, const LogSumExp& row, float g,
                               bfloat16* out) {
  backward_row(logits, V, temperature, row, g, out);
}

void entropy_backward_row_f32(const float* logits, std::int64_t V, float temperature, const LogSumExp& row, float g,
                              float h, float* out) {
  entropy_backward_row(logits, V, temperature, row, g, h, out);
}
void entropy_backward_row_bf16(const float* logits, std::int64_t V, float temperature, const LogSumExp& row, float g,
                               float h, bfloat16* out) {
  entropy_backward_row(logits, V, temperature, row, g, h, out);
}

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
