// A mixture of experts as the MLP of a layer (ExpertsConfig). The tokens of an expert are computed in one matrix
// product, but each result row depends only on its own input row, and a token's experts are summed in the order in
// which the router has chosen them. So the result of a token is bit-identical whichever other tokens chose its experts.
// The backward pass recomputes the router's choice bit for bit.
#pragma once
#include "model/mlp.h"
#include "ops/experts.h"

namespace nemo_rl::model {

class Experts : public Mlp {  // ExpertsBesideMlp overrides what the two do differently
 public:
  explicit Experts(const ModelConfig& config);
  std::vector<LayerTensor> tensors() const override;
  Kept kept() const override;
  void pack(const LayerWeights& w, ops::PackedWeights& packed) const override;
  void ask_ahead(const LayerWeights& w) const override;
  void forward(const LayerWeights& w, const at::Tensor& x, const at::Tensor& y, bool accumulate,
               const LayerActivations& a, Workspace& workspace) const override;
  void backward(const LayerWeights& w, const std::function<at::Tensor()>& x, const at::Tensor& dy,
                const LayerActivations& a, const at::Tensor& d_x, const LayerGradients& grads, Workspace& workspace,
                ops::ExpertBalance* balance) const override;

 protected:
  struct Routes {
    at::Tensor logits;  ///< [T, E] A
    at::Tensor expert;  ///< [T, k]
    at::Tensor chosen;  ///< [T, k] A: the router's weights
    at::Tensor weight;  ///< [T, k] A: the same times expert_scale, if there is one
    ops::ExpertGroups groups;
  };
  Routes route(const LayerWeights& w, const at::Tensor& x, at::ScalarType sums, Workspace& workspace) const;
  at::Tensor latent_input(const LayerWeights& w, const at::Tensor& x, Workspace& workspace) const;
  void forward_experts(const LayerWeights& w, const at::Tensor& x, const Routes& routes, const at::Tensor& y,
                       bool accumulate, const LayerActivations& a, Workspace& workspace) const;
  at::Tensor backward_experts(const LayerWeights& w, const at::Tensor& x, const Routes& routes, const at::Tensor& dy,
                              const LayerActivations& a, const at::Tensor& d_x, const LayerGradients& grads,
                              Workspace& workspace) const;
  void forward_shared(const LayerWeights& w, const at::Tensor& x, const at::Tensor& y, const LayerActivations& a,
                      Workspace& workspace) const;
  void backward_router(const LayerWeights& w, const at::Tensor& x, const Routes& routes, const at::Tensor& d_weight,
                       const at::Tensor& d_x, bool accumulate, const LayerGradients& grads, Workspace& workspace,
                       ops::ExpertBalance* balance) const;
  void backward_shared(const LayerWeights& w, const at::Tensor& x, const at::Tensor& dy, const LayerActivations& a,
                       const at::Tensor& d_x, bool accumulate, const LayerGradients& grads, Workspace& workspace) const;

  ModelConfig c_;
  ExpertsConfig e_;

 private:
  template <class F>
  void for_each_expert(const ops::ExpertGroups& groups, const F& f) const;
  at::Tensor shared_gate(const LayerWeights& w, const at::Tensor& x, const at::TensorOptions& sums) const;
  void add_shared(const LayerWeights& w, const at::Tensor& x, const at::Tensor& y, const LayerActivations& a,
                  Workspace& workspace) const;
  void backward_down_bias(const LayerWeights& w, const at::Tensor& dy_rows, const at::Tensor& weight,
                          const ops::ExpertGroups& groups, const at::Tensor& d_weight, const at::Tensor& d_bias,
                          Workspace& workspace) const;
  /// Columns that an expert reads and writes.
  std::int64_t width() const { return e_.latent_size > 0 ? e_.latent_size : c_.hidden_size; }
  /// Rows of an expert's first matrix.
  std::int64_t up_rows() const;
  /// The matrices of expert `e`.
  MatrixRows gate_up(std::int64_t e) const;
  MatrixRows down(std::int64_t e) const;
};

}  // namespace nemo_rl::model
