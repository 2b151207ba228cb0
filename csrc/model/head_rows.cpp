#include "model/head_rows.h"

#include <cstring>

#include "common/check.h"
#include "ops/index_tensor.h"
#include "ops/rms_norm.h"

namespace nemo_rl::model {
namespace {

/// copy(row u of the gathered rows, row of the hidden states) for every wanted row.
template <class F>
void for_each_row(const TokenQuery& query, F&& copy) {
  for (std::size_t u = 0; u < query.rows.size(); ++u) copy(u, static_cast<std::size_t>(query.rows[u]));
}

/// The wanted rows on h's device.
at::Tensor rows_of(const TokenQuery& query, const at::Tensor& h) {
  return ops::index_tensor(query.rows.data(), static_cast<std::int64_t>(query.rows.size()), h);
}

}  // namespace

void HeadRows::gather(const Decoder& decoder, const at::Tensor& h, const TokenQuery& query, Workspace& workspace) {
  const std::int64_t U = static_cast<std::int64_t>(query.rows.size()), D = h.size(1);
  hidden_ = workspace.take(Slot::head_hidden, {U, D}, h.scalar_type());
  normed_ = workspace.take(Slot::head_normed, {U, D}, decoder.compute_dtype());
  rstd_ = workspace.take(Slot::head_rstd, {U, 1}, h.scalar_type());
  if (h.is_cuda()) {
    at::index_select_out(hidden_, h, 0, rows_of(query, h));
  } else {
    const std::size_t bytes = static_cast<std::size_t>(D) * c10::elementSize(h.scalar_type());
    auto* to = static_cast<char*>(hidden_.data_ptr());
    const auto* from = static_cast<const char*>(h.const_data_ptr());
    for_each_row(query,
                 [&](std::size_t u, std::size_t row) { std::memcpy(to + u * bytes, from + row * bytes, bytes); });
  }
  decoder.final_norm(hidden_, normed_, rstd_);
}

at::Tensor HeadRows::d_normed(Workspace& workspace) const {
  return workspace.take(Slot::head_d_normed, hidden_.sizes(), hidden_.scalar_type());
}

at::Tensor HeadRows::backward(const Decoder& decoder, const at::Tensor& h, const TokenQuery& query,
                              const at::Tensor& d_normed, const DecoderParameters& grads, Workspace& workspace) const {
  NRL_CHECK(size() == static_cast<std::int64_t>(query.rows.size()), "a head's backward without its forward");
  const auto d_hidden = workspace.take(Slot::head_d_hidden, hidden_.sizes(), hidden_.scalar_type());
  decoder.final_norm_backward(d_normed, hidden_, rstd_, d_hidden, grads.final_norm);
  const auto dh = workspace.take(Slot::dh, h.sizes(), h.scalar_type());
  dh.zero_();
  if (h.is_cuda()) return dh.index_copy_(0, rows_of(query, h), d_hidden);  // each row once
  const std::size_t bytes = static_cast<std::size_t>(h.size(1)) * c10::elementSize(h.scalar_type());
  auto* to = static_cast<char*>(dh.data_ptr());
  const auto* from = static_cast<const char*>(d_hidden.const_data_ptr());
  for_each_row(query, [&](std::size_t u, std::size_t row) { std::memcpy(to + row * bytes, from + u * bytes, bytes); });
  return dh;
}

}  // namespace nemo_rl::model
