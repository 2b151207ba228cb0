// The head on a CUDA device: whole rows of logits for as many rows at a time as fit a fixed budget. The product has the
// engine's own shape (all of the vocabulary), so a row of logits has the engine's bits.
#include <ATen/TensorOperators.h>
#include <ATen/ops/log_softmax.h>

#include <algorithm>

#include "common/check.h"
#include "model/vocabulary_head.h"
#include "ops/index_tensor.h"
#include "ops/linear.h"
#include "ops/sampling.h"
#include "runtime/tensor.h"

namespace nemo_rl::model {
namespace {

constexpr std::int64_t kDeviceLogits = std::int64_t{1} << 27;  // 512 MiB of float32

/// H of softmax(logits / temperature), row by row.
at::Tensor entropies(const at::Tensor& logits, double temperature) {
  const auto share = at::log_softmax(logits.div(temperature), 1);
  return share.exp().mul(share).sum(1).neg();
}

/// d_logits += h d H / d logits = -h softmax (log softmax + H) / temperature, row by row.
void add_entropy_gradient(const at::Tensor& logits, double temperature, const at::Tensor& h,
                          const at::Tensor& d_logits) {
  auto share = at::log_softmax(logits.div(temperature), 1);
  const auto probability = share.exp(), entropy = probability.mul(share).sum(1, /*keepdim=*/true).neg();
  d_logits.sub_(share.add_(entropy).mul_(probability).mul_(h.unsqueeze(1).div(temperature)));
}

std::int64_t rows_at_once(std::int64_t V) { return std::max<std::int64_t>(1, kDeviceLogits / V); }

}  // namespace

at::Tensor VocabularyHead::device_scratch(at::Tensor& buffer, at::IntArrayRef shape, const at::TensorOptions& options) {
  const std::int64_t n = shape[0] * shape[1];
  if (!buffer.defined() || buffer.options().device() != options.device() || buffer.dtype() != options.dtype() ||
      buffer.numel() < n)
    buffer = at::empty({n}, options);
  return buffer.narrow(0, 0, n).view(shape);
}

VocabularyHead::DevicePairs VocabularyHead::device_pairs(const at::Tensor& x, const RowTargets& wanted,
                                                         const TokenScoring& scoring) const {
  return {ops::index_tensor(wanted.first, x.size(0) + 1, x),
          ops::index_tensor(wanted.targets, wanted.first[x.size(0)], x),
          {static_cast<float>(scoring.temperature), scoring.top_p, scoring.top_k, false}};
}

void VocabularyHead::forward_on_device(const at::Tensor& x, const at::Tensor& w, const RowTargets& wanted,
                                       const TokenScoring& scoring, const PairValues& values,
                                       const at::Tensor& entropy) {
  const std::int64_t U = x.size(0), V = w.size(0), chunk = rows_at_once(V);
  if (U == 0) return;
  const auto pairs = device_pairs(x, wanted, scoring);
  for (std::int64_t start = 0; start < U; start += chunk) {
    const std::int64_t count = std::min(chunk, U - start);
    const auto logits = device_scratch(logits_, {count, V}, x.options().dtype(at::kFloat));
    ops::linear_forward(x.narrow(0, start, count), w, std::nullopt, logits);
    slice_.cap(logits);
    const auto own_entropy = entropy.defined() ? entropy.narrow(0, start, count) : at::Tensor();
    const bool by_kernel = !scoring.filters(V);  // which has that of the filtered distribution
    ops::score_pairs(logits, {pairs.first.narrow(0, start, count + 1), pairs.targets, pairs.rule}, values.logprobs,
                     values.unfiltered, by_kernel ? own_entropy : at::Tensor());
    if (own_entropy.defined() && !by_kernel) own_entropy.copy_(entropies(logits, scoring.temperature));
  }
}

void VocabularyHead::backward_on_device(const at::Tensor& x, const at::Tensor& w, const RowTargets& wanted,
                                        const TokenScoring& scoring, const PairValues& d_values, const at::Tensor& d_x,
                                        const at::Tensor& d_w, const at::Tensor& d_entropy) {
  const std::int64_t U = x.size(0), V = w.size(0), chunk = rows_at_once(V);
  if (U == 0) return;
  const at::Tensor d_unfiltered =
      scoring.filters(V) ? d_values.unfiltered : at::Tensor();  // else the caller has added it to the other
  const auto pairs = device_pairs(x, wanted, scoring);
  for (std::int64_t start = 0; start < U; start += chunk) {
    const std::int64_t count = std::min(chunk, U - start);
    const auto rows = x.narrow(0, start, count);
    const auto logits = device_scratch(logits_, {count, V}, x.options().dtype(at::kFloat)),
               d_logits = device_scratch(d_logits_, {count, V}, x.options());
    ops::linear_forward(rows, w, std::nullopt, logits);
    slice_.cap(logits);
    ops::pairs_gradient(logits, {pairs.first.narrow(0, start, count + 1), pairs.targets, pairs.rule}, d_values.logprobs,
                        d_unfiltered, d_logits);
    if (d_entropy.defined())
      add_entropy_gradient(logits, scoring.temperature, d_entropy.narrow(0, start, count), d_logits);
    if (slice_.softcap() > 0) d_logits.mul_(logits.div(slice_.softcap()).square().neg().add(1));
    if (d_w.defined()) ops::linear_backward_weight(d_logits, rows, d_w);
    ops::linear_backward_input(d_logits, w, d_x.narrow(0, start, count));
  }
}

void VocabularyHead::forward_backward_on_device(const at::Tensor& x, const at::Tensor& w, const RowTargets& wanted,
                                                const TokenScoring& scoring, const at::Tensor& logprobs,
                                                const PairLoss& loss, const at::Tensor& d_x, const at::Tensor& d_w) {
  const std::int64_t U = x.size(0), V = w.size(0), chunk = rows_at_once(V);
  if (U == 0) return;
  const auto pairs = device_pairs(x, wanted, scoring);
  const auto gradient = at::zeros_like(logprobs);
  for (std::int64_t start = 0; start < U; start += chunk) {
    const std::int64_t count = std::min(chunk, U - start), begin = wanted.first[start],
                       end = wanted.first[start + count];
    const auto rows = x.narrow(0, start, count);
    const auto logits = device_scratch(logits_, {count, V}, x.options().dtype(at::kFloat)),
               d_logits = device_scratch(d_logits_, {count, V}, x.options());
    const ops::PairQuery query{pairs.first.narrow(0, start, count + 1), pairs.targets, pairs.rule};
    ops::linear_forward(rows, w, std::nullopt, logits);
    slice_.cap(logits);
    ops::score_pairs(logits, query, logprobs, {}, {});
    // the loss sees a few numbers, on the CPU, where the rest of its inputs are
    const auto seen = logprobs.narrow(0, begin, end - begin).cpu(), d_seen = at::zeros_like(seen);
    loss(begin, end, seen.const_data_ptr<float>(), d_seen.mutable_data_ptr<float>());
    gradient.narrow(0, begin, end - begin).copy_(d_seen);
    ops::pairs_gradient(logits, query, gradient, {}, d_logits);
    if (slice_.softcap() > 0) d_logits.mul_(logits.div(slice_.softcap()).square().neg().add(1));
    if (d_w.defined()) ops::linear_backward_weight(d_logits, rows, d_w);
    ops::linear_backward_input(d_logits, w, d_x.narrow(0, start, count));
  }
}

}  // namespace nemo_rl::model
