#include "model/value_head.h"

#include <ATen/Dispatch.h>

#include "ops/linear.h"
#include "runtime/tensor.h"

namespace nemo_rl::model {

at::Tensor ValueHead::forward(const Decoder& decoder, const at::Tensor& h, const TokenQuery& query,
                              Workspace& workspace) {
  rows_.gather(decoder, h, query, workspace);
  const auto by_row = workspace.take(Slot::head_values, {rows_.size(), 1}, decoder.accumulate_dtype());
  ops::linear_forward(rows_.normed(), decoder.parameters().lm_head, std::nullopt, by_row);
  if (h.is_cuda()) {
    const auto index = at::from_blob(const_cast<std::int64_t*>(query.pair_row.data()),
                                     {static_cast<std::int64_t>(query.pair_row.size())}, at::kLong);
    return by_row.view({-1}).index_select(0, index.to(h.device()));
  }
  auto values = at::empty({static_cast<std::int64_t>(query.pair_row.size())}, h.options());
  AT_DISPATCH_FLOATING_TYPES(decoder.accumulate_dtype(), "value_head", [&] {
    const auto* from = by_row.const_data_ptr<scalar_t>();
    auto* to = values.data_ptr<scalar_t>();
    for (std::size_t i = 0; i < query.pair_row.size(); ++i) to[i] = from[query.pair_row[i]];
  });
  return values;
}

at::Tensor ValueHead::backward(const Decoder& decoder, const at::Tensor& h, const TokenQuery& query,
                               const at::Tensor& d_values, const DecoderParameters& grads, Workspace& workspace) {
  // Sums of a row's pairs in the accumulation type; rounded once to the compute type that the products read.
  const auto sums = d_values.is_cuda()
                        ? at::zeros({rows_.size(), 1}, decoder.accumulate_dtype())
                        : workspace.take(Slot::head_d_values, {rows_.size(), 1}, decoder.accumulate_dtype());
  const auto by_pair = d_values.cpu();  // a handful of numbers, summed in their order on the CPU
  sums.zero_();
  AT_DISPATCH_FLOATING_TYPES(decoder.accumulate_dtype(), "value_head", [&] {
    const auto* from = by_pair.const_data_ptr<scalar_t>();
    auto* to = sums.data_ptr<scalar_t>();
    for (std::size_t i = 0; i < query.pair_row.size(); ++i) to[query.pair_row[i]] += from[i];
  });
  const auto by_row = workspace.take(Slot::head_d_values_rounded, {rows_.size(), 1}, decoder.compute_dtype());
  by_row.copy_(sums);
  const auto d_normed = rows_.d_normed(workspace);
  if (grads.lm_head.defined()) ops::linear_backward_weight(by_row, rows_.normed(), grads.lm_head);
  ops::linear_backward_input(by_row, decoder.parameters().lm_head, d_normed);
  return rows_.backward(decoder, h, query, d_normed, grads, workspace);
}

}  // namespace nemo_rl::model
