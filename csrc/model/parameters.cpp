#include "model/parameters.h"

#include <algorithm>
#include <array>
#include <set>
#include <stdexcept>

#include "common/check.h"
#include "model/mixer.h"
#include "model/mlp.h"
#include "model/per_layer_input.h"
#include "runtime/large_tensor.h"
#include "runtime/tensor.h"

namespace nemo_rl::model {
namespace {

constexpr std::int64_t kAlignment = 64;  // elements: a cache line of bfloat16 and more
constexpr auto kEmbedding = "model.embed_tokens.weight", kFinalNorm = "model.norm.weight", kLmHead = "lm_head.weight",
               kValueHead = "score.weight", kPerLayerEmbedding = "model.embed_tokens_per_layer.weight",
               kPerLayerProjection = "model.per_layer_model_projection.weight",
               kPerLayerNorm = "model.per_layer_projection_norm.weight", kLoraA = ".lora_A.weight",
               kLoraB = ".lora_B.weight";

class LayoutBuilder {
 public:
  explicit LayoutBuilder(ParameterLayout& layout) : layout_(layout) {}
  void align() { layout_.total = (layout_.total + kAlignment - 1) / kAlignment * kAlignment; }
  /// Starts at the next aligned offset.
  void add(const std::string& name, std::vector<std::int64_t> shape) {
    align();
    append(name, shape, shape, ParameterSpec::kWhole, 0);
  }
  /// Rows [rows.begin, rows.end) of a matrix [V, columns].
  void add_vocabulary(const std::string& name, VocabRows rows, std::int64_t V, std::int64_t columns) {
    align();
    append(name, {rows.size(), columns}, {V, columns}, rows.size() < V ? 0 : ParameterSpec::kWhole, rows.begin);
  }
  /// Directly behind the one before: the two are used as one matrix.
  void append(const std::string& name, std::vector<std::int64_t> shape, std::vector<std::int64_t> whole, int split,
              std::int64_t begin) {
    std::int64_t numel = 1;
    for (auto n : shape) numel *= n;
    layout_.specs.push_back({name, std::move(shape), layout_.total, numel, split, begin, std::move(whole)});
    layout_.total += numel;
  }

 private:
  ParameterLayout& layout_;
};

std::string layer_prefix(std::int64_t layer) { return "model.layers." + std::to_string(layer) + "."; }

std::int64_t rows_of(const LayerTensor& tensor) {
  std::int64_t rows = 0;
  for (const auto& part : tensor.parts) rows += part.rows;
  return rows;
}

/// The name that Phi 3 has for the matrix of q, k and v, or of gate and up, which a target has that wants one adapter
/// for all of it; empty: the tensor is none of these.
std::string joined_name(const LayerTensor& tensor) {
  auto name = tensor.parts.front().name;
  if (tensor.parts.size() == 1) return {};
  for (const auto& [part, joined] : {std::pair{".q_proj.", ".qkv_proj."}, std::pair{".gate_proj.", ".gate_up_proj."}})
    if (const auto at = name.find(part); at != std::string::npos)
      return name.replace(at, std::string_view(part).size(), joined);
  return {};
}

std::vector<std::int64_t> shape_of(std::int64_t rows, std::int64_t columns) {
  return columns > 0 ? std::vector{rows, columns} : std::vector{rows};
}

}  // namespace

std::vector<LayerTensor> layer_tensors(const ModelConfig& c, std::int64_t l) {
  using P = LayerParameters;
  std::vector<LayerTensor> all;
  const auto norm = [&](const std::string& name, at::Tensor P::* field) {
    if (!name.empty()) all.push_back({field, {{name + ".weight", c.hidden_size}}});
  };
  const auto add = [&](std::vector<LayerTensor> tensors) {
    for (auto& tensor : tensors) {
      if (c.slice.size == 1) tensor.split = ParameterSpec::kWhole;
      all.push_back(std::move(tensor));
    }
  };
  if (const auto mixer = mixer_of(c, l)) {
    norm(c.norms.before_attention, &P::norm_before_attention);
    add(mixer->tensors());
    norm(c.norms.after_attention, &P::norm_after_attention);
  }
  if (const auto mlp = mlp_of(c, l)) {
    norm(c.norms.before_mlp, &P::norm_before_mlp);
    add(mlp->tensors());
    norm(c.norms.after_mlp, &P::norm_after_mlp);
  }
  if (c.per_layer_input > 0) {
    add(PerLayerInput::tensors(c));
    norm(c.norms.after_per_layer, &P::norm_after_per_layer);
  }
  if (c.layer_scalars) {
    all.push_back({&P::layer_scalar, {{"layer_scalar", 1}}});
    all.back().is_buffer = true;
  }
  return all;
}

bool lies_outside(const ModelConfig& c, const LayerTensor& tensor) {
  using P = LayerParameters;
  constexpr std::array kFields{&P::qkv_weight,     &P::q_b_weight,  &P::kv_b_weight,     &P::o_weight,
                               &P::gate_up_weight, &P::down_weight, &P::experts_gate_up, &P::experts_down,
                               &P::shared_gate_up, &P::shared_down, &P::per_layer_gate,  &P::per_layer_projection};
  const bool is_quantised = tensor.in_8_bits || std::ranges::find(kFields, tensor.field) != kFields.end();
  return tensor.is_buffer || (c.quantization && is_quantised);
}

namespace {

/// The tensors of layer `l` as the model stores them: a quantised qkv_weight ends before the parts in qkv_rest.
std::vector<LayerTensor> stored_tensors(const ModelConfig& c, std::int64_t l) {
  std::vector<LayerTensor> all;
  for (auto& tensor : layer_tensors(c, l)) {
    auto& parts = tensor.parts;
    const bool has_rest = c.quantization && !(tensor.in_8_bits && c.quantization == kernels::BlockFormat::q8_0);
    const auto first = parts.end() - (has_rest ? tensor.rest : 0);
    LayerTensor rest{&LayerParameters::qkv_rest, std::vector<LayerTensor::Part>(first, parts.end()), tensor.columns};
    rest.in_8_bits = tensor.in_8_bits;
    parts.erase(first, parts.end());
    all.push_back(std::move(tensor));
    if (!rest.parts.empty()) all.push_back(std::move(rest));
  }
  return all;
}

void check_columns(const std::string& name, std::int64_t columns) {
  NRL_CHECK_ARG(columns % kernels::kBlockTerms == 0, "a quantised matrix has a multiple of ", kernels::kBlockTerms,
                " columns, and ", name, " has ", columns);
}

}  // namespace

ParameterLayout::ParameterLayout(const ModelConfig& c) {
  NRL_CHECK_ARG(!c.quantization || c.slice.size == 1, "a quantised model is not split into slices");
  LayoutBuilder b(*this);
  const auto add_vocabulary = [&](const std::string& name, at::Tensor DecoderParameters::* matrix, std::int64_t width) {
    if (!c.vocabulary_quantization()) return b.add_vocabulary(name, c.vocab_rows(), c.vocab_size, width);
    check_columns(name, width);
    blocks.push_back({name, {c.vocab_size, width}, 0, nullptr, 0, specs.size(), matrix});
  };
  add_vocabulary(kEmbedding, &DecoderParameters::embedding, c.hidden_size);
  if (const auto columns = c.num_layers() * c.per_layer_input; columns > 0) {
    add_vocabulary(kPerLayerEmbedding, &DecoderParameters::per_layer_embedding, columns);
    b.add(kPerLayerProjection, {columns, c.hidden_size});
    b.add(kPerLayerNorm, {c.per_layer_input});
  }
  for (std::int64_t l = 0; l < c.num_layers(); ++l)
    for (const auto& tensor : stored_tensors(c, l)) {
      if (lies_outside(c, tensor)) {
        check_columns(tensor.parts.front().name, tensor.columns);
        std::int64_t begin = 0;
        for (const auto& part : tensor.parts) {
          blocks.push_back(
              {layer_prefix(l) + part.name, shape_of(part.rows, tensor.columns), l, tensor.field, begin, specs.size()});
          begin += part.rows;
        }
        continue;
      }
      b.align();
      for (const auto& part : tensor.parts) {
        auto shape = shape_of(part.rows, tensor.columns);
        if (tensor.is_depthwise) shape.insert(shape.begin() + 1, 1);
        auto whole = shape;
        std::int64_t begin = 0;
        if (tensor.split != ParameterSpec::kWhole) {
          auto& extent = whole[static_cast<std::size_t>(tensor.split)];
          begin = c.slice.rank * extent;
          extent *= c.slice.size;
        }
        b.append(layer_prefix(l) + part.name, std::move(shape), std::move(whole), tensor.split, begin);
      }
    }
  b.add(kFinalNorm, {c.hidden_size});
  if (c.value_head) {
    b.add(kValueHead, {1, c.hidden_size});
  } else if (!c.tie_word_embeddings) {
    add_vocabulary(kLmHead, &DecoderParameters::lm_head, c.hidden_size);
  }
  b.align();
  index();
}

ParameterLayout::ParameterLayout(const ModelConfig& c, const LoraConfig& lora) {
  NRL_CHECK_ARG(lora.dim >= 1 && !lora.targets.empty(), "adapters need a dim of at least 1 and a matrix, got dim ",
                lora.dim, " and ", lora.targets.size(), " matrices");
  const std::set<std::string> wanted(lora.targets.begin(), lora.targets.end());
  NRL_CHECK_ARG(wanted.size() == lora.targets.size(), "a matrix has one adapter, but a target is named twice");
  auto unknown = wanted;
  LayoutBuilder b(*this);
  const auto add = [&](const std::string& name, const char* which, std::int64_t size, bool is_split) {
    auto whole = size;
    if (is_split) whole *= c.slice.size;
    b.append(name.substr(0, name.rfind('.')) + which, {lora.dim, size}, {lora.dim, whole},
             is_split ? 1 : ParameterSpec::kWhole, is_split ? c.slice.rank * size : 0);
  };
  const auto add_experts = [&](std::int64_t l, const LayerTensor& tensor) {
    const std::int64_t count = c.experts.count, rows = rows_of(tensor) / count, all = count * lora.dim;
    const std::string module = layer_prefix(l) + tensor.experts_module;
    for (std::int64_t e = 0; e < count; ++e)
      adapters.push_back({l,
                          {tensor.field, e * rows, rows},
                          0,
                          rows,
                          tensor.columns,
                          specs.size(),
                          specs.size() + 1,
                          lora.dim,
                          e * lora.dim});
    b.align();
    b.append(module + kLoraA, {all, tensor.columns}, {all, tensor.columns}, ParameterSpec::kWhole, 0);
    b.append(module + kLoraB, {all, rows}, {all, rows}, ParameterSpec::kWhole, 0);
  };
  for (std::int64_t l = 0; l < c.num_layers(); ++l)
    for (const auto& tensor : layer_tensors(c, l)) {
      if (tensor.columns == 0 || !tensor.takes_adapters) continue;
      if (!tensor.experts_module.empty()) {
        const auto& module = tensor.experts_module;
        const auto name = layer_prefix(l) + module.substr(0, module.find(".base_layer")) + ".weight";
        if (!wanted.contains(name)) continue;
        unknown.erase(name);
        add_experts(l, tensor);
        continue;
      }
      std::vector<std::string> names;
      std::int64_t begin = 0;
      const std::size_t first = adapters.size();
      const auto take = [&](const std::string& part, std::int64_t from, std::int64_t rows) {
        if (unknown.erase(layer_prefix(l) + part) == 0) return;
        names.push_back(layer_prefix(l) + part);
        adapters.push_back({l, tensor.field, from, rows, tensor.columns, 0, 0, lora.dim});
      };
      take(joined_name(tensor), 0, rows_of(tensor));
      for (const auto& part : tensor.parts) {
        take(part.name, begin, part.rows);
        begin += part.rows;
      }
      b.align();
      for (std::size_t i = 0; i < names.size(); ++i) {
        adapters[first + i].a = specs.size();
        add(names[i], kLoraA, tensor.columns, tensor.split == 1);
      }
      for (std::size_t i = 0; i < names.size(); ++i) {
        adapters[first + i].b = specs.size();
        add(names[i], kLoraB, adapters[first + i].rows, tensor.split == 0);
      }
    }
  NRL_CHECK_ARG(unknown.empty(), "no matrix of a layer is named ", unknown.empty() ? "" : *unknown.begin());
  if (c.value_head) b.add(kValueHead, {1, c.hidden_size});
  b.align();
  index();
}

const ParameterSpec* ParameterLayout::value_head() const {
  const auto found = std::ranges::find(specs, kValueHead, &ParameterSpec::name);
  return found == specs.end() ? nullptr : &*found;
}

void ParameterLayout::index() {
  for (std::size_t i = 0; i < specs.size(); ++i) by_name_.emplace(specs[i].name, i);
}

const ParameterSpec& ParameterLayout::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) throw std::runtime_error("no parameter is named " + name);
  return specs[found->second];
}

DecoderParameters::DecoderParameters(const ModelConfig& c, const ParameterLayout& layout, at::Tensor flat_buffer)
    : flat(std::move(flat_buffer)) {
  NRL_CHECK(flat.dim() == 1 && flat.numel() == layout.total && flat.is_contiguous(), "a flat buffer of ", layout.total,
            " elements was expected, got ", flat.sizes());
  const auto view = [&](const std::string& first, const std::vector<std::int64_t>& shape) {
    std::int64_t numel = 1;
    for (auto n : shape) numel *= n;
    return flat.narrow(0, layout.find(first).offset, numel).view(shape);
  };
  const std::int64_t vocab = c.vocab_rows().size();
  const auto vocabulary = [&](const char* name, std::int64_t columns) {
    return c.vocabulary_quantization() ? at::Tensor() : view(name, {vocab, columns});
  };
  embedding = vocabulary(kEmbedding, c.hidden_size);
  if (const auto columns = c.num_layers() * c.per_layer_input; columns > 0) {
    per_layer_embedding = vocabulary(kPerLayerEmbedding, columns);
    per_layer_projection = view(kPerLayerProjection, {columns, c.hidden_size});
    per_layer_norm = view(kPerLayerNorm, {c.per_layer_input});
  }
  layers.resize(static_cast<std::size_t>(c.num_layers()));
  for (std::int64_t l = 0; l < c.num_layers(); ++l)
    for (const auto& tensor : stored_tensors(c, l)) {
      if (lies_outside(c, tensor)) continue;
      layers[static_cast<std::size_t>(l)].*tensor.field =
          view(layer_prefix(l) + tensor.parts.front().name, shape_of(rows_of(tensor), tensor.columns));
    }
  final_norm = view(kFinalNorm, {c.hidden_size});
  lm_head = c.value_head            ? view(kValueHead, {1, c.hidden_size})
            : c.tie_word_embeddings ? embedding
                                    : vocabulary(kLmHead, c.hidden_size);
}

void DecoderParameters::add_blocks(const ModelConfig& c) {
  const auto sums = flat.options().dtype(flat.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  for (std::int64_t l = 0; l < c.num_layers(); ++l)
    for (const auto& tensor : stored_tensors(c, l))
      if (tensor.is_buffer) {
        auto& layer = layers[static_cast<std::size_t>(l)];
        layer.*tensor.field = at::zeros({tensor.parts.front().rows}, sums);
        if (tensor.field == &LayerParameters::choice_bias)
          layer.load = at::zeros({tensor.parts.front().rows}, sums.dtype(at::kLong).device(at::kCPU));
      }
  if (!c.quantization) return;
  constexpr std::int64_t kLine = 64;
  const auto for_matrices = [&](const auto& f) {  // f(matrix, rows, bytes of a row, offset), returns where all end
    std::int64_t end = 0;
    const auto add = [&](at::Tensor& matrix, kernels::BlockFormat format, std::int64_t rows, std::int64_t columns) {
      f(matrix, rows, kernels::block_row_bytes(format, columns), end);
      end += (kernels::block_matrix_bytes(format, rows, columns) + kLine - 1) / kLine * kLine;
    };
    if (const auto format = c.vocabulary_quantization()) {
      add(embedding, *format, c.vocab_size, c.hidden_size);
      if (c.per_layer_input > 0) add(per_layer_embedding, *format, c.vocab_size, c.num_layers() * c.per_layer_input);
      if (!c.tie_word_embeddings && !c.value_head) add(lm_head, *format, c.vocab_size, c.hidden_size);
    }
    for (std::int64_t l = 0; l < c.num_layers(); ++l)
      for (const auto& tensor : stored_tensors(c, l)) {
        if (!lies_outside(c, tensor) || tensor.is_buffer) continue;
        const bool is_rest = tensor.field == &LayerParameters::qkv_rest;
        add(layers[static_cast<std::size_t>(l)].*tensor.field, is_rest ? kernels::BlockFormat::q8_0 : *c.quantization,
            rows_of(tensor), tensor.columns);
      }
    return end;
  };
  const std::int64_t total = for_matrices([](const auto&...) {});
  // one buffer: a matrix alone may be smaller than a huge page
  blocks = runtime::zeros_large({total}, flat.options().dtype(at::kByte));
  for_matrices([&](at::Tensor& matrix, std::int64_t rows, std::int64_t bytes, std::int64_t offset) {
    matrix = blocks.narrow(0, offset, rows * bytes).view({rows, bytes});
  });
  if (c.vocabulary_quantization() && c.tie_word_embeddings && !c.value_head) lm_head = embedding;
}

}  // namespace nemo_rl::model
