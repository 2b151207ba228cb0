#include "model/vocabulary_head.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "common/check.h"
#include "kernels/linear.h"
#include "kernels/logprob_backward.h"
#include "ops/kernel_types.h"
#include "ops/linear.h"
#include "ops/weight_blocks.h"
#include "runtime/large_tensor.h"
#include "runtime/parallel_items.h"
#include "runtime/tensor.h"

namespace nemo_rl::model {
namespace {

constexpr std::int64_t kTile = kernels::kVocabBlock;  // columns: a whole block of the log-softmax, or more
constexpr std::int64_t kRowBlock = kernels::kHeadRowBlock;

kernels::LogSumExp log_sum_exp(const float* row, std::int64_t V, float temperature, bool with_entropy) {
  return kernels::log_sum_exp_row(row, V, temperature, with_entropy);
}
kernels::LogSumExpF64 log_sum_exp(const double* row, std::int64_t V, double temperature, bool with_entropy) {
  return kernels::log_sum_exp_row_f64(row, V, temperature, with_entropy);
}

template <class A>
LogSumExpOf<A> lse_of(const RowSums& sums) {
  return {static_cast<A>(sums.max), static_cast<A>(sums.log_sum), static_cast<A>(sums.entropy)};
}

/// Pairs of one row and the gradient g of their log-probabilities, and h of the row's entropy.
template <class A>
struct RowGradient {
  const std::int64_t* targets;
  const A* g;
  std::int64_t pairs;
  A h = 0;
};

/// out[v] = -softmax[v] / temperature (total + h (log softmax[v] + H)), where H is the row's entropy.
template <class A, class S>
void share_of_all(const A* logits, std::int64_t n, A temperature, const LogSumExpOf<A>& lse, A total, A h, S* out) {
  if constexpr (std::is_same_v<S, double>) {
    for (std::int64_t v = 0; v < n; ++v) {
      const A logprob = (logits[v] / temperature - lse.max) - lse.log_sum;
      out[v] = -(total + (h == 0 ? A(0) : h * (logprob + lse.entropy))) / temperature * std::exp(logprob);
    }
  } else if constexpr (std::is_same_v<S, float>) {
    if (h == 0) kernels::logprob_backward_row_f32(logits, n, temperature, lse, total, out);
    else kernels::entropy_backward_row_f32(logits, n, temperature, lse, total, h, out);
  } else {
    if (h == 0) kernels::logprob_backward_row_bf16(logits, n, temperature, lse, total, out);
    else kernels::entropy_backward_row_bf16(logits, n, temperature, lse, total, h, out);
  }
}

/// out[v - begin] = d (sum_i g[i] logprob(targets[i]) + h H) / d logits[v] for v in [begin, begin + n); `logits` starts
/// at begin.
template <class A, class S>
void row_gradient(const A* logits, std::int64_t begin, std::int64_t n, A temperature, const LogSumExpOf<A>& lse,
                  const RowGradient<A>& row, S* out, double softcap = 0) {
  const auto& [targets, g, pairs, h] = row;
  A total = 0;
  for (std::int64_t i = 0; i < pairs; ++i) total += g[i];
  share_of_all(logits, n, temperature, lse, total, h, out);
  for (std::int64_t i = 0; i < pairs; ++i) {
    const std::int64_t v = targets[i] - begin;
    if (v < 0 || v >= n) continue;
    A own = 0;  // all pairs with this target: the entry is rounded once
    for (std::int64_t j = 0; j < pairs; ++j)
      if (targets[j] == targets[i]) own += g[j];
    const A logprob = (logits[v] / temperature - lse.max) - lse.log_sum;
    const A all = total + (h == 0 ? A(0) : h * (logprob + lse.entropy));
    out[v] = static_cast<S>((own - all * std::exp(logprob)) / temperature);
  }
  for (std::int64_t v = 0; softcap > 0 && v < n; ++v)
    out[v] = static_cast<S>(static_cast<A>(out[v]) * cap_slope(logits[v], softcap));
}

float* thread_logits() {
  thread_local std::vector<float> logits(kRowBlock * kTile);
  return logits.data();
}

/// Logits of rows [r, r + rows) and columns [v, v + columns), rows kTile apart.
template <class S>
void tile_logits(const at::Tensor& x, const at::Tensor& w, std::int64_t r, std::int64_t rows, std::int64_t v,
                 std::int64_t columns, float* out) {
  if (ops::in_blocks(w)) {
    return ops::linear_forward(x.narrow(0, r, rows), w.narrow(0, v, columns), std::nullopt,
                               at::from_blob(out, {rows, columns}, {kTile, 1}, at::kFloat));
  }
  const std::int64_t D = x.size(1), packed = kernels::linear_packed_bytes(rows, D, sizeof(S));
  const std::int64_t floats =
      std::is_same_v<S, bfloat16> ? kernels::linear_strip_floats_bf16(rows, D, kernels::kLinearTileN) : 0;
  std::byte* const memory =
      runtime::thread_workspace(static_cast<std::size_t>(packed) + static_cast<std::size_t>(floats) * sizeof(float));
  const kernels::LinearInput<S> input{ops::ptr<S>(x) + r * x.stride(0),
                                      x.stride(0),
                                      rows,
                                      D,
                                      memory,
                                      floats > 0 ? reinterpret_cast<float*>(memory + packed) : nullptr};
  const kernels::LinearForwardArgs<S, float> args{
      input, ops::ptr<S>(w) + v * w.stride(0), w.stride(0), nullptr, out, kTile, columns, false};
  const std::int64_t tiles = kernels::LinearTiles(rows, columns, D).count();
  if constexpr (std::is_same_v<S, float>) {
    kernels::linear_pack_f32(input, 0, 1);
    kernels::linear_forward_f32(args, 0, tiles, false);
  } else {
    kernels::linear_pack_bf16(input, 0, 1);
    kernels::linear_forward_bf16_f32(args, 0, tiles, false);
  }
}

/// f with a value of the type of x, the case of float64 apart.
template <class F>
void with_tile_type(const at::Tensor& x, F&& f) {
  x.scalar_type() == at::kFloat ? f(float{}) : f(bfloat16{});
}

/// log_sum_exp by blocks of another size, in the same order: block after block.
kernels::LogSumExp log_sum_exp_blocks(const float* row, std::int64_t V, std::int64_t block, float temperature,
                                      bool with_entropy) {
  if (block == kTile) return log_sum_exp(row, V, temperature, with_entropy);
  std::vector<kernels::VocabBlockSum> sums;
  for (std::int64_t v = 0; v < V; v += block)
    sums.push_back(kernels::vocab_block_sum(row + v, std::min(block, V - v), temperature, with_entropy));
  return kernels::combine_block_sums(sums.data(), static_cast<std::int64_t>(sums.size()), with_entropy);
}
kernels::LogSumExpF64 log_sum_exp_blocks(const double* row, std::int64_t V, std::int64_t, double temperature,
                                         bool with_entropy) {
  return log_sum_exp(row, V, temperature, with_entropy);
}

}  // namespace

void VocabularyHead::check(const at::Tensor& x, const at::Tensor& w, const RowTargets& wanted) const {
  NRL_CHECK_ARG(x.dim() == 2 && w.dim() == 2 && x.is_contiguous() && w.is_contiguous() &&
                    (ops::in_blocks(w) || (x.size(1) == w.size(1) && x.scalar_type() == w.scalar_type())),
                "the head needs contiguous hidden states [U, D] and weights [V, D] of one dtype, got ", x.sizes(),
                " and ", w.sizes());
  const std::int64_t V = slice_.vocab_size(w.size(0));
  for (std::int64_t i = wanted.first[0]; i < wanted.first[x.size(0)]; ++i)
    NRL_CHECK_ARG(wanted.targets[i] >= 0 && wanted.targets[i] < V, "token id ", wanted.targets[i],
                  " is outside the vocabulary of ", V);
}

/// The logits [rows of x, V], of all slices.
/// On the CPU, also of a model on a GPU.
at::Tensor VocabularyHead::whole_logits(const at::Tensor& x, const at::Tensor& w, at::ScalarType dtype) {
  if (x.is_cuda()) {
    const auto on_gpu = device_scratch(logits_, {x.size(0), w.size(0)}, x.options().dtype(dtype));
    ops::linear_forward(x, w, std::nullopt, on_gpu);
    slice_.cap(on_gpu);
    return on_gpu.cpu();
  }
  const auto logits = scratch(logits_, {x.size(0), slice_.vocab_size(w.size(0))}, dtype);
  if (slice_.is_whole()) {
    ops::linear_forward(x, w, std::nullopt, logits);
  } else {
    const auto own = scratch(own_logits_, {x.size(0), w.size(0)}, dtype);
    ops::linear_forward(x, w, std::nullopt, own);
    slice_.gather_rows(own, logits);
  }
  slice_.cap(logits);
  return logits;
}

at::Tensor VocabularyHead::scratch(at::Tensor& buffer, at::IntArrayRef shape, at::ScalarType dtype) {
  const std::int64_t n = shape[0] * shape[1];
  if (!buffer.defined() || buffer.scalar_type() != dtype || buffer.numel() < n)
    buffer = runtime::empty_large({n}, dtype);
  return buffer.narrow(0, 0, n).view(shape);
}

void VocabularyHead::forward(const at::Tensor& x, const at::Tensor& w, const RowTargets& wanted,
                             const TokenScoring& scoring, const PairValues& values, RowSums* sums,
                             const at::Tensor& entropy) {
  check(x, w, wanted);
  if (x.is_cuda()) return forward_on_device(x, w, wanted, scoring, values, entropy);
  if (scoring.filters(slice_.vocab_size(w.size(0))) || x.scalar_type() == at::kDouble)
    return forward_rows(x, w, wanted, scoring, values, sums, entropy);
  score_tiles(x, w, wanted, static_cast<float>(scoring.temperature), {0, x.size(0)}, nullptr,
              ops::mutable_ptr<float>(values.logprobs), sums, entropy);
}

void VocabularyHead::score_tiles(const at::Tensor& x, const at::Tensor& w, const RowTargets& wanted, float temperature,
                                 RowRange range, float* kept, float* logprobs, RowSums* sums,
                                 const at::Tensor& entropy) {
  const auto [start, U] = range;
  const std::int64_t V = w.size(0), width = slice_.block(), tiles = (V + width - 1) / width;
  const std::int64_t row_blocks = (U + kRowBlock - 1) / kRowBlock;
  const std::int64_t* const first = wanted.first + start;
  block_sums_.resize(static_cast<std::size_t>(U * tiles));
  target_logits_.resize(static_cast<std::size_t>(first[U] - first[0]));
  const auto take_row = [&](std::int64_t u, std::int64_t tile, std::int64_t columns, float* row) {
    cap_row(row, columns, slice_.softcap());
    block_sums_[static_cast<std::size_t>(u * tiles + tile)] =
        kernels::vocab_block_sum(row, columns, temperature, entropy.defined());
    for (std::int64_t i = first[u], v = slice_.begin() + tile * width; i < first[u + 1]; ++i)
      if (wanted.targets[i] >= v && wanted.targets[i] < v + columns)
        target_logits_[static_cast<std::size_t>(i - first[0])] = row[wanted.targets[i] - v];
  };
  if (kept && U >= kernels::kHeadProductRows) {
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      const std::int64_t v = tile * width, columns = std::min(width, V - v);
      float* const logits = kept + tile * U * kTile;
      ops::linear_forward(x.narrow(0, start, U), w.narrow(0, v, columns), std::nullopt,
                          at::from_blob(logits, {U, columns}, {kTile, 1}, at::kFloat));
      at::parallel_for(0, U, kRowBlock, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t u = begin; u < end; ++u) take_row(u, tile, columns, logits + u * kTile);
      });
    }
  } else {
    with_tile_type(x, [&, start = start, U = U](auto tag) {
      at::parallel_for(0, tiles * row_blocks, 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t item = begin; item < end; ++item) {
          const std::int64_t tile = item / row_blocks, v = tile * width, r = item % row_blocks * kRowBlock;
          const std::int64_t columns = std::min(width, V - v), rows = std::min(kRowBlock, U - r);
          float* const logits = kept ? kept + (tile * U + r) * kTile : thread_logits();
          tile_logits<decltype(tag)>(x, w, start + r, rows, v, columns, logits);
          for (std::int64_t u = r; u < r + rows; ++u) take_row(u, tile, columns, logits + (u - r) * kTile);
        }
      });
    });
  }
  WholeSums gathered;
  const bool here = slice_.is_whole();
  if (!here)
    gathered = slice_.gather_sums(U, block_sums_, target_logits_, wanted.targets + first[0], first[U] - first[0]);
  const auto& blocks = here ? block_sums_ : gathered.blocks;
  const auto& target_logits = here ? target_logits_ : gathered.target_logits;
  const std::int64_t count = here ? tiles : gathered.count;
  at::parallel_for(0, U, 64, [&, start = start](std::int64_t begin, std::int64_t end) {
    for (std::int64_t u = begin; u < end; ++u) {
      const auto lse =
          kernels::combine_block_sums(&blocks[static_cast<std::size_t>(u * count)], count, entropy.defined());
      sums[start + u] = {lse.max, lse.log_sum, lse.entropy};
      if (entropy.defined()) ops::mutable_ptr<float>(entropy)[start + u] = lse.entropy;
      for (std::int64_t i = first[u]; i < first[u + 1]; ++i)
        logprobs[i] = token_logprob(target_logits[static_cast<std::size_t>(i - first[0])], temperature, lse);
    }
  });
}

void VocabularyHead::forward_backward(const at::Tensor& x, const at::Tensor& w, const RowTargets& wanted,
                                      const TokenScoring& scoring, const at::Tensor& logprobs, const PairLoss& loss,
                                      const at::Tensor& d_x, const at::Tensor& d_w) {
  check(x, w, wanted);
  NRL_CHECK_ARG(!scoring.filters(slice_.vocab_size(w.size(0))) && x.scalar_type() != at::kDouble,
                "forward_backward takes no filter and no float64");
  if (x.is_cuda()) return forward_backward_on_device(x, w, wanted, scoring, logprobs, loss, d_x, d_w);
  const std::int64_t U = x.size(0), tiles = (w.size(0) + slice_.block() - 1) / slice_.block();
  // Of all slices the same number of rows, though one may have a tile less.
  const std::int64_t most = (slice_.vocab_size(w.size(0)) + kTile - 1) / kTile;
  const std::int64_t chunk = std::clamp(kernels::kHeadFusedLogits / (most * kTile) / kRowBlock * kRowBlock, kRowBlock,
                                        kernels::kHeadFusedRows);
  const float temperature = static_cast<float>(scoring.temperature);
  float* const values = ops::mutable_ptr<float>(logprobs);
  fused_sums_.resize(static_cast<std::size_t>(U));
  pair_gradients_.resize(static_cast<std::size_t>(wanted.first[U]));
  float* const kept = ops::mutable_ptr<float>(scratch(logits_, {tiles * std::min(chunk, U), kTile}, at::kFloat));
  for (std::int64_t start = 0; start < U; start += chunk) {
    const RowRange range{start, std::min(chunk, U - start)};
    score_tiles(x, w, wanted, temperature, range, kept, values, fused_sums_.data(), {});
    const std::int64_t begin = wanted.first[start], end = wanted.first[start + range.count];
    loss(begin, end, values + begin, pair_gradients_.data() + begin);
    backward_tiles(x, w, wanted, temperature, range, kept, pair_gradients_.data(), nullptr, fused_sums_.data(), d_x,
                   d_w);
  }
  slice_.sum(d_x);
}

void VocabularyHead::forward_rows(const at::Tensor& x, const at::Tensor& w, const RowTargets& wanted,
                                  const TokenScoring& scoring, const PairValues& values, RowSums* sums,
                                  const at::Tensor& entropy) {
  const std::int64_t U = x.size(0), V = slice_.vocab_size(w.size(0)),
                     C = std::max<std::int64_t>(1, kernels::kHeadRowLogits / V);
  const bool filters = scoring.filters(V);
  const auto& plain_values = filters ? values.unfiltered : values.logprobs;
  const auto run = [&](auto tag) {
    using A = decltype(tag);
    const A temperature = static_cast<A>(scoring.temperature);
    A* const filtered = filters ? ops::mutable_ptr<A>(values.logprobs) : nullptr;
    A* const plain = plain_values.defined() ? ops::mutable_ptr<A>(plain_values) : nullptr;
    for (std::int64_t start = 0; start < U; start += C) {
      const std::int64_t count = std::min(C, U - start);
      const auto logits = whole_logits(x.narrow(0, start, count), w, values.logprobs.scalar_type());
      at::parallel_for(start, start + count, 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t u = begin; u < end; ++u) {
          const A* const row = ops::ptr<A>(logits) + (u - start) * V;
          if (plain || entropy.defined()) {
            const auto lse = log_sum_exp_blocks(row, V, slice_.block(), temperature, entropy.defined());
            sums[u] = {lse.max, lse.log_sum, lse.entropy};
            if (entropy.defined()) ops::mutable_ptr<A>(entropy)[u] = lse.entropy;
            for (std::int64_t i = wanted.first[u]; plain && i < wanted.first[u + 1]; ++i)
              plain[i] = token_logprob(row[wanted.targets[i]], temperature, lse);
          }
          if (!filters) continue;
          const auto kept = filtered_row(row, V, scoring);
          for (std::int64_t i = wanted.first[u]; i < wanted.first[u + 1]; ++i)
            filtered[i] = kept.logprob(wanted.targets[i], row[wanted.targets[i]]);
        }
      });
    }
  };
  values.logprobs.scalar_type() == at::kDouble ? run(double{}) : run(float{});
}

void VocabularyHead::backward(const at::Tensor& x, const at::Tensor& w, const RowTargets& wanted,
                              const TokenScoring& scoring, const PairValues& d_values, const RowSums* sums,
                              const at::Tensor& d_x, const at::Tensor& d_w, const at::Tensor& d_entropy) {
  check(x, w, wanted);
  if (x.is_cuda()) return backward_on_device(x, w, wanted, scoring, d_values, d_x, d_w, d_entropy);
  if (scoring.filters(slice_.vocab_size(w.size(0))) || x.scalar_type() == at::kDouble) {
    backward_rows(x, w, wanted, scoring, d_values, sums, d_x, d_w, d_entropy);
    return slice_.sum(d_x);
  }
  for (std::int64_t start = 0, U = x.size(0); start < U; start += kernels::kHeadBackwardRows)
    backward_tiles(x, w, wanted, static_cast<float>(scoring.temperature),
                   {start, std::min(kernels::kHeadBackwardRows, U - start)}, nullptr,
                   ops::ptr<float>(d_values.logprobs), d_entropy.defined() ? ops::ptr<float>(d_entropy) : nullptr, sums,
                   d_x, d_w);
  slice_.sum(d_x);
}

void VocabularyHead::backward_tiles(const at::Tensor& x, const at::Tensor& w, const RowTargets& wanted,
                                    float temperature, RowRange range, const float* kept, const float* d_logprobs,
                                    const float* d_entropy, const RowSums* sums, const at::Tensor& d_x,
                                    const at::Tensor& d_w) {
  const auto [start, rows] = range;
  const std::int64_t V = w.size(0), width = slice_.block();
  const auto d_logits = scratch(d_logits_, {rows, kTile}, x.scalar_type());
  with_tile_type(x, [&, start = start, rows = rows](auto tag) {
    using S = decltype(tag);
    S* const d = ops::mutable_ptr<S>(d_logits);
    for (std::int64_t v = 0; v < V; v += width) {
      const std::int64_t columns = std::min(width, V - v);
      at::parallel_for(0, (rows + kRowBlock - 1) / kRowBlock, 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t r = begin * kRowBlock; r < std::min(rows, end * kRowBlock); r += kRowBlock) {
          const std::int64_t count = std::min(kRowBlock, rows - r);
          const float* const logits = kept ? kept + (v / width * rows + r) * kTile : thread_logits();
          if (!kept) tile_logits<S>(x, w, start + r, count, v, columns, thread_logits());
          for (std::int64_t i = 0; i < count; ++i) {
            const std::int64_t u = start + r + i, p = wanted.first[u];
            if (!kept) cap_row(thread_logits() + i * kTile, columns, slice_.softcap());
            const RowGradient<float> gradient{wanted.targets + p, d_logprobs + p, wanted.first[u + 1] - p,
                                              d_entropy ? d_entropy[u] : 0.0f};
            row_gradient(logits + i * kTile, slice_.begin() + v, columns, temperature, lse_of<float>(sums[u]), gradient,
                         d + (r + i) * kTile, slice_.softcap());
          }
        }
      });
      const auto d_tile = d_logits.narrow(1, 0, columns);
      if (d_w.defined()) ops::linear_backward_weight(d_tile, x.narrow(0, start, rows), d_w.narrow(0, v, columns));
      ops::linear_backward_input(d_tile, w.narrow(0, v, columns), d_x.narrow(0, start, rows), /*accumulate=*/v > 0);
    }
  });
}

void VocabularyHead::backward_rows(const at::Tensor& x, const at::Tensor& w, const RowTargets& wanted,
                                   const TokenScoring& scoring, const PairValues& d_values, const RowSums* sums,
                                   const at::Tensor& d_x, const at::Tensor& d_w, const at::Tensor& d_entropy) {
  const std::int64_t U = x.size(0), V = slice_.vocab_size(w.size(0)),
                     C = std::max<std::int64_t>(1, kernels::kHeadRowLogits / V);
  const auto accumulate = d_values.logprobs.scalar_type();
  for (std::int64_t start = 0; start < U; start += C) {
    const std::int64_t count = std::min(C, U - start);
    const auto logits = whole_logits(x.narrow(0, start, count), w, accumulate),
               d_logits = scratch(d_logits_, {count, V}, x.scalar_type());
    chunk_gradient(start, wanted, scoring, d_values, sums, logits, d_logits, d_entropy);
    const auto own = d_logits.narrow(1, slice_.begin(), w.size(0));
    if (d_w.defined()) ops::linear_backward_weight(own, x.narrow(0, start, count), d_w);
    ops::linear_backward_input(own, w, d_x.narrow(0, start, count));
  }
}

void VocabularyHead::chunk_gradient(std::int64_t start, const RowTargets& wanted, const TokenScoring& scoring,
                                    const PairValues& d_values, const RowSums* sums, const at::Tensor& logits,
                                    const at::Tensor& d_logits, const at::Tensor& d_entropy) const {
  const std::int64_t V = logits.size(1);
  const bool filters = scoring.filters(V);
  const auto& d_plain = filters ? d_values.unfiltered : d_values.logprobs;
  ops::dispatch_floating(d_logits.scalar_type(), "lm_head", [&](auto tag) {
    using S = decltype(tag);
    using A = accumulate_t<S>;
    const A temperature = static_cast<A>(scoring.temperature);
    const A* const g_kept = filters ? ops::ptr<A>(d_values.logprobs) : nullptr;
    const A* const g_plain = d_plain.defined() ? ops::ptr<A>(d_plain) : nullptr;
    const A* const h = d_entropy.defined() ? ops::ptr<A>(d_entropy) : nullptr;
    at::parallel_for(start, start + logits.size(0), 1, [&](std::int64_t begin, std::int64_t end) {
      std::vector<A> sum(static_cast<std::size_t>(V));
      for (std::int64_t u = begin; u < end; ++u) {
        const A* const row = ops::ptr<A>(logits) + (u - start) * V;
        S* const out = ops::mutable_ptr<S>(d_logits) + (u - start) * V;
        const std::int64_t p = wanted.first[u], n = wanted.first[u + 1] - p;
        const RowGradient<A> plain{wanted.targets + p, g_plain + (g_plain ? p : 0), g_plain ? n : 0, h ? h[u] : A(0)};
        if (!filters) {
          row_gradient(row, 0, V, temperature, lse_of<A>(sums[u]), plain, out, slice_.softcap());
          continue;
        }
        if (g_plain || h) {
          row_gradient(row, 0, V, temperature, lse_of<A>(sums[u]), plain, sum.data());
        } else {
          std::fill(sum.begin(), sum.end(), A(0));
        }
        filtered_row(row, V, scoring).add_gradient(wanted.targets + p, g_kept + p, n, sum.data());
        for (std::int64_t v = 0; v < V; ++v)
          out[v] = static_cast<S>(sum[static_cast<std::size_t>(v)] * cap_slope(row[v], slice_.softcap()));
      }
    });
  });
}

void VocabularyHead::likeliest(const at::Tensor& x, const at::Tensor& w, double temperature, const at::Tensor& ids,
                               const at::Tensor& logprobs) {
  const std::int64_t U = x.size(0), V = slice_.vocab_size(w.size(0)), k = ids.size(1),
                     C = std::max<std::int64_t>(1, kernels::kHeadRowLogits / V);
  NRL_CHECK_ARG(k >= 1 && k <= V, "the ", k, " likeliest tokens of a vocabulary of ", V);
  const auto run = [&](auto tag) {
    using A = decltype(tag);
    for (std::int64_t start = 0; start < U; start += C) {
      const std::int64_t count = std::min(C, U - start);
      const auto logits = whole_logits(x.narrow(0, start, count), w, logprobs.scalar_type());
      at::parallel_for(start, start + count, 1, [&](std::int64_t begin, std::int64_t end) {
        std::vector<std::int64_t> order(static_cast<std::size_t>(V));
        for (std::int64_t u = begin; u < end; ++u) {
          const A* const row = ops::ptr<A>(logits) + (u - start) * V;
          const auto lse = log_sum_exp_blocks(row, V, slice_.block(), static_cast<A>(temperature), false);
          std::iota(order.begin(), order.end(), 0);
          std::partial_sort(order.begin(), order.begin() + k, order.end(), [&](std::int64_t a, std::int64_t b) {
            return row[a] > row[b] || (row[a] == row[b] && a < b);
          });
          for (std::int64_t i = 0; i < k; ++i) {
            const std::int64_t v = order[static_cast<std::size_t>(i)];
            ops::mutable_ptr<std::int64_t>(ids)[u * k + i] = v;
            ops::mutable_ptr<A>(logprobs)[u * k + i] = token_logprob(row[v], static_cast<A>(temperature), lse);
          }
        }
      });
    }
  };
  logprobs.scalar_type() == at::kDouble ? run(double{}) : run(float{});
}

}  // namespace nemo_rl::model
