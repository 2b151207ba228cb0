// A mixture of experts as the MLP of a layer (ExpertsConfig). The tokens of an expert are multiplied together, but a
// row of a product depends on its own row alone, and a token adds up its experts in the order of its router's logits.
// So a token's bits do not depend on who else chose its experts. The backward computes the router's choice again from
// the same bits.
#pragma once
#include "model/mlp.h"
#include "ops/experts.h"

namespace nemo_rl::model {

class Experts : public Mlp {
 public:
  explicit Experts(const ModelConfig& config);
  std::vector<LayerTensor> tensors() const override;
  Kept kept() const override;
  void pack(const LayerParameters& p, ops::PackedWeights& packed) const override;
  void ask_ahead(const LayerParameters& p, const ops::PackedWeights* packed) const override;
  void forward(const LayerParameters& p, const at::Tensor& x, const at::Tensor& y, bool accumulate,
               const LayerActivations& a, const MlpScratch& s) const override;
  void backward(const LayerParameters& p, const std::function<at::Tensor()>& x, const at::Tensor& dy,
                const LayerActivations& a, const at::Tensor& d_x, const LayerGradients& grads,
                Workspace& workspace) const override;

 private:
  struct Routes {
    at::Tensor logits;  ///< [T, E] A
    at::Tensor expert;  ///< [T, k]
    at::Tensor weight;  ///< [T, k] A
    ops::ExpertGroups groups;
  };
  Routes route(const LayerParameters& p, const at::Tensor& x, at::ScalarType sums, Workspace& workspace) const;
  template <class F>
  void for_each_expert(const ops::ExpertGroups& groups, const F& f) const;
  void forward_shared(const LayerParameters& p, const at::Tensor& x, const at::Tensor& y, const LayerActivations& a,
                      const MlpScratch& s) const;
  void backward_router(const LayerParameters& p, const at::Tensor& x, const Routes& routes, const at::Tensor& d_weight,
                       const at::Tensor& d_x, const LayerGradients& grads, Workspace& workspace) const;
  void backward_shared(const LayerParameters& p, const at::Tensor& x, const at::Tensor& dy, const LayerActivations& a,
                       const at::Tensor& d_x, const LayerGradients& grads, Workspace& workspace) const;
  /// Of expert `e` its matrix in one of these tensors.
  at::Tensor gate_up_of(const at::Tensor& all, std::int64_t e) const;
  at::Tensor down_of(const at::Tensor& all, std::int64_t e) const;

  ModelConfig c_;
  ExpertsConfig e_;
};

}  // namespace nemo_rl::model
