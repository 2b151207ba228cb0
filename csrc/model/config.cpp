#include "model/config.h"

#include <algorithm>

#include "common/check.h"
#include "kernels/log_softmax.h"

namespace nemo_rl::model {

ModelConfig ModelConfig::sliced(TensorSlice part) const {
  NRL_CHECK(slice.size == 1, "a slice of a slice");
  NRL_CHECK_ARG(part.size >= 1 && part.rank >= 0 && part.rank < part.size, "slice ", part.rank, " of ", part.size);
  auto c = *this;
  const auto divide = [&](std::int64_t& count, const char* what) {
    NRL_CHECK_ARG(count % part.size == 0, "tensor parallelism over ", part.size, " processes cannot share ", count, " ",
                  what, " equally");
    count /= part.size;
  };
  if (part.size == 1) return c;
  NRL_CHECK_ARG(!has_experts(), "tensor parallelism cannot split a mixture of experts");
  NRL_CHECK_ARG(!has_recurrent(), "tensor parallelism cannot split a recurrent layer");
  NRL_CHECK_ARG(!latent, "tensor parallelism cannot split latent attention");
  NRL_CHECK_ARG(!layer_scalars, "tensor parallelism cannot split layers of Gemma 4");
  divide(c.num_heads, "attention heads");
  divide(c.num_kv_heads, "key/value heads");
  divide(c.intermediate_size, "columns of the MLP");
  NRL_CHECK_ARG(vocab_size >= part.size, "a vocabulary of ", vocab_size, " for ", part.size, " processes");
  NRL_CHECK_ARG(qk_norm != QkNorm::whole,
                "tensor parallelism cannot split a norm over all heads of the queries or keys (OLMo 2)");
  NRL_CHECK_ARG(!fused_qkv && !fused_gate_up,
                "tensor parallelism cannot split tensors that hold several matrices (Phi 3, GLM-4)");
  c.slice = part;
  return c;
}

ModelConfig ModelConfig::of_layer(std::int64_t l) const {
  auto c = *this;
  const auto& own = layers[static_cast<std::size_t>(l)];
  if (own.head_dim > 0) c.head_dim = own.head_dim;
  if (own.num_kv_heads > 0) c.num_kv_heads = own.num_kv_heads;
  if (own.intermediate_size > 0) c.intermediate_size = own.intermediate_size;
  return c;
}

bool ModelConfig::has_experts() const { return std::ranges::any_of(layers, &LayerConfig::has_experts); }

bool ModelConfig::has_recurrent() const { return std::ranges::any_of(layers, &LayerConfig::is_recurrent); }

std::int64_t ModelConfig::vocab_block() const {
  return slice.size == 1 ? kernels::kVocabBlock : std::min(kernels::kVocabBlock, vocab_size / slice.size);
}

VocabRows ModelConfig::vocab_rows(int rank) const {
  const std::int64_t block = vocab_block(), blocks = (vocab_size + block - 1) / block;
  const auto begins = [&](int r) { return std::min(vocab_size, blocks * r / slice.size * block); };
  return {begins(rank), begins(rank + 1)};
}

}  // namespace nemo_rl::model
