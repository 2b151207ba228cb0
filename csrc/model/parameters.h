// All parameters of a decoder in one flat buffer, which optimizer, gradient norm and weight digest process as a whole.
// Tensors that are multiplied together (q, k, v; gate, up) are adjacent. The loader, the checkpoint writer, refit and
// the tests share one table of names.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "model/config.h"

namespace nemo_rl::model {

/// One tensor of the checkpoint, named as Hugging Face names it.
struct ParameterSpec {
  std::string name;
  std::vector<std::int64_t> shape;
  std::int64_t offset = 0;  ///< in elements of the flat buffer
  std::int64_t numel = 0;
  int split = kWhole;               ///< the dimension that is split over tensor-parallel processes
  std::int64_t begin = 0;           ///< first index of this process's slice in that dimension
  std::vector<std::int64_t> whole;  ///< its shape in the checkpoint
  static constexpr int kWhole = -1;
};

/// The tensors of one layer, as views of a flat buffer, as quantised matrices (ops/weight_blocks.h) or as buffers;
/// undefined if the model has none.
struct LayerParameters {
  at::Tensor norm_before_attention;  ///< [D]
  at::Tensor qkv_weight;             ///< [(N+2K)·H, D]
  at::Tensor qkv_rest;               ///< its last rows, if a quantised model has them in more bits (LayerTensor::rest)
  at::Tensor qkv_bias;               ///< [(N+2K)·H]
  at::Tensor q_norm, k_norm;         ///< [H] each, or [N·H] and [K·H], or of the latents (LatentConfig)
  at::Tensor q_b_weight;             ///< [N·H, query_rank] of latent attention, whose first products are qkv_weight
  at::Tensor kv_b_weight;            ///< [N·(H - R + V'), rank]
  at::Tensor sinks;                  ///< [N]
  at::Tensor conv_weight;            ///< [C, W] of a recurrent layer, whose projection is qkv_weight
  at::Tensor conv_bias;              ///< [C] of Mamba-2
  at::Tensor A_log, dt_bias;         ///< [U]
  at::Tensor skip;                   ///< [U]: Mamba-2's D
  at::Tensor gated_norm;             ///< [dv], or [U·dv] in Mamba-2
  at::Tensor o_weight;               ///< [D, N·H], or [D, U·dv]
  at::Tensor o_bias;                 ///< [D]
  at::Tensor norm_after_attention;   ///< [D]
  at::Tensor norm_before_mlp;        ///< [D]
  at::Tensor gate_up_weight;         ///< [2I, D], or [I, D] of an MLP without gate
  at::Tensor gate_up_bias;           ///< [2I]
  at::Tensor down_weight;            ///< [D, I]
  at::Tensor down_bias;              ///< [D]
  at::Tensor router_scale;           ///< [D] of the norm of a router's input (experts_beside_mlp.h)
  at::Tensor router_weight;          ///< [E, D]
  at::Tensor router_bias;            ///< [E]
  at::Tensor expert_scale;           ///< [E]: multiplies the experts' weights
  at::Tensor choice_bias;            ///< [E] A of a sigmoid router, a buffer
  at::Tensor load;                   ///< [E] int64: tokens that chose each expert in backward passes, no parameter
  at::Tensor latent_down;            ///< [L, D]: the stream's projection for latent experts, which have L in place of D
  at::Tensor latent_up;              ///< [D, L]
  at::Tensor experts_gate_up;        ///< [E · 2I, D], I of an expert, or [E · I, D] without gates
  at::Tensor experts_gate_up_bias;   ///< [E · 2I]
  at::Tensor experts_down;           ///< [E · D, I]
  at::Tensor experts_down_bias;      ///< [E · D]
  at::Tensor shared_gate_weight;     ///< [1, D]
  at::Tensor shared_gate_up;         ///< [2I, D], I of the shared expert, or [I, D]
  at::Tensor shared_down;            ///< [D, I]
  at::Tensor norm_before_experts;    ///< [D] of experts beside an MLP (experts_beside_mlp.h)
  at::Tensor norm_after_experts;     ///< [D]
  at::Tensor norm_after_shared;      ///< [D]
  at::Tensor norm_after_mlp;         ///< [D]
  at::Tensor per_layer_gate;         ///< [P, D] (per_layer_input.h)
  at::Tensor per_layer_projection;   ///< [D, P]
  at::Tensor norm_after_per_layer;   ///< [D]
  at::Tensor layer_scalar;           ///< [1] A, a buffer
};

/// Rows [begin, begin + count) of a matrix of a layer.
struct MatrixRows {
  MatrixRows(at::Tensor LayerParameters::* field) : field(field) {}  // NOLINT(google-explicit-constructor): all rows
  MatrixRows(at::Tensor LayerParameters::* field, std::int64_t begin, std::int64_t count)
      : field(field), begin(begin), count(count) {}
  bool operator==(const MatrixRows&) const = default;
  /// These rows of `layer`; undefined if the matrix is.
  at::Tensor of(const LayerParameters& layer) const {
    const auto& all = layer.*field;
    return count == kAll || !all.defined() ? all : all.narrow(0, begin, count);
  }
  at::Tensor LayerParameters::* field;
  std::int64_t begin = 0, count = kAll;
  static constexpr std::int64_t kAll = -1;
};

/// A value for each of some matrices of a layer, in the order in which they were added.
template <class T>
class ByMatrix {
 public:
  struct OfMatrix {
    MatrixRows matrix;
    T of;
  };
  std::vector<OfMatrix>& all() { return all_; }
  const std::vector<OfMatrix>& all() const { return all_; }
  /// Returns the matrix's value, which is added if there is none.
  T& operator[](const MatrixRows& matrix) {
    const auto [found, is_new] = places_.try_emplace(matrix, all_.size());
    if (is_new) all_.push_back({matrix, {}});
    return all_[found->second].of;
  }
  /// nullptr: the matrix has none.
  const T* find(const MatrixRows& matrix) const {
    const auto found = places_.find(matrix);
    return found == places_.end() ? nullptr : &all_[found->second].of;
  }

 private:
  struct Hash {  // a pointer to a member has no hash; a layer has few fields
    std::size_t operator()(const MatrixRows& m) const { return std::hash<std::int64_t>()(m.begin); }
  };
  std::vector<OfMatrix> all_;
  std::unordered_map<MatrixRows, std::size_t, Hash> places_;
};

/// One tensor of a layer: its field in LayerParameters, and the tensors of the checkpoint that it joins.
struct LayerTensor {
  struct Part {
    std::string name;  ///< without the prefix "model.layers.N."
    std::int64_t rows;
  };
  at::Tensor LayerParameters::* field;
  std::vector<Part> parts;
  std::int64_t columns = 0;           ///< 0: a vector
  int split = ParameterSpec::kWhole;  ///< as in ParameterSpec
  bool takes_adapters = true;
  std::string experts_module;  ///< of experts' matrices: the module of all their adapters; empty: each part has its own
  bool is_depthwise = false;   ///< [rows, 1, columns] in the checkpoint: a depthwise convolution
  bool is_buffer = false;      ///< a vector that is not trained, in A
  std::int64_t rest = 0;       ///< last parts of qkv_weight that a quantised model has in qkv_rest, in the compute type
  bool in_8_bits = false;      ///< or in q8_0, and only in a model of 4 bits
};
/// Whether the tensor lies outside the flat buffer: a quantised matrix (ModelConfig::quantization) or a buffer.
bool lies_outside(const ModelConfig& config, const LayerTensor& tensor);
/// Returns all tensors of layer `l`, in the order of their memory. Names are defined only here and in the classes of
/// mixers and MLPs.
std::vector<LayerTensor> layer_tensors(const ModelConfig& config, std::int64_t l);

/// One adapter: it changes rows [begin, begin + rows) of `matrix`, which is a matrix of a layer or that of one expert.
struct AdapterSpec {
  std::int64_t layer = 0;
  MatrixRows matrix;
  std::int64_t begin = 0, rows = 0, columns = 0;
  std::size_t a = 0, b = 0;             ///< indices in ParameterLayout::specs
  std::int64_t dim = 0, first_row = 0;  ///< A and B are rows [first_row, first_row + dim) of these tensors
};

struct DecoderParameters;

/// One quantised matrix of the checkpoint: rows [begin, begin + shape[0]) of a matrix of a layer, or the embedding or
/// LM head; or one buffer.
struct BlockSpec {
  std::string name;
  std::vector<std::int64_t> shape;  ///< [rows, columns], or [rows] of a buffer
  std::int64_t layer = 0;
  at::Tensor LayerParameters::* matrix = nullptr;
  std::int64_t begin = 0;
  std::size_t before = 0;                                ///< which of ParameterLayout::specs it would come before
  at::Tensor DecoderParameters::* vocabulary = nullptr;  ///< embedding or LM head, in place of a layer's matrix
};

/// Names, shapes and offsets. Parameters start at multiples of 64 elements, except within fused tensors.
struct ParameterLayout {
  explicit ParameterLayout(const ModelConfig& config);
  /// The layout of the parameters that are trained with adapters: A and B of every target, and the value head if there
  /// is one. B is stored transposed, [dim, out], so that all matrix products have a few rows instead of a few columns.
  /// The A of adjacent matrices are adjacent, too. The experts of a layer are one target, whose tensors join those of
  /// all experts: A [experts · dim, in], and B [experts · dim, out]. Gate and up of an expert share A. Throws
  /// ArgumentError for a target that the model does not have, and if there is no target.
  ParameterLayout(const ModelConfig& config, const LoraConfig& lora);
  std::vector<ParameterSpec> specs;
  std::vector<BlockSpec> blocks;      ///< what lies outside the flat buffer, by layer and tensor
  std::vector<AdapterSpec> adapters;  ///< in the order of layers and matrices
  std::int64_t total = 0;             ///< length of the flat buffer, gaps included (they stay zero)
  const ParameterSpec& find(const std::string& name) const;
  /// The scalar head of a critic; nullptr: there is none.
  const ParameterSpec* value_head() const;

 private:
  void index();
  std::unordered_map<std::string, std::size_t> by_name_;
};

/// A decoder's parameters as views of a flat buffer (weights, a rounded copy of them, or their gradients).
struct DecoderParameters {
  DecoderParameters() = default;
  /// Quantised matrices and buffers are left undefined.
  DecoderParameters(const ModelConfig& config, const ParameterLayout& layout, at::Tensor flat);
  /// Allocates the tensors of layout.blocks and the loads of sigmoid routers, filled with zeros.
  void add_blocks(const ModelConfig& config);
  at::Tensor flat;       ///< [layout.total]
  at::Tensor blocks;     ///< the memory of all quantised matrices; undefined without
  at::Tensor embedding;  ///< [V, D]
  std::vector<LayerParameters> layers;
  at::Tensor per_layer_embedding;   ///< [V, L·P], of all L layers; undefined if there are no per-layer inputs
  at::Tensor per_layer_projection;  ///< [L·P, D]
  at::Tensor per_layer_norm;        ///< [P]
  at::Tensor final_norm;            ///< [D]
  at::Tensor lm_head;               ///< [V, D] (the embedding if tied), or the value head [1, D]
};

}  // namespace nemo_rl::model
