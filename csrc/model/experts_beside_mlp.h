// A layer with an MLP and a mixture of experts beside it (Gemma 4). Both read the residual stream h, and each has a
// norm before and a norm after it:
//   y = norm_after_shared(mlp(norm_before_mlp(h))) + norm_after_experts(experts(norm_before_experts(h)))
// The router reads the norm of h with the weight router_scale, divided by sqrt(D). Among the experts' tensors the MLP
// is the shared expert.
#pragma once
#include "model/experts.h"

namespace nemo_rl::model {

class ExpertsBesideMlp final : public Experts {
 public:
  using Experts::Experts;
  std::vector<LayerTensor> tensors() const override;
  Kept kept() const override;
  bool reads_stream() const override { return true; }
  /// `accumulate` is false, as a norm follows.
  void forward(const LayerWeights& w, const at::Tensor& h, const at::Tensor& y, bool accumulate,
               const LayerActivations& a, Workspace& workspace) const override;
  void backward(const LayerWeights& w, const std::function<at::Tensor()>& h, const at::Tensor& dy,
                const LayerActivations& a, const at::Tensor& d_h, const LayerGradients& grads, Workspace& workspace,
                ops::ExpertBalance* balance) const override;

 private:
  at::Tensor normalised(const at::Tensor& h, const at::Tensor& weight, const at::Tensor& rstd,
                        Workspace& workspace) const;
  at::Tensor router_input(const LayerWeights& w, const at::Tensor& h, Workspace& workspace) const;
};

}  // namespace nemo_rl::model
