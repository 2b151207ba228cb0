// The CUDA side of embedding, norms, rotary embedding, gated activation and optimizer: tensors to launches.
#include <algorithm>
#include <numeric>

#include "kernels/cuda/model_launchers.h"
#include "kernels/weight_digest.h"
#include "ops/adamw_arguments.h"
#include "ops/embedding.h"
#include "ops/kernel_types.h"
#include "ops/rms_norm.h"
#include "ops/rope.h"
#include "ops/swiglu.h"
#include "ops/weight_blocks.h"
#include "ops/weight_digest.h"
#include "runtime/cuda_launch.h"

namespace nemo_rl::ops {
namespace {

std::int64_t num_parts(std::int64_t n, std::int64_t each) { return (n + each - 1) / each; }

// ---------------------------------------------------------------- embedding

void embedding_forward_on_cuda(const at::Tensor& table, const at::Tensor& token_ids, const at::Tensor& h,
                               at::ScalarType dtype) {
  const runtime::CudaLaunch launch(table, "embedding_forward");
  NRL_CHECK_ARG(h.scalar_type() == at::kFloat && h.is_contiguous() && h.device() == table.device(),
                "embedding_forward: h must be contiguous float32 on ", table.device().str());
  const auto ids = token_ids.to(table.device());
  if (in_blocks(table)) {
    const BlockMatrix rows(table, h.size(1));
    return runtime::dispatch_cuda(dtype, launch.op, [&](auto tag) {
      launch.check(kernels::embedding_blocks_launch<decltype(tag)>(rows.format(), rows.tiles(), ptr<std::int64_t>(ids),
                                                                   mutable_ptr<float>(h), ids.numel(), h.size(1),
                                                                   launch.stream));
    });
  }
  runtime::dispatch_cuda(table.scalar_type(), launch.op, [&](auto tag) {
    using T = decltype(tag);
    launch.check(kernels::embedding_forward_launch(ptr<T>(table), ptr<std::int64_t>(ids), mutable_ptr<float>(h),
                                                   ids.numel(), table.size(1), launch.stream));
  });
}

void unpack_blocks_on_cuda(const BlockMatrix& from, const at::Tensor& w, std::int64_t first) {
  const runtime::CudaLaunch launch(w, "unpack_blocks");
  runtime::dispatch_cuda(w.scalar_type(), launch.op, [&](auto tag) {
    launch.check(kernels::unpack_blocks_launch(from.format(), from.tiles(), first, w.size(0), w.size(1),
                                               mutable_ptr<decltype(tag)>(w), w.stride(0), launch.stream));
  });
}

void embedding_backward_on_cuda(const at::Tensor& dh, const at::Tensor& token_ids, const at::Tensor& d_table) {
  const runtime::CudaLaunch launch(dh, "embedding_backward");
  NRL_CHECK_ARG(dh.scalar_type() == at::kFloat && d_table.scalar_type() == at::kFloat && dh.is_contiguous() &&
                    d_table.is_contiguous() && d_table.device() == dh.device(),
                "embedding_backward: dh ", dh.sizes(), " and d_table ", d_table.sizes(),
                " must be contiguous float32 on one device");
  // tokens by id, each id's in their order
  const auto* ids = ptr<std::int64_t>(token_ids);
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(token_ids.numel())), rows, first;
  std::iota(tokens.begin(), tokens.end(), 0);
  std::stable_sort(tokens.begin(), tokens.end(), [&](auto a, auto b) { return ids[a] < ids[b]; });
  for (std::size_t i = 0; i < tokens.size(); ++i)
    if (i == 0 || ids[tokens[i]] != ids[tokens[i - 1]]) {
      rows.push_back(ids[tokens[i]]);
      first.push_back(static_cast<std::int64_t>(i));
    }
  first.push_back(static_cast<std::int64_t>(tokens.size()));
  const auto num_rows = static_cast<std::int64_t>(rows.size());
  std::vector<std::int64_t> all = rows;
  all.insert(all.end(), first.begin(), first.end());
  all.insert(all.end(), tokens.begin(), tokens.end());
  const auto uploaded = runtime::to_device(all, dh);
  const auto* p = static_cast<const std::int64_t*>(uploaded.const_data_ptr());
  launch.check(kernels::embedding_backward_launch(
      {ptr<float>(dh), p, p + num_rows, p + 2 * num_rows + 1, mutable_ptr<float>(d_table), num_rows, d_table.size(1)},
      launch.stream));
}

void add_column_sums_on_cuda(const at::Tensor& x, const at::Tensor& out) {
  const runtime::CudaLaunch launch(x, "add_column_sums");
  const auto parts = launch.scratch(num_parts(x.size(0), kernels::kRowsPerPart) * x.size(1), at::kFloat);
  runtime::dispatch_cuda(x.scalar_type(), launch.op, [&](auto tag) {
    using X = decltype(tag);
    launch.check(kernels::add_column_sums_launch(ptr<X>(x), x.stride(0), x.size(0), x.size(1),
                                                 mutable_ptr<float>(parts), mutable_ptr<float>(out), launch.stream));
  });
}

// ---------------------------------------------------------------- RMS norm

/// f(x's type, w's type) for the pairs that a model has.
template <class F>
void dispatch_norm(const at::Tensor& x, const at::Tensor& w, const char* op, F&& f) {
  const auto in = x.scalar_type(), type = w.scalar_type();
  if (in == at::kFloat && type == at::kFloat) return f(float{}, float{});
  if (in == at::kFloat && type == at::kBFloat16) return f(float{}, bfloat16{});
  if (in == at::kBFloat16 && type == at::kBFloat16) return f(bfloat16{}, bfloat16{});
  throw ArgumentError(detail::concat(op, " on CUDA: x in ", c10::toString(in), ", weight in ", c10::toString(type)));
}

void rms_norm_forward_on_cuda(const at::Tensor& x, const at::Tensor& w, double eps, double offset, const at::Tensor& y,
                              const std::optional<at::Tensor>& rstd) {
  const runtime::CudaLaunch launch(x, "rms_norm_forward");
  const std::int64_t D = w.numel();
  dispatch_norm(x, w, launch.op, [&]<class X, class T>(X, T) {
    const kernels::RmsNormForwardArgs<X, T> args{ptr<X>(x),     x.stride(0),
                                                 ptr<T>(w),     mutable_ptr<T>(y),
                                                 y.stride(0),   rstd ? mutable_ptr<float>(*rstd) : nullptr,
                                                 x.size(1) / D, D,
                                                 eps,           offset};
    launch.check(kernels::rms_norm_forward_launch(args, x.size(0), launch.stream));
  });
}

void rms_norm_backward_on_cuda(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& w, double offset,
                               const at::Tensor& rstd, const at::Tensor& dx, bool accumulate, const at::Tensor& dw) {
  const runtime::CudaLaunch launch(x, "rms_norm_backward");
  NRL_CHECK_ARG(
      dy.scalar_type() == x.scalar_type() && dx.scalar_type() == x.scalar_type() && dw.scalar_type() == at::kFloat,
      "rms_norm_backward: dy and dx must be ", c10::toString(x.scalar_type()), " like x, and dw float32");
  const std::int64_t D = w.numel();
  const auto parts = launch.scratch(num_parts(x.size(0), kernels::kRowsPerPart) * D, at::kFloat);
  dispatch_norm(x, w, launch.op, [&]<class X, class T>(X, T) {
    const kernels::RmsNormBackwardArgs<X, X, T> args{
        ptr<X>(dy),         dy.stride(0), ptr<X>(x),  x.stride(0),   ptr<T>(w), ptr<float>(rstd),
        mutable_ptr<X>(dx), dx.stride(0), accumulate, x.size(1) / D, D,         offset};
    launch.check(kernels::rms_norm_backward_launch(args, x.size(0), mutable_ptr<float>(parts), mutable_ptr<float>(dw),
                                                   launch.stream));
  });
}

// ---------------------------------------------------------------- elementwise

void rope_on_cuda(const at::Tensor& x, std::int64_t heads, std::int64_t H, const at::Tensor& positions,
                  const at::Tensor& cos, const at::Tensor& sin, bool inverse, bool interleaved) {
  const runtime::CudaLaunch launch(x, "rope");
  NRL_CHECK_ARG(positions.device() == x.device() && cos.device() == x.device() && sin.device() == x.device(),
                "rope: x is on ", x.device().str(), ", positions on ", positions.device().str(), ", the table on ",
                cos.device().str());
  runtime::dispatch_cuda(x.scalar_type(), launch.op, [&](auto tag) {
    using T = decltype(tag);
    const kernels::RopeArgs<T> args{mutable_ptr<T>(x),
                                    x.stride(0),
                                    ptr<std::int64_t>(positions),
                                    ptr<float>(cos),
                                    ptr<float>(sin),
                                    heads,
                                    H,
                                    2 * cos.size(1),
                                    inverse,
                                    interleaved};
    launch.check(kernels::rope_launch(args, x.size(0), launch.stream));
  });
}

void swiglu_forward_on_cuda(const at::Tensor& gate_up, const at::Tensor& act, kernels::Gate activation) {
  const runtime::CudaLaunch launch(act, "swiglu_forward");
  runtime::dispatch_cuda(act.scalar_type(), launch.op, [&](auto tag) {
    using T = decltype(tag);
    launch.check(kernels::swiglu_forward_launch(ptr<T>(gate_up), mutable_ptr<T>(act), act.size(1), act.size(0),
                                                activation, launch.stream));
  });
}

void swiglu_backward_on_cuda(const at::Tensor& d_act, const at::Tensor& gate_up, const at::Tensor& d_gate_up,
                             kernels::Gate activation) {
  const runtime::CudaLaunch launch(d_act, "swiglu_backward");
  runtime::dispatch_cuda(d_act.scalar_type(), launch.op, [&](auto tag) {
    using T = decltype(tag);
    launch.check(kernels::swiglu_backward_launch(ptr<T>(d_act), ptr<T>(gate_up), mutable_ptr<T>(d_gate_up),
                                                 d_act.size(1), d_act.size(0), activation, launch.stream));
  });
}

// ---------------------------------------------------------------- flat buffers

void adamw_step_on_cuda(const AdamWBuffers& b, const AdamWSettings& s, std::int64_t step, double grad_scale) {
  const runtime::CudaLaunch launch(b.weights, "adamw_step");
  NRL_CHECK_ARG(b.weights.scalar_type() == (b.remainders ? at::kBFloat16 : at::kFloat),
                "adamw_step: weights on CUDA must be float32, or bfloat16 with remainders");
  const auto run = [&]<class M, class V>(M, V) {
    launch.check(
        kernels::adamw_launch(adamw_arguments<float, M, V>(b, s, step, grad_scale), b.weights.numel(), launch.stream));
  };
  if (b.exp_avg.scalar_type() == at::kByte) return run(std::uint8_t{}, std::uint8_t{});
  const bool short_second = b.exp_avg_sq.scalar_type() == at::kBFloat16;
  if (b.exp_avg.scalar_type() == at::kBFloat16) {
    if (short_second) run(bfloat16{}, bfloat16{});
    else run(bfloat16{}, float{});
  } else if (short_second) {
    run(float{}, bfloat16{});
  } else {
    run(float{}, float{});
  }
}

at::Tensor block_squares_on_cuda(const at::Tensor& x) {
  const runtime::CudaLaunch launch(x, "block_squares");
  NRL_CHECK_ARG(x.scalar_type() == at::kFloat && x.is_contiguous(),
                "block_squares: a buffer on CUDA must be contiguous float32");
  const auto squares = launch.scratch(num_parts(x.numel(), kFlatBlock), at::kDouble);
  launch.check(
      kernels::block_squares_launch(ptr<float>(x), x.numel(), kFlatBlock, mutable_ptr<double>(squares), launch.stream));
  return squares.cpu();
}

std::vector<std::uint64_t> weight_digest_on_cuda(const at::Tensor& weights) {
  const runtime::CudaLaunch launch(weights, "weight_digest");
  const auto n = static_cast<std::int64_t>(weights.nbytes());
  const auto parts = launch.scratch(num_parts(n, kernels::kDigestBlock), at::kLong);
  launch.check(kernels::weight_digest_launch(weights.const_data_ptr(), n, static_cast<std::uint64_t*>(parts.data_ptr()),
                                             launch.stream));
  const auto host = parts.cpu();
  const auto* p = static_cast<const std::uint64_t*>(host.const_data_ptr());
  return {p, p + host.numel()};
}

const bool registered = [] {
  embedding_forward_cuda.set(embedding_forward_on_cuda);
  unpack_blocks_cuda.set(unpack_blocks_on_cuda);
  embedding_backward_cuda.set(embedding_backward_on_cuda);
  add_column_sums_cuda.set(add_column_sums_on_cuda);
  rms_norm_forward_cuda.set(rms_norm_forward_on_cuda);
  rms_norm_backward_cuda.set(rms_norm_backward_on_cuda);
  rope_cuda.set(rope_on_cuda);
  swiglu_forward_cuda.set(swiglu_forward_on_cuda);
  swiglu_backward_cuda.set(swiglu_backward_on_cuda);
  adamw_step_cuda.set(adamw_step_on_cuda);
  block_squares_cuda.set(block_squares_on_cuda);
  weight_digest_cuda.set(weight_digest_on_cuda);
  return true;
}();

}  // namespace
}  // namespace nemo_rl::ops
