#include "kernels/log_softmax.h"

#include <cfloat>
#include <cmath>

#include "kernels/cpu/vec.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

constexpr int kUnroll = 4;  // independent accumulators hide the latency of an addition
constexpr float kInf = __builtin_inff();

float block_max(const float* x, std::int64_t n) {
  Floats best[kUnroll];
  for (auto& b : best) b = Floats(-kInf);
  std::int64_t i = 0;
  for (; i + kUnroll * kLanes <= n; i += kUnroll * kLanes) {
    for (int j = 0; j < kUnroll; ++j) best[j] = max_of(load<Floats>(x + i + j * kLanes), best[j]);
  }
  for (; i + kLanes <= n; i += kLanes) best[0] = max_of(load<Floats>(x + i), best[0]);
  if (i < n) best[0] = max_of(load<Floats>(x + i, n - i, -kInf), best[0]);
  return largest_of(max_of(max_of(best[0], best[1]), max_of(best[2], best[3])));
}

template <bool kEntropy>
VocabBlockSum block_sum(const float* x, std::int64_t n, float inverse_temperature) {
  // -FLT_MAX in place of -inf: a block of -inf sums to 0 instead of NaN, yet a NaN in it still shows
  float max = block_max(x, n) * inverse_temperature;
  if (max < -FLT_MAX) max = -FLT_MAX;
  Floats sum[kUnroll] = {}, dot[kUnroll] = {};
  const auto add = [&](int j, Floats logits) __attribute__((always_inline)) {
    Floats d = logits * inverse_temperature - max;
    Floats e = exp_flushed(d);
    sum[j] += e;
    if constexpr (kEntropy) dot[j] += e * max_of(d, Floats(-1e30f));  // 0 * -inf would be NaN
  };
  std::int64_t i = 0;
  for (; i + kUnroll * kLanes <= n; i += kUnroll * kLanes) {
    for (int j = 0; j < kUnroll; ++j) add(j, load<Floats>(x + i + j * kLanes));
  }
  // the rest, at most kUnroll times; the numbers of the sums are constants, so that they stay in registers
#pragma GCC unroll 4
  for (int j = 0; j < kUnroll; ++j, i += kLanes) {
    if (i + kLanes <= n) add(j, load<Floats>(x + i));
    else if (i < n) add(j, load<Floats>(x + i, static_cast<int>(n - i), -kInf));
  }
  VocabBlockSum out{max, sum_of((sum[0] + sum[1]) + (sum[2] + sum[3])), 0};
  if constexpr (kEntropy) out.dot = sum_of((dot[0] + dot[1]) + (dot[2] + dot[3]));
  return out;
}

/// Its series where |x| < 1/4, where the quotient loses digits.
NRL_VEC Floats tanh_of(Floats x) {
  const Floats square = x * x, e = exp_flushed(abs_of(x) * -2.0f), t = (1.0f - e) / (1.0f + e);
  const Floats series = (((square * (62.0f / 2835) - 17.0f / 315) * square + 2.0f / 15) * square - 1.0f / 3) * square;
  return select(abs_of(x) < Floats(0.25f), x + x * series, select(x < Floats(0.0f), -t, t));
}

/// Adds blocks one by one around a running maximum known beforehand.
struct Combiner {
  double max, sum = 0, dot = 0;

  void add(const VocabBlockSum& b, bool with_entropy) {
    const double shift = static_cast<double>(b.max) - max;
    const double scale = shift == 0 ? 1.0 : std::exp(shift);
    sum += scale * b.sum;
    if (with_entropy) dot += scale * (b.dot + b.sum * shift);
  }

  LogSumExp result(bool with_entropy) const {
    const double log_sum = std::log(sum);
    return {static_cast<float>(max), static_cast<float>(log_sum),
            with_entropy ? static_cast<float>(log_sum - dot / sum) : 0.0f};
  }
};

}  // namespace

VocabBlockSum vocab_block_sum(const float* logits, std::int64_t n, float temperature, bool with_entropy) {
  const float inverse = 1.0f / temperature;
  return with_entropy ? block_sum<true>(logits, n, inverse) : block_sum<false>(logits, n, inverse);
}

LogSumExp combine_block_sums(const VocabBlockSum* blocks, std::int64_t count, bool with_entropy) {
  Combiner all{-FLT_MAX};
  for (std::int64_t i = 0; i < count; ++i) all.max = blocks[i].max > all.max ? blocks[i].max : all.max;
  for (std::int64_t i = 0; i < count; ++i) all.add(blocks[i], with_entropy);
  return all.result(with_entropy);
}

LogSumExp log_sum_exp_row(const float* logits, std::int64_t V, float temperature, bool with_entropy) {
  constexpr std::int64_t kMaxBlocks = kMaxVocab / kVocabBlock;
  VocabBlockSum blocks[kMaxBlocks];
  const std::int64_t count = (V + kVocabBlock - 1) / kVocabBlock;
  if (count > kMaxBlocks) __builtin_trap();
  for (std::int64_t b = 0; b < count; ++b) {
    const std::int64_t begin = b * kVocabBlock;
    blocks[b] =
        vocab_block_sum(logits + begin, V - begin < kVocabBlock ? V - begin : kVocabBlock, temperature, with_entropy);
  }
  return combine_block_sums(blocks, count, with_entropy);
}

float token_logprob(float logit, float temperature, const LogSumExp& row) {
  return (logit * (1.0f / temperature) - row.max) - row.log_sum;
}

void softmax_row(const float* logits, std::int64_t V, float temperature, const LogSumExp& row, float* out) {
  const float inverse = 1.0f / temperature, max = row.max, log_sum = row.log_sum;
  std::int64_t i = 0;
  for (; i + kLanes <= V; i += kLanes)
    store(out + i, exp_flushed((load<Floats>(logits + i) * inverse - max) - log_sum));
  if (i == V) return;
  float tail[kLanes];
  store(tail, exp_flushed((load<Floats>(logits + i, V - i, -kInf) * inverse - max) - log_sum));
  for (std::int64_t j = 0; i + j < V; ++j) out[i + j] = tail[j];
}

void softcap_row(float* x, std::int64_t n, float c) {
  const float inverse = 1.0f / c;
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(x + i, tanh_of(load<Floats>(x + i) * inverse) * c);
  if (i < n) store(x + i, tanh_of(load<Floats>(x + i, static_cast<int>(n - i)) * inverse) * c, static_cast<int>(n - i));
}

LogSumExpF64 log_sum_exp_row_f64(const double* logits, std::int64_t V, double temperature, bool with_entropy) {
  double max = -DBL_MAX;
  for (std::int64_t v = 0; v < V; ++v) max = logits[v] / temperature > max ? logits[v] / temperature : max;
  double sum = 0, dot = 0;
  for (std::int64_t v = 0; v < V; ++v) {
    const double d = logits[v] / temperature - max, e = std::exp(d);
    sum += e;
    if (e > 0) dot += e * d;
  }
  const double log_sum = std::log(sum);
  return {max, log_sum, with_entropy ? log_sum - dot / sum : 0.0};
}

double token_logprob_f64(double logit, double temperature, const LogSumExpF64& row) {
  return (logit / temperature - row.max) - row.log_sum;
}

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
