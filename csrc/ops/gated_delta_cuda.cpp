// The CUDA side of recurrent layers: tensors and sequences to launches. All layers of a forward ask for the same lists,
// which are uploaded once.
#include <algorithm>

#include "kernels/cuda/model_launchers.h"
#include "kernels/cuda/recurrence_launchers.h"
#include "ops/gated_delta_args.h"
#include "runtime/cuda_launch.h"

namespace nemo_rl::ops {
namespace {

constexpr std::int64_t kBackwardBlocks = 264;  // which keep states of their own: two a multiprocessor of an H100

std::int64_t num_parts(std::int64_t rows) { return (rows + kernels::kRowsPerPart - 1) / kernels::kRowsPerPart; }

std::vector<RecurrentSequence> copy_of(std::span<const RecurrentSequence> sequences) {
  return {sequences.begin(), sequences.end()};
}

template <class T>
const T* data_of(const at::Tensor& uploaded) {
  return static_cast<const T*>(uploaded.const_data_ptr());
}

template <class T>
T* if_defined(const at::Tensor& t) {
  return t.defined() ? mutable_ptr<T>(t) : nullptr;
}

// ---------------------------------------------------------------- short convolution

/// CudaConv::before of `rows` rows.
std::vector<std::int64_t> rows_before(std::int64_t rows, std::int64_t W, std::span<const RecurrentSequence> sequences) {
  std::vector<std::int64_t> before(static_cast<std::size_t>(rows * (W - 1)), kernels::kNoInput);
  for (const auto& s : sequences)
    for (std::int64_t t = 0; t < s.length; ++t)
      for (std::int64_t i = 0; i + 1 < W; ++i) {
        const std::int64_t token = t - (W - 1) + i;
        auto& place = before[static_cast<std::size_t>((s.start + t) * (W - 1) + i)];
        if (token >= 0) {
          place = s.start + token;
        } else if (s.parent != RecurrentSequence::kNone) {
          const auto& parent = sequences[static_cast<std::size_t>(s.parent)];
          if (parent.length + token >= 0) place = parent.start + parent.length + token;
        } else if (s.continues) {
          place = -2 - (s.slot * (W - 1) + W - 1 + token);
        }
      }
  return before;
}

/// CudaConvGradients::first, then readers; those of a row in ascending order.
std::vector<std::int64_t> readers_of(const std::vector<std::int64_t>& before, std::int64_t rows, std::int64_t W) {
  std::vector<std::int64_t> all(static_cast<std::size_t>(rows + 1), 0);
  const auto for_readers = [&](const auto& f) {  // f(row, reader)
    for (std::int64_t t = 0; t < rows; ++t) {
      for (std::int64_t i = 0; i + 1 < W; ++i)
        if (const auto row = before[static_cast<std::size_t>(t * (W - 1) + i)]; row >= 0) f(row, t * W + i);
      f(t, t * W + W - 1);
    }
  };
  for_readers([&](std::int64_t row, std::int64_t) { ++all[static_cast<std::size_t>(row) + 1]; });
  for (std::int64_t t = 0; t < rows; ++t) all[static_cast<std::size_t>(t) + 1] += all[static_cast<std::size_t>(t)];
  auto next = all;
  const auto offset = static_cast<std::size_t>(rows + 1);
  all.resize(offset + static_cast<std::size_t>(all.back()));
  for_readers([&](std::int64_t row, std::int64_t reader) {
    all[offset + static_cast<std::size_t>(next[static_cast<std::size_t>(row)]++)] = reader;
  });
  return all;
}

template <class T>
kernels::CudaConv<T> conv_of(const at::Tensor& x, const ShortConvWeights& weights, const at::Tensor& before,
                             const at::Tensor& state) {
  return {ptr<T>(x),
          x.stride(0),
          data_of<std::int64_t>(before),
          ptr<T>(weights.w),
          weights.bias.defined() ? ptr<T>(weights.bias) : nullptr,
          if_defined<T>(state),
          x.size(0),
          x.size(1),
          weights.w.size(1),
          weights.silu};
}

void short_conv_forward_on_cuda(const at::Tensor& x, const ShortConvWeights& weights,
                                std::span<const RecurrentSequence> sequences, const at::Tensor& y,
                                const at::Tensor& state) {
  static thread_local runtime::UploadedArray<std::int64_t> uploaded;
  static thread_local runtime::UploadedArray<RecurrentSequence> uploaded_sequences;
  const runtime::CudaLaunch launch(x, "short_conv_forward");
  const auto before = uploaded.get(rows_before(x.size(0), weights.w.size(1), sequences), x);
  const auto all = uploaded_sequences.get(copy_of(sequences), x);
  runtime::dispatch_cuda(x.scalar_type(), launch.op, [&](auto tag) {
    using T = decltype(tag);
    launch.check(kernels::short_conv_forward_launch(conv_of<T>(x, weights, before, state), mutable_ptr<T>(y),
                                                    y.stride(0), data_of<RecurrentSequence>(all),
                                                    static_cast<std::int64_t>(sequences.size()), launch.stream));
  });
}

void short_conv_backward_on_cuda(const at::Tensor& dy, const at::Tensor& x, const ShortConvWeights& weights,
                                 std::span<const RecurrentSequence> sequences, const at::Tensor& dx,
                                 const ShortConvWeights& d) {
  static thread_local runtime::UploadedArray<std::int64_t> uploaded;
  static thread_local runtime::UploadedArray<std::int64_t> uploaded_readers;
  const runtime::CudaLaunch launch(x, "short_conv_backward");
  const std::int64_t rows = x.size(0), C = x.size(1), W = weights.w.size(1);
  const auto host = rows_before(rows, W, sequences);
  const auto before = uploaded.get(host, x), readers = uploaded_readers.get(readers_of(host, rows, W), x);
  const auto du = launch.scratch(rows * C, at::kFloat), parts = launch.scratch(num_parts(rows) * C * W, at::kFloat);
  const auto* const first = data_of<std::int64_t>(readers);
  runtime::dispatch_cuda(x.scalar_type(), launch.op, [&](auto tag) {
    using T = decltype(tag);
    const kernels::CudaConvGradients<T> gradients{ptr<T>(dy),
                                                  dy.stride(0),
                                                  mutable_ptr<T>(dx),
                                                  dx.stride(0),
                                                  if_defined<float>(d.w),
                                                  if_defined<float>(d.bias),
                                                  first,
                                                  first + rows + 1,
                                                  mutable_ptr<float>(du),
                                                  mutable_ptr<float>(parts)};
    launch.check(
        kernels::short_conv_backward_launch(conv_of<T>(x, weights, before, at::Tensor()), gradients, launch.stream));
  });
}

// ---------------------------------------------------------------- recurrence

/// The families of a batch on the device, until the thread's next call.
kernels::CudaFamilies families_on_device(std::span<const RecurrentSequence> sequences, const at::Tensor& like) {
  static thread_local runtime::UploadedArray<RecurrentSequence> uploaded;
  static thread_local runtime::UploadedArray<kernels::CudaFamily> uploaded_families;
  static thread_local runtime::UploadedArray<std::int64_t> uploaded_children;
  std::vector<std::vector<std::int64_t>> children_of(sequences.size());
  for (std::size_t i = 0; i < sequences.size(); ++i)
    if (const auto parent = sequences[i].parent; parent != RecurrentSequence::kNone)
      children_of[static_cast<std::size_t>(parent)].push_back(static_cast<std::int64_t>(i));
  std::vector<kernels::CudaFamily> families;
  std::vector<std::int64_t> children;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    if (sequences[i].parent != RecurrentSequence::kNone) continue;
    const auto begin = static_cast<std::int64_t>(children.size());
    children.insert(children.end(), children_of[i].begin(), children_of[i].end());
    families.push_back({static_cast<std::int64_t>(i), begin, static_cast<std::int64_t>(children.size())});
  }
  const auto count = static_cast<std::int64_t>(families.size());
  children.push_back(0);  // an array is never empty
  return {data_of<RecurrentSequence>(uploaded.get(copy_of(sequences), like)),
          data_of<kernels::CudaFamily>(uploaded_families.get(families, like)),
          data_of<std::int64_t>(uploaded_children.get(children, like)), count};
}

void recurrence_forward_on_cuda(const RecurrenceInputs& in, std::span<const RecurrentSequence> sequences,
                                const RecurrentShape& shape, const at::Tensor& out, const at::Tensor& state) {
  const runtime::CudaLaunch launch(out, "recurrence_forward");
  const auto all = families_on_device(sequences, out);
  runtime::dispatch_cuda(out.scalar_type(), launch.op, [&](auto tag) {
    using T = decltype(tag);
    launch.check(kernels::recurrence_forward_launch(recurrence_args<T>(in, shape), all, if_defined<float>(state),
                                                    mutable_ptr<T>(out), out.stride(0), launch.stream));
  });
}

void recurrence_backward_on_cuda(const at::Tensor& d_out, const RecurrenceInputs& in,
                                 std::span<const RecurrentSequence> sequences, const RecurrentShape& shape,
                                 const RecurrenceInputs& d) {
  const runtime::CudaLaunch launch(d_out, "recurrence_backward");
  const auto all = families_on_device(sequences, d_out);
  const std::int64_t T_rows = d_out.size(0), U = shape.value_heads;
  kernels::RecurrenceWorkspace w{nullptr, 0, std::min(kBackwardBlocks, all.count * U), nullptr, nullptr, nullptr};
  for (const auto& s : sequences) w.longest = std::max(w.longest, s.length);
  const auto states = launch.scratch(w.blocks * kernels::recurrence_state_floats(shape, w.longest), at::kFloat),
             d_keys = launch.scratch(2 * T_rows * U * shape.key_dim, at::kFloat),
             d_gates = launch.scratch(3 * T_rows * U, at::kFloat), rows = launch.scratch(3 * T_rows * U, at::kFloat),
             parts = launch.scratch(num_parts(T_rows) * U, at::kFloat);
  w.states = mutable_ptr<float>(states), w.d_query = mutable_ptr<float>(d_keys);
  w.d_key = w.d_query + T_rows * U * shape.key_dim, w.d_gates = mutable_ptr<float>(d_gates);
  float* const shares = mutable_ptr<float>(rows);
  runtime::dispatch_cuda(d_out.scalar_type(), launch.op, [&](auto tag) {
    using T = decltype(tag);
    launch.check(kernels::recurrence_backward_launch(recurrence_args<T>(in, shape),
                                                     recurrence_gradients<T>(d_out, d, shape, shares), all, w, T_rows,
                                                     launch.stream));
  });
  const at::Tensor sums[] = {d.A_log, d.dt_bias, d.D};
  for (std::int64_t i = 0; i < 3; ++i)
    if (sums[i].defined())
      launch.check(kernels::add_column_sums_launch(shares + i * T_rows * U, U, T_rows, U, mutable_ptr<float>(parts),
                                                   mutable_ptr<float>(sums[i]), launch.stream));
}

// ---------------------------------------------------------------- norm and gate

void gated_norm_forward_on_cuda(const at::Tensor& x, const at::Tensor& z, const at::Tensor& w, std::int64_t groups,
                                double eps, const at::Tensor& y) {
  const runtime::CudaLaunch launch(x, "gated_norm_forward");
  runtime::dispatch_cuda(x.scalar_type(), launch.op, [&](auto tag) {
    using T = decltype(tag);
    launch.check(kernels::gated_norm_forward_launch(gated_norm_args<T>(x, z, w, groups, eps), mutable_ptr<T>(y),
                                                    y.stride(0), x.size(0), launch.stream));
  });
}

void gated_norm_backward_on_cuda(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& z, const at::Tensor& w,
                                 std::int64_t groups, double eps, const at::Tensor& dx, const at::Tensor& dz,
                                 const at::Tensor& dw) {
  const runtime::CudaLaunch launch(x, "gated_norm_backward");
  const auto shares = launch.scratch(x.numel(), at::kFloat);
  runtime::dispatch_cuda(x.scalar_type(), launch.op, [&](auto tag) {
    using T = decltype(tag);
    const kernels::GatedNormGradients<T> g{ptr<T>(dy),   dy.stride(0),       mutable_ptr<T>(dx),
                                           dx.stride(0), mutable_ptr<T>(dz), dz.stride(0)};
    launch.check(kernels::gated_norm_backward_launch(gated_norm_args<T>(x, z, w, groups, eps), g,
                                                     mutable_ptr<float>(shares), x.size(0), launch.stream));
  });
  if (!dw.defined() || x.numel() == 0) return;
  const std::int64_t columns = w.numel(), rows = x.numel() / columns;  // every head has the same weights, or its own
  const auto parts = launch.scratch(num_parts(rows) * columns, at::kFloat);
  launch.check(kernels::add_column_sums_launch(ptr<float>(shares), columns, rows, columns, mutable_ptr<float>(parts),
                                               mutable_ptr<float>(dw), launch.stream));
}

void head_gate_forward_on_cuda(const at::Tensor& x, const at::Tensor& g, const at::Tensor& y) {
  const runtime::CudaLaunch launch(x, "head_gate_forward");
  runtime::dispatch_cuda(x.scalar_type(), launch.op, [&](auto tag) {
    using T = decltype(tag);
    launch.check(
        kernels::head_gate_forward_launch(head_gate_args<T>(x, g), mutable_ptr<T>(y), x.size(0), launch.stream));
  });
}

void head_gate_backward_on_cuda(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& g, const at::Tensor& dx,
                                const at::Tensor& dg) {
  const runtime::CudaLaunch launch(x, "head_gate_backward");
  runtime::dispatch_cuda(x.scalar_type(), launch.op, [&](auto tag) {
    using T = decltype(tag);
    launch.check(kernels::head_gate_backward_launch(head_gate_args<T>(x, g), ptr<T>(dy), mutable_ptr<T>(dx),
                                                    mutable_ptr<T>(dg), x.size(0), launch.stream));
  });
}

const bool registered = [] {
  short_conv_forward_cuda.set(short_conv_forward_on_cuda);
  short_conv_backward_cuda.set(short_conv_backward_on_cuda);
  recurrence_forward_cuda.set(recurrence_forward_on_cuda);
  recurrence_backward_cuda.set(recurrence_backward_on_cuda);
  gated_norm_forward_cuda.set(gated_norm_forward_on_cuda);
  gated_norm_backward_cuda.set(gated_norm_backward_on_cuda);
  head_gate_forward_cuda.set(head_gate_forward_on_cuda);
  head_gate_backward_cuda.set(head_gate_backward_on_cuda);
  return true;
}();

}  // namespace
}  // namespace nemo_rl::ops
