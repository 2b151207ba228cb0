#include "model/vocab_slice.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>

#include "ops/kernel_types.h"
#include "runtime/tensor.h"

namespace nemo_rl::model {

VocabSlice::VocabSlice(const ModelConfig& config, distributed::Peers* peers)
    : peers_(peers), softcap_(config.logit_softcap) {
  if (peers == nullptr) return;
  block_ = config.vocab_block();
  for (int r = 0; r < peers->size(); ++r) rows_.push_back(config.vocab_rows(r));
}

void VocabSlice::cap(const at::Tensor& logits) const {
  if (softcap_ == 0) return;
  if (logits.is_cuda()) {
    logits.div_(softcap_).tanh_().mul_(softcap_);
    return;
  }
  ops::dispatch_floating(logits.scalar_type(), "softcap", [&](auto tag) {
    using A = accumulate_t<decltype(tag)>;
    at::parallel_for(0, logits.size(0), 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r)
        cap_row(ops::mutable_ptr<A>(logits) + r * logits.stride(0), logits.size(1), softcap_);
    });
  });
}

void VocabSlice::gather_rows(const at::Tensor& own, const at::Tensor& whole) const {
  std::int64_t longest = 0;
  for (const auto& rows : rows_) longest = std::max(longest, rows.size());
  auto mine = own;
  if (own.size(1) < longest) {  // messages have one shape
    mine = at::empty({own.size(0), longest}, own.options());
    mine.narrow(1, 0, own.size(1)).copy_(own);
  }
  const auto all = peers_->gather(mine, "putting the logits of all slices together");
  for (int r = 0; r < peers_->size(); ++r) {
    const auto& rows = rows_[static_cast<std::size_t>(r)];
    whole.narrow(1, rows.begin, rows.size()).copy_(all[r].narrow(1, 0, rows.size()));
  }
}

WholeSums VocabSlice::gather_sums(std::int64_t U, const std::vector<kernels::VocabBlockSum>& own,
                                  const std::vector<float>& own_targets, const std::int64_t* targets,
                                  std::int64_t pairs) const {
  constexpr auto kFloats = static_cast<std::int64_t>(sizeof(kernels::VocabBlockSum) / sizeof(float));
  std::int64_t longest = 0;
  WholeSums whole;
  for (const auto& rows : rows_) longest = std::max(longest, blocks_of(rows)), whole.count += blocks_of(rows);
  const std::int64_t length = U * longest * kFloats + pairs;
  const auto message = at::zeros({length}, at::kFloat);
  std::memcpy(
      message.data_ptr<float>(), own.data(),
      static_cast<std::size_t>(U * blocks_of(rows_[static_cast<std::size_t>(peers_->rank())])) * sizeof(own[0]));
  std::memcpy(message.data_ptr<float>() + U * longest * kFloats, own_targets.data(),
              static_cast<std::size_t>(pairs) * sizeof(float));
  const auto all = peers_->gather(message, "putting the sums of all slices of the vocabulary together");

  whole.blocks.resize(static_cast<std::size_t>(U * whole.count));
  whole.target_logits.resize(static_cast<std::size_t>(pairs));
  std::int64_t first = 0;
  for (int r = 0; r < peers_->size(); ++r) {
    const auto& rows = rows_[static_cast<std::size_t>(r)];
    const std::int64_t n = blocks_of(rows);
    const float* const from = all.const_data_ptr<float>() + r * length;
    for (std::int64_t u = 0; u < U; ++u)
      std::memcpy(&whole.blocks[static_cast<std::size_t>(u * whole.count + first)], from + u * n * kFloats,
                  static_cast<std::size_t>(n) * sizeof(kernels::VocabBlockSum));
    for (std::int64_t i = 0; i < pairs; ++i)
      if (targets[i] >= rows.begin && targets[i] < rows.end)
        whole.target_logits[static_cast<std::size_t>(i)] = from[U * longest * kFloats + i];
    first += n;
  }
  return whole;
}

void VocabSlice::sum(const at::Tensor& x) const {
  if (peers_ != nullptr) peers_->sum(x, "adding the gradients of all slices of the vocabulary");
}

}  // namespace nemo_rl::model
