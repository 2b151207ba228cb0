// The short convolution and the gated norm of ops/gated_delta.h.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>

#include "kernels/short_conv.h"
#include "ops/gated_delta_args.h"
#include "runtime/parallel_items.h"
#include "runtime/tensor.h"

namespace nemo_rl::ops {

runtime::CudaSlot<decltype(short_conv_forward)> short_conv_forward_cuda("short_conv_forward");
runtime::CudaSlot<decltype(short_conv_backward)> short_conv_backward_cuda("short_conv_backward");
runtime::CudaSlot<decltype(gated_norm_forward)> gated_norm_forward_cuda("gated_norm_forward");
runtime::CudaSlot<decltype(gated_norm_backward)> gated_norm_backward_cuda("gated_norm_backward");
runtime::CudaSlot<decltype(head_gate_forward)> head_gate_forward_cuda("head_gate_forward");
runtime::CudaSlot<decltype(head_gate_backward)> head_gate_backward_cuda("head_gate_backward");

namespace {

constexpr std::int64_t kNormRows = 64;  // rows whose share of dw is summed at once

void check_conv(const at::Tensor& x, const ShortConvWeights& weights, const at::Tensor& y) {
  const auto &w = weights.w, &bias = weights.bias;
  NRL_CHECK_ARG(x.dim() == 2 && x.stride(1) == 1 && y.sizes() == x.sizes() && y.stride(1) == 1 && w.dim() == 2 &&
                    w.is_contiguous() && w.size(0) == x.size(1) && w.size(0) % 16 == 0 &&
                    w.size(1) <= kernels::kMostConvWidth &&
                    (!bias.defined() || (bias.is_contiguous() && bias.sizes() == w.sizes().slice(0, 1))),
                "short_conv: x ", x.sizes(), ", w ", w.sizes(), " and y ", y.sizes(), " do not match");
}

/// For each row the W - 1 rows of the tokens before it (ShortConvArgs::before).
template <class T>
std::vector<const T*> rows_before(const at::Tensor& x, std::int64_t W, std::span<const RecurrentSequence> sequences,
                                  const at::Tensor& state) {
  std::vector<const T*> before(static_cast<std::size_t>(x.size(0) * (W - 1)), nullptr);
  const auto row = [&](const RecurrentSequence& s, std::int64_t i) { return ptr<T>(x) + (s.start + i) * x.stride(0); };
  for (const auto& s : sequences) {
    const auto* const parent =
        s.parent == RecurrentSequence::kNone ? nullptr : &sequences[static_cast<std::size_t>(s.parent)];
    for (std::int64_t t = 0; t < s.length; ++t)
      for (std::int64_t i = 0; i + 1 < W; ++i) {
        const std::int64_t token = t - (W - 1) + i;
        const T*& place = before[static_cast<std::size_t>((s.start + t) * (W - 1) + i)];
        if (token >= 0) place = row(s, token);
        else if (parent != nullptr && parent->length + token >= 0) place = row(*parent, parent->length + token);
        else if (s.continues) place = ptr<T>(state) + (s.slot * (W - 1) + W - 1 + token) * x.size(1);
      }
  }
  return before;
}

/// The inputs that the tokens after a sequence will read.
template <class T>
void store_last_inputs(const at::Tensor& x, std::int64_t W, const RecurrentSequence& s, const at::Tensor& state) {
  const std::int64_t C = x.size(1);
  T* const slot = mutable_ptr<T>(state) + s.slot * (W - 1) * C;
  for (std::int64_t i = 0; i + 1 < W; ++i) {
    const std::int64_t token = s.length - (W - 1) + i;
    if (token >= 0) std::copy_n(ptr<T>(x) + (s.start + token) * x.stride(0), C, slot + i * C);
    else if (s.continues) std::copy_n(slot + (i + s.length) * C, C, slot + i * C);
    else std::fill_n(slot + i * C, C, T{});
  }
}

/// The weights as the kernels read them: taps [W, C] and the bias, in the accumulation type.
template <class T>
struct Taps {
  using A = accumulate_t<T>;
  explicit Taps(const ShortConvWeights& weights)
      : taps(weights.w.t().to(kType).contiguous()),
        bias(weights.bias.defined() ? weights.bias.to(kType) : at::Tensor()),
        silu(weights.silu) {}
  kernels::ShortConvArgs<T> args(const at::Tensor& x, const T* const* before) const {
    return {ptr<T>(x),    x.stride(0),  before, ptr<A>(taps), bias.defined() ? ptr<A>(bias) : nullptr,
            taps.size(1), taps.size(0), silu};
  }
  static constexpr auto kType = sizeof(A) == 8 ? at::kDouble : at::kFloat;
  at::Tensor taps, bias;
  bool silu;
};

template <class T>
void conv_forward(const at::Tensor& x, const ShortConvWeights& weights, std::span<const RecurrentSequence> sequences,
                  const at::Tensor& y, const at::Tensor& state) {
  const std::int64_t W = weights.w.size(1);
  const auto before = rows_before<T>(x, W, sequences, state);
  const Taps<T> taps(weights);
  const auto p = taps.args(x, before.data());
  T* const out = mutable_ptr<T>(y);
  const std::int64_t stride = y.stride(0);
  const auto run = [&](std::int64_t begin, std::int64_t end) {
    if constexpr (std::is_same_v<T, float>) kernels::short_conv_forward_f32(p, out, stride, begin, end);
    if constexpr (std::is_same_v<T, double>) kernels::short_conv_forward_f64(p, out, stride, begin, end);
    if constexpr (std::is_same_v<T, bfloat16>) kernels::short_conv_forward_bf16(p, out, stride, begin, end);
  };
  runtime::parallel_rows(x.size(0), std::max<std::int64_t>(1, 16384 / p.C), run);
  for (const auto& s : sequences)
    if (s.slot != RecurrentSequence::kNone) store_last_inputs<T>(x, W, s, state);
}

template <class T>
void conv_backward(const at::Tensor& dy, const at::Tensor& x, const ShortConvWeights& weights,
                   std::span<const RecurrentSequence> sequences, const at::Tensor& dx, const ShortConvWeights& d) {
  using A = accumulate_t<T>;
  const auto before = rows_before<T>(x, weights.w.size(1), sequences, {});
  const Taps<T> taps(weights);
  const auto p = taps.args(x, before.data());
  const std::int64_t rows = x.size(0), blocks = (p.C + kernels::kConvChannels - 1) / kernels::kConvChannels;
  const T* const in = ptr<T>(dy);
  T* const out = mutable_ptr<T>(dx);
  const kernels::ShortConvGradients<T> sums{d.w.defined() ? mutable_ptr<A>(d.w) : nullptr,
                                            d.bias.defined() ? mutable_ptr<A>(d.bias) : nullptr};
  const std::int64_t stride_in = dy.stride(0), stride_out = dx.stride(0);
  runtime::parallel_items(blocks, true, [&](std::int64_t block) {
    const std::int64_t begin = block * kernels::kConvChannels, end = std::min(p.C, begin + kernels::kConvChannels);
    A* const sum =
        reinterpret_cast<A*>(runtime::thread_workspace(static_cast<std::size_t>(rows * (end - begin)) * sizeof(A)));
    if constexpr (std::is_same_v<T, float>)
      kernels::short_conv_backward_f32(p, in, stride_in, out, stride_out, sums, rows, sum, begin, end);
    if constexpr (std::is_same_v<T, double>)
      kernels::short_conv_backward_f64(p, in, stride_in, out, stride_out, sums, rows, sum, begin, end);
    if constexpr (std::is_same_v<T, bfloat16>)
      kernels::short_conv_backward_bf16(p, in, stride_in, out, stride_out, sums, rows, sum, begin, end);
  });
}

template <class T>
void norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& z, const at::Tensor& w,
                   std::int64_t groups, double eps, const at::Tensor& dx, const at::Tensor& dz, const at::Tensor& dw) {
  using A = accumulate_t<T>;
  const auto p = gated_norm_args<T>(x, z, w, groups, eps);
  const kernels::GatedNormGradients<T> g{ptr<T>(dy),   dy.stride(0),       mutable_ptr<T>(dx),
                                         dx.stride(0), mutable_ptr<T>(dz), dz.stride(0)};
  const std::int64_t rows = x.size(0), blocks = (rows + kNormRows - 1) / kNormRows, columns = w.numel();
  std::vector<A> parts(static_cast<std::size_t>(blocks * columns));
  at::parallel_for(0, blocks, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t block = first; block < last; ++block) {
      const std::int64_t begin = block * kNormRows, end = std::min(rows, begin + kNormRows);
      A* const part = parts.data() + block * columns;
      if constexpr (std::is_same_v<T, float>) kernels::gated_norm_backward_f32(p, g, begin, end, part);
      if constexpr (std::is_same_v<T, double>) kernels::gated_norm_backward_f64(p, g, begin, end, part);
      if constexpr (std::is_same_v<T, bfloat16>) kernels::gated_norm_backward_bf16(p, g, begin, end, part);
    }
  });
  if (!dw.defined()) return;
  for (std::int64_t block = 0; block < blocks; ++block)
    for (std::int64_t d = 0; d < columns; ++d)
      mutable_ptr<A>(dw)[d] += parts[static_cast<std::size_t>(block * columns + d)];
}

void check_gate(const at::Tensor& x, const at::Tensor& g, const at::Tensor& y) {
  NRL_CHECK_ARG(x.is_contiguous() && y.is_contiguous() && y.sizes() == x.sizes() && g.dim() == 3 && g.stride(2) == 1 &&
                    x.sizes() == at::IntArrayRef({g.size(0), g.size(1) * g.size(2)}),
                "head_gate: x ", x.sizes(), ", g ", g.sizes(), " and y ", y.sizes(), " do not match");
}

void check_norm(const at::Tensor& x, const at::Tensor& z, const at::Tensor& w, std::int64_t groups,
                const at::Tensor& y) {
  const std::int64_t width = groups > 0 ? w.numel() / groups : w.numel();
  NRL_CHECK_ARG(x.dim() == 2 && x.sizes() == z.sizes() && x.sizes() == y.sizes() && x.stride(1) == 1 &&
                    z.stride(1) == 1 && y.stride(1) == 1 && w.is_contiguous() && width >= 16 && width % 16 == 0 &&
                    (groups > 0 ? x.size(1) == w.numel() && w.numel() == groups * width : x.size(1) % width == 0),
                "gated_norm: x ", x.sizes(), ", z ", z.sizes(), " and w ", w.sizes(), " do not match");
}

}  // namespace

void short_conv_forward(const at::Tensor& x, const ShortConvWeights& weights,
                        std::span<const RecurrentSequence> sequences, const at::Tensor& y, const at::Tensor& state) {
  check_conv(x, weights, y);
  if (x.is_cuda()) return short_conv_forward_cuda.get(x)(x, weights, sequences, y, state);
  dispatch_floating(y.scalar_type(), "short_conv_forward",
                    [&](auto tag) { conv_forward<decltype(tag)>(x, weights, sequences, y, state); });
}

void short_conv_backward(const at::Tensor& dy, const at::Tensor& x, const ShortConvWeights& weights,
                         std::span<const RecurrentSequence> sequences, const at::Tensor& dx,
                         const ShortConvWeights& d) {
  check_conv(x, weights, dy);
  check_conv(x, weights, dx);
  if (x.is_cuda()) return short_conv_backward_cuda.get(x)(dy, x, weights, sequences, dx, d);
  dispatch_floating(dy.scalar_type(), "short_conv_backward",
                    [&](auto tag) { conv_backward<decltype(tag)>(dy, x, weights, sequences, dx, d); });
}

void gated_norm_forward(const at::Tensor& x, const at::Tensor& z, const at::Tensor& w, std::int64_t groups, double eps,
                        const at::Tensor& y) {
  check_norm(x, z, w, groups, y);
  if (x.is_cuda()) return gated_norm_forward_cuda.get(x)(x, z, w, groups, eps, y);
  dispatch_floating(y.scalar_type(), "gated_norm_forward", [&](auto tag) {
    using T = decltype(tag);
    const auto p = gated_norm_args<T>(x, z, w, groups, eps);
    T* const out = mutable_ptr<T>(y);
    const std::int64_t stride = y.stride(0);
    runtime::parallel_rows(x.size(0), std::max<std::int64_t>(1, 8192 / x.size(1)), [&](std::int64_t b, std::int64_t e) {
      if constexpr (std::is_same_v<T, float>) kernels::gated_norm_forward_f32(p, out, stride, b, e);
      if constexpr (std::is_same_v<T, double>) kernels::gated_norm_forward_f64(p, out, stride, b, e);
      if constexpr (std::is_same_v<T, bfloat16>) kernels::gated_norm_forward_bf16(p, out, stride, b, e);
    });
  });
}

void gated_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& z, const at::Tensor& w,
                         std::int64_t groups, double eps, const at::Tensor& dx, const at::Tensor& dz,
                         const at::Tensor& dw) {
  for (const auto& y : {dy, dx, dz}) check_norm(x, z, w, groups, y);
  if (x.is_cuda()) return gated_norm_backward_cuda.get(x)(dy, x, z, w, groups, eps, dx, dz, dw);
  dispatch_floating(dy.scalar_type(), "gated_norm_backward",
                    [&](auto tag) { norm_backward<decltype(tag)>(dy, x, z, w, groups, eps, dx, dz, dw); });
}

void head_gate_forward(const at::Tensor& x, const at::Tensor& g, const at::Tensor& y) {
  check_gate(x, g, y);
  if (x.is_cuda()) return head_gate_forward_cuda.get(x)(x, g, y);
  dispatch_floating(y.scalar_type(), "head_gate_forward", [&](auto tag) {
    using T = decltype(tag);
    const auto p = head_gate_args<T>(x, g);
    T* const out = mutable_ptr<T>(y);
    runtime::parallel_rows(x.size(0), std::max<std::int64_t>(1, 8192 / x.size(1)), [&](std::int64_t b, std::int64_t e) {
      if constexpr (std::is_same_v<T, float>) kernels::head_gate_forward_f32(p, out, b, e);
      if constexpr (std::is_same_v<T, double>) kernels::head_gate_forward_f64(p, out, b, e);
      if constexpr (std::is_same_v<T, bfloat16>) kernels::head_gate_forward_bf16(p, out, b, e);
    });
  });
}

void head_gate_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& g, const at::Tensor& dx,
                        const at::Tensor& dg) {
  check_gate(x, g, dx);
  NRL_CHECK(dg.strides() == g.strides() && dg.sizes() == g.sizes() && dy.is_contiguous(), "head_gate_backward");
  if (x.is_cuda()) return head_gate_backward_cuda.get(x)(dy, x, g, dx, dg);
  dispatch_floating(dy.scalar_type(), "head_gate_backward", [&](auto tag) {
    using T = decltype(tag);
    const auto p = head_gate_args<T>(x, g);
    const T* const in = ptr<T>(dy);
    T *const out = mutable_ptr<T>(dx), *const gate = mutable_ptr<T>(dg);
    runtime::parallel_rows(x.size(0), std::max<std::int64_t>(1, 8192 / x.size(1)), [&](std::int64_t b, std::int64_t e) {
      if constexpr (std::is_same_v<T, float>) kernels::head_gate_backward_f32(p, in, out, gate, b, e);
      if constexpr (std::is_same_v<T, double>) kernels::head_gate_backward_f64(p, in, out, gate, b, e);
      if constexpr (std::is_same_v<T, bfloat16>) kernels::head_gate_backward_bf16(p, in, out, gate, b, e);
    });
  });
}

}  // namespace nemo_rl::ops
