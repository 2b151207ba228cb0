#include "model/lm_head.h"

#include <ATen/ATen.h>

#include "common/check.h"

namespace nemo_rl::model {

PairValues LmHead::forward(const Decoder& decoder, const at::Tensor& h, const TokenQuery& query, const TokenScoring& scoring,
                           bool with_unfiltered, Workspace& workspace) {
  rows_.gather(decoder, h, query, workspace);
  first_.assign(query.rows.size() + 1, 0);
  for (auto r : query.pair_row) ++first_[static_cast<std::size_t>(r) + 1];
  for (std::size_t u = 0; u < query.rows.size(); ++u) first_[u + 1] += first_[u];
  sums_.resize(query.rows.size());
  PairValues values{at::empty({static_cast<std::int64_t>(query.targets.size())}, h.options()), {}};
  if (with_unfiltered && scoring.filters(decoder.config().vocab_size)) values.unfiltered = at::empty_like(values.logprobs);
  head_.forward(rows_.normed(), decoder.parameters().lm_head, {first_.data(), query.targets.data()}, scoring, values, sums_.data(), {});
  return values;
}

at::Tensor LmHead::backward(const Decoder& decoder, const at::Tensor& h, const TokenQuery& query, const PairValues& d_values,
                            const TokenScoring& scoring, const DecoderParameters& grads, Workspace& workspace) {
  NRL_CHECK(sums_.size() == query.rows.size(), "LmHead::backward without its forward");
  const auto d_normed = rows_.d_normed(workspace);
  head_.backward(rows_.normed(), decoder.parameters().lm_head, {first_.data(), query.targets.data()}, scoring, d_values, sums_.data(), d_normed,
                 grads.lm_head);
  return rows_.backward(decoder, h, query, d_normed, grads, workspace);
}

}  // namespace nemo_rl::model
