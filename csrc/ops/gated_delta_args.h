// Tensors of a recurrent layer as the arguments of its kernels. Private to ops/gated_delta*.cpp.
#pragma once
#include "kernels/gated_delta.h"
#include "kernels/gated_norm.h"
#include "ops/gated_delta.h"
#include "ops/kernel_types.h"

namespace nemo_rl::ops {

/// Columns of a row of qkv where queries, keys and values begin.
struct RecurrentColumns {
  explicit RecurrentColumns(const RecurrentShape& s)
      : q(s.is_mamba2() ? s.value_size() + s.key_size() : 0),
        k(s.is_mamba2() ? s.value_size() : s.key_size()),
        v(s.is_mamba2() ? 0 : 2 * s.key_size()) {}
  std::int64_t q, k, v;
};

template <class T>
kernels::RecurrenceArgs<T> recurrence_args(const RecurrenceInputs& in, const RecurrentShape& s) {
  const T* const qkv = ptr<T>(in.qkv);
  const RecurrentColumns at(s);
  return {qkv + at.q,
          qkv + at.k,
          qkv + at.v,
          in.qkv.stride(0),
          in.b.defined() ? ptr<T>(in.b) : nullptr,
          ptr<T>(in.a),
          in.a.stride(0),
          ptr<T>(in.A_log),
          ptr<T>(in.dt_bias),
          in.D.defined() ? ptr<T>(in.D) : nullptr,
          s};
}

/// shares [3, T, U]: what each row adds to the gradients of A_log, dt_bias and D.
template <class T>
kernels::RecurrenceGradients<T> recurrence_gradients(const at::Tensor& d_out, const RecurrenceInputs& d,
                                                     const RecurrentShape& s, accumulate_t<T>* shares) {
  T* const d_qkv = mutable_ptr<T>(d.qkv);
  const RecurrentColumns at(s);
  const std::int64_t each = d_out.size(0) * s.value_heads;
  return {ptr<T>(d_out),
          d_out.stride(0),
          d_qkv + at.q,
          d_qkv + at.k,
          d_qkv + at.v,
          d.qkv.stride(0),
          d.b.defined() ? mutable_ptr<T>(d.b) : nullptr,
          mutable_ptr<T>(d.a),
          d.a.stride(0),
          shares,
          shares + each,
          shares + 2 * each};
}

template <class T>
kernels::GatedNormArgs<T> gated_norm_args(const at::Tensor& x, const at::Tensor& z, const at::Tensor& w,
                                          std::int64_t groups, double eps) {
  const std::int64_t heads = groups > 0 ? groups : x.size(1) / w.numel();
  return {ptr<T>(x), x.stride(0), ptr<T>(z), z.stride(0), ptr<T>(w), heads, x.size(1) / heads, eps, groups > 0};
}

template <class T>
kernels::HeadGateArgs<T> head_gate_args(const at::Tensor& x, const at::Tensor& g) {
  return {ptr<T>(x), ptr<T>(g), g.stride(0), g.stride(1), g.size(1), g.size(2)};
}

}  // namespace nemo_rl::ops
