#include "model/lm_head.h"

#include "common/check.h"
#include "runtime/tensor.h"

namespace nemo_rl::model {

RowTargets LmHead::targets(const TokenQuery& query) {
  first_.assign(query.rows.size() + 1, 0);
  for (auto r : query.pair_row) ++first_[static_cast<std::size_t>(r) + 1];
  for (std::size_t u = 0; u < query.rows.size(); ++u) first_[u + 1] += first_[u];
  return {first_.data(), query.targets.data()};
}

PairValues LmHead::forward(const Decoder& decoder, const at::Tensor& h, const TokenQuery& query,
                           const TokenScoring& scoring, bool with_unfiltered, const at::Tensor& entropy,
                           Workspace& workspace) {
  rows_.gather(decoder, h, query, workspace);
  sums_.resize(query.rows.size());
  PairValues values{at::empty({static_cast<std::int64_t>(query.targets.size())}, h.options()), {}};
  if (with_unfiltered && scoring.filters(decoder.config().vocab_size))
    values.unfiltered = at::empty_like(values.logprobs);
  head_.forward(rows_.normed(), decoder.parameters().lm_head, targets(query), scoring, values, sums_.data(), entropy);
  return values;
}

at::Tensor LmHead::backward(const Decoder& decoder, const at::Tensor& h, const TokenQuery& query,
                            const PairValues& d_values, const at::Tensor& d_entropy, const TokenScoring& scoring,
                            const DecoderParameters& grads, Workspace& workspace) {
  NRL_CHECK(sums_.size() == query.rows.size(), "LmHead::backward without its forward");
  const auto d_normed = rows_.d_normed(workspace);
  head_.backward(rows_.normed(), decoder.parameters().lm_head, {first_.data(), query.targets.data()}, scoring, d_values,
                 sums_.data(), d_normed, grads.lm_head, d_entropy);
  return rows_.backward(decoder, h, query, d_normed, grads, workspace);
}

void LmHead::likeliest(const Decoder& decoder, const at::Tensor& h, const TokenQuery& query, double temperature,
                       const at::Tensor& ids, const at::Tensor& logprobs, Workspace& workspace) {
  rows_.gather(decoder, h, query, workspace);
  head_.likeliest(rows_.normed(), decoder.parameters().lm_head, temperature, ids, logprobs);
}

at::Tensor LmHead::forward_backward(const Decoder& decoder, const at::Tensor& h, const TokenQuery& query,
                                    const TokenScoring& scoring, const PairLoss& loss, const DecoderParameters& grads,
                                    Workspace& workspace) {
  rows_.gather(decoder, h, query, workspace);
  const auto logprobs = at::empty({static_cast<std::int64_t>(query.targets.size())}, h.options());
  d_normed_ = rows_.d_normed(workspace);
  head_.forward_backward(rows_.normed(), decoder.parameters().lm_head, targets(query), scoring, logprobs, loss,
                         d_normed_, grads.lm_head);
  return logprobs;
}

at::Tensor LmHead::finish_backward(const Decoder& decoder, const at::Tensor& h, const TokenQuery& query,
                                   const DecoderParameters& grads, Workspace& workspace) {
  return rows_.backward(decoder, h, query, d_normed_, grads, workspace);
}

}  // namespace nemo_rl::model
