// What a mixture of experts does around its products: it chooses experts for tokens, brings the tokens of an expert
// together, and adds up what a token gets. Every result for a token depends on that token alone, bit for bit. Tensors
// are contiguous, all on the CPU or on one CUDA device.
//
// Letters: T tokens, E experts, k experts of a token. A pair (token, its j-th expert) has the number token · k + j.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "kernels/experts.h"
#include "runtime/cuda_dispatch.h"

namespace nemo_rl::ops {

/// Chooses the k experts of the highest logits [T, E] A, of equal ones those with the lower number: expert [T, k] int64
/// in descending order, and weight [T, k] A, softmax over all logits or, with `renormalise`, over the chosen ones.
void route_tokens(const at::Tensor& logits, bool renormalise, const at::Tensor& expert, const at::Tensor& weight);

/// d_logits [T, E] A from d_weight [T, k] A of that choice.
void route_tokens_backward(const at::Tensor& logits, bool renormalise, const at::Tensor& expert,
                           const at::Tensor& weight, const at::Tensor& d_weight, const at::Tensor& d_logits);

/// A loss that balances the experts over each sequence (Megatron-LM's seq_aux_loss). Of a sequence of T tokens, of
/// which n_e have chosen expert e, in one layer: coefficient · E / (k · T²) · sum over e of n_e · (sum over its tokens
/// of p_e), with p the softmax over all logits. n_e has no gradient.
struct ExpertBalance {
  double coefficient = 0;
  std::vector<std::int64_t> begin;  ///< [sequences + 1]: the rows where sequences begin, and the number of rows
  double loss = 0;                  ///< each call adds the loss of all sequences
};

/// d_logits [T, E] A += the gradient of that loss; expert [T, k] is the choice of route_tokens. On the CPU.
void balance_experts(const at::Tensor& logits, const at::Tensor& expert, ExpertBalance& balance,
                     const at::Tensor& d_logits);

using kernels::SigmoidRouter;

/// Chooses the k experts of the highest score + bias, as route_tokens does; bias [E] A. A group's value is the sum of
/// its two highest. weight = scale · score, or scale · score / (the sum of the chosen scores + epsilon).
void route_tokens_by_sigmoid(const at::Tensor& logits, const at::Tensor& bias, const SigmoidRouter& router,
                             const at::Tensor& expert, const at::Tensor& weight);

/// d_logits [T, E] A from d_weight [T, k] A of that choice. The bias has no gradient.
void route_tokens_by_sigmoid_backward(const at::Tensor& logits, const SigmoidRouter& router, const at::Tensor& expert,
                                      const at::Tensor& weight, const at::Tensor& d_weight, const at::Tensor& d_logits);

/// gate = sigmoid(logit), and in place of d_gate the gradient of the logit; all [T] A.
void sigmoid_gate(const at::Tensor& logit, const at::Tensor& gate);
void sigmoid_gate_backward(const at::Tensor& gate, const at::Tensor& d_gate);

/// The pairs sorted by expert; those of one expert in the order of the pairs.
struct ExpertGroups {
  std::vector<std::int64_t> begin;  ///< [E + 1]: where each expert's rows begin
  at::Tensor pair;                  ///< [T · k] int64: which pair lies in each row
  at::Tensor token;                 ///< [T · k] int64: which token that is
  at::Tensor row;                   ///< [T · k] int64: in which row each pair lies
};
ExpertGroups group_by_expert(const at::Tensor& expert, std::int64_t num_experts);
/// The same by a stable sort, on any device: how group_by_expert runs on CUDA. The host waits for the device once, for
/// `begin`.
ExpertGroups group_by_sorting(const at::Tensor& expert, std::int64_t num_experts);

/// y[t] (+)= sum over j of weight[t, j] · rows[row[t · k + j]], j = 0 first, one sum before it is added. rows [T · k,
/// D] A, weight [T, k] A or undefined: 1; row undefined: each pair lies in the row of its number.
void add_up_experts(const at::Tensor& rows, const at::Tensor& row, const at::Tensor& weight, std::int64_t k,
                    const at::Tensor& y, bool accumulate);

/// out[r] A = a[r] · b[r] for rows [R, C] S.
void row_products(const at::Tensor& a, const at::Tensor& b, const at::Tensor& out);

/// x[r] *= factor[r] A for rows [R, C] S.
void scale_rows(const at::Tensor& x, const at::Tensor& factor);

extern runtime::CudaSlot<decltype(route_tokens)> route_tokens_cuda;
extern runtime::CudaSlot<decltype(route_tokens_backward)> route_tokens_backward_cuda;
extern runtime::CudaSlot<decltype(route_tokens_by_sigmoid)> route_tokens_by_sigmoid_cuda;
extern runtime::CudaSlot<decltype(route_tokens_by_sigmoid_backward)> route_tokens_by_sigmoid_backward_cuda;
extern runtime::CudaSlot<decltype(add_up_experts)> add_up_experts_cuda;
extern runtime::CudaSlot<decltype(row_products)> row_products_cuda;

}  // namespace nemo_rl::ops
