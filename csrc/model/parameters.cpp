#include "model/parameters.h"

#include "common/check.h"

namespace nemo_rl::model {
namespace {

constexpr std::int64_t kAlignment = 64;  // elements: a cache line of bfloat16 and more

class LayoutBuilder {
 public:
  explicit LayoutBuilder(ParameterLayout& layout) : layout_(layout) {}
  void align() { layout_.total = (layout_.total + kAlignment - 1) / kAlignment * kAlignment; }
  /// Starts at the next aligned offset.
  void add(const std::string& name, std::vector<std::int64_t> shape) {
    align();
    append(name, std::move(shape));
  }
  /// Directly behind the one before: the two are used as one matrix.
  void append(const std::string& name, std::vector<std::int64_t> shape) {
    std::int64_t numel = 1;
    for (auto n : shape) numel *= n;
    layout_.specs.push_back({name, std::move(shape), layout_.total, numel});
    layout_.total += numel;
  }

 private:
  ParameterLayout& layout_;
};

void add_layer(LayoutBuilder& b, const ModelConfig& c, const std::string& prefix) {
  const std::int64_t D = c.hidden_size, I = c.intermediate_size, Q = c.query_size(), KV = c.num_kv_heads * c.head_dim;
  const std::string attn = prefix + "self_attn.", mlp = prefix + "mlp.";
  b.add(prefix + "input_layernorm.weight", {D});
  b.add(attn + "q_proj.weight", {Q, D});
  b.append(attn + "k_proj.weight", {KV, D});
  b.append(attn + "v_proj.weight", {KV, D});
  if (c.qkv_bias) {
    b.add(attn + "q_proj.bias", {Q});
    b.append(attn + "k_proj.bias", {KV});
    b.append(attn + "v_proj.bias", {KV});
  }
  if (c.qk_norm) {
    b.add(attn + "q_norm.weight", {c.head_dim});
    b.add(attn + "k_norm.weight", {c.head_dim});
  }
  b.add(attn + "o_proj.weight", {D, Q});
  if (c.output_bias) b.add(attn + "o_proj.bias", {D});
  b.add(prefix + "post_attention_layernorm.weight", {D});
  b.add(mlp + "gate_proj.weight", {I, D});
  b.append(mlp + "up_proj.weight", {I, D});
  if (c.mlp_bias) {
    b.add(mlp + "gate_proj.bias", {I});
    b.append(mlp + "up_proj.bias", {I});
  }
  b.add(mlp + "down_proj.weight", {D, I});
  if (c.mlp_bias) b.add(mlp + "down_proj.bias", {D});
}

std::string layer_prefix(std::int64_t layer) { return "model.layers." + std::to_string(layer) + "."; }

}  // namespace

ParameterLayout::ParameterLayout(const ModelConfig& c) {
  LayoutBuilder b(*this);
  b.add("model.embed_tokens.weight", {c.vocab_size, c.hidden_size});
  for (std::int64_t l = 0; l < c.num_layers; ++l) add_layer(b, c, layer_prefix(l));
  b.add("model.norm.weight", {c.hidden_size});
  if (c.value_head) {
    b.add("score.weight", {1, c.hidden_size});
  } else if (!c.tie_word_embeddings) {
    b.add("lm_head.weight", {c.vocab_size, c.hidden_size});
  }
  b.align();
}

const ParameterSpec& ParameterLayout::find(const std::string& name) const {
  for (const auto& spec : specs)
    if (spec.name == name) return spec;
  throw std::runtime_error("no parameter is named " + name);
}

DecoderParameters::DecoderParameters(const ModelConfig& c, const ParameterLayout& layout, at::Tensor flat_buffer) : flat(std::move(flat_buffer)) {
  NRL_CHECK(flat.dim() == 1 && flat.numel() == layout.total && flat.is_contiguous(), "a flat buffer of ", layout.total, " elements was expected, got ",
            flat.sizes());
  const std::int64_t D = c.hidden_size, I = c.intermediate_size;
  auto view = [&](const std::string& name, std::initializer_list<std::int64_t> shape) {
    std::int64_t numel = 1;
    for (auto n : shape) numel *= n;
    return flat.narrow(0, layout.find(name).offset, numel).view(at::IntArrayRef(shape.begin(), shape.size()));
  };
  embedding = view("model.embed_tokens.weight", {c.vocab_size, D});
  for (std::int64_t l = 0; l < c.num_layers; ++l) {
    const std::string prefix = layer_prefix(l), attn = prefix + "self_attn.", mlp = prefix + "mlp.";
    LayerParameters p;
    p.input_norm = view(prefix + "input_layernorm.weight", {D});
    p.qkv_weight = view(attn + "q_proj.weight", {c.qkv_size(), D});
    if (c.qkv_bias) p.qkv_bias = view(attn + "q_proj.bias", {c.qkv_size()});
    if (c.qk_norm) {
      p.q_norm = view(attn + "q_norm.weight", {c.head_dim});
      p.k_norm = view(attn + "k_norm.weight", {c.head_dim});
    }
    p.o_weight = view(attn + "o_proj.weight", {D, c.query_size()});
    if (c.output_bias) p.o_bias = view(attn + "o_proj.bias", {D});
    p.post_norm = view(prefix + "post_attention_layernorm.weight", {D});
    p.gate_up_weight = view(mlp + "gate_proj.weight", {2 * I, D});
    if (c.mlp_bias) p.gate_up_bias = view(mlp + "gate_proj.bias", {2 * I});
    p.down_weight = view(mlp + "down_proj.weight", {D, I});
    if (c.mlp_bias) p.down_bias = view(mlp + "down_proj.bias", {D});
    layers.push_back(std::move(p));
  }
  final_norm = view("model.norm.weight", {D});
  lm_head = c.value_head ? view("score.weight", {1, D}) : c.tie_word_embeddings ? embedding : view("lm_head.weight", {c.vocab_size, D});
}

}  // namespace nemo_rl::model
