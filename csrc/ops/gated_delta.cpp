#include "ops/gated_delta.h"

#include <algorithm>

#include "ops/gated_delta_args.h"
#include "runtime/parallel_items.h"
#include "runtime/tensor.h"

namespace nemo_rl::ops {

runtime::CudaSlot<decltype(recurrence_forward)> recurrence_forward_cuda("recurrence_forward");
runtime::CudaSlot<decltype(recurrence_backward)> recurrence_backward_cuda("recurrence_backward");

namespace {

/// A sequence without a parent, and those that continue it.
struct Family {
  std::int64_t root = 0;
  std::vector<std::int64_t> children;
};

std::vector<Family> families_of(std::span<const RecurrentSequence> sequences) {
  std::vector<Family> families;
  std::vector<std::size_t> of(sequences.size());
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const auto parent = sequences[i].parent;
    if (parent == RecurrentSequence::kNone) {
      of[i] = families.size();
      families.push_back({static_cast<std::int64_t>(i), {}});
    } else {
      families[of[static_cast<std::size_t>(parent)]].children.push_back(static_cast<std::int64_t>(i));
    }
  }
  return families;
}

void check_rows(const RecurrenceInputs& in, const RecurrentShape& s, const at::Tensor& out, std::int64_t T) {
  check_shape(s);
  NRL_CHECK_ARG(in.b.defined() != s.is_mamba2() && in.qkv.dim() == 2 && in.qkv.size(1) == s.conv_size() &&
                    in.qkv.stride(1) == 1 && in.a.sizes() == at::IntArrayRef({in.qkv.size(0), s.value_heads}) &&
                    in.a.stride(1) == 1 &&
                    (!in.b.defined() || (in.b.sizes() == in.a.sizes() && in.b.strides() == in.a.strides())) &&
                    out.dim() == 2 && out.size(0) == in.qkv.size(0) && out.size(1) == s.value_size() &&
                    out.stride(1) == 1,
                "recurrence: qkv ", in.qkv.sizes(), ", a ", in.a.sizes(), " and out ", out.sizes(), " do not match");
  NRL_CHECK_ARG(T == in.qkv.size(0), "recurrence: sequences of ", T, " tokens, but ", in.qkv.size(0), " rows");
}

std::int64_t tokens_of(std::span<const RecurrentSequence> sequences) {
  std::int64_t T = 0;
  for (const auto& s : sequences) T += s.length;
  return T;
}

template <class T>
void run_forward(const kernels::RecurrenceArgs<T>& p, const RecurrentSequence& s, std::int64_t head,
                 accumulate_t<T>* state, T* out, std::int64_t stride) {
  if constexpr (std::is_same_v<T, float>)
    kernels::recurrence_forward_f32(p, s.start, s.length, head, state, out, stride);
  if constexpr (std::is_same_v<T, double>)
    kernels::recurrence_forward_f64(p, s.start, s.length, head, state, out, stride);
  if constexpr (std::is_same_v<T, bfloat16>)
    kernels::recurrence_forward_bf16(p, s.start, s.length, head, state, out, stride);
}

template <class T>
void run_backward(const kernels::RecurrenceArgs<T>& p, const kernels::RecurrenceGradients<T>& g,
                  const RecurrentSequence& s, std::int64_t head, const accumulate_t<T>* state, accumulate_t<T>* d_state,
                  accumulate_t<T>* scratch) {
  if constexpr (std::is_same_v<T, float>)
    kernels::recurrence_backward_f32(p, g, s.start, s.length, head, state, d_state, scratch);
  if constexpr (std::is_same_v<T, double>)
    kernels::recurrence_backward_f64(p, g, s.start, s.length, head, state, d_state, scratch);
  if constexpr (std::is_same_v<T, bfloat16>)
    kernels::recurrence_backward_bf16(p, g, s.start, s.length, head, state, d_state, scratch);
}

template <class T>
void forward(const RecurrenceInputs& in, std::span<const RecurrentSequence> sequences, const RecurrentShape& shape,
             const at::Tensor& out, const at::Tensor& slots) {
  using A = accumulate_t<T>;
  const auto families = families_of(sequences);
  const auto p = recurrence_args<T>(in, shape);
  const std::int64_t U = shape.value_heads, size = shape.state_size(), stride = out.stride(0);
  const auto count = static_cast<std::int64_t>(families.size());
  const std::int64_t rows = std::max<std::int64_t>(1, in.qkv.size(0) / std::max<std::int64_t>(1, count));
  T* const o = mutable_ptr<T>(out);
  runtime::parallel_tiles(
      count * U, runtime::tiles_at_least(rows * size), [&](std::int64_t begin, std::int64_t end, bool) {
        for (std::int64_t item = begin; item < end; ++item) {
          const auto& family = families[static_cast<std::size_t>(item / U)];
          const auto& root = sequences[static_cast<std::size_t>(family.root)];
          const std::int64_t head = item % U;
          A* const memory =
              reinterpret_cast<A*>(runtime::thread_workspace(static_cast<std::size_t>(2 * size) * sizeof(A)));
          A* const state =
              root.slot == RecurrentSequence::kNone ? memory : mutable_ptr<A>(slots) + (root.slot * U + head) * size;
          if (!root.continues) std::fill_n(state, size, A(0));
          run_forward(p, root, head, state, o, stride);
          for (const auto child : family.children) {
            std::copy_n(state, size, memory + size);
            run_forward(p, sequences[static_cast<std::size_t>(child)], head, memory + size, o, stride);
          }
        }
      });
}

/// The gradients of a family for the value heads of one key head.
template <class T>
void family_backward(const kernels::RecurrenceArgs<T>& p, const kernels::RecurrenceGradients<T>& g,
                     std::span<const RecurrentSequence> sequences, const Family& family, std::int64_t key_head) {
  using A = accumulate_t<T>;
  const auto& s = p.shape;
  const auto& root = sequences[static_cast<std::size_t>(family.root)];
  const std::int64_t size = s.group() * s.state_size();
  std::int64_t longest = root.length;
  for (const auto child : family.children)
    longest = std::max(longest, sequences[static_cast<std::size_t>(child)].length);
  const std::int64_t scratch = kernels::recurrence_scratch(s, longest);
  A* const state = reinterpret_cast<A*>(
      runtime::thread_workspace(static_cast<std::size_t>(3 * size + scratch + s.value_size()) * sizeof(A)));
  A *const d_state = state + size, *const d_child = d_state + size, *const memory = d_child + size;
  std::fill_n(state, size, A(0));
  std::fill_n(d_state, size, A(0));
  if (!family.children.empty()) {
    T* const unread = reinterpret_cast<T*>(memory + scratch);
    for (std::int64_t i = 0; i < s.group(); ++i)
      run_forward(p, root, key_head * s.group() + i, state + i * s.state_size(), unread, 0);
  }
  for (const auto child : family.children) {
    std::fill_n(d_child, size, A(0));
    run_backward(p, g, sequences[static_cast<std::size_t>(child)], key_head, state, d_child, memory);
    for (std::int64_t i = 0; i < size; ++i) d_state[i] += d_child[i];
  }
  std::fill_n(state, size, A(0));
  run_backward(p, g, root, key_head, state, d_state, memory);
}

template <class T>
void backward(const at::Tensor& d_out, const RecurrenceInputs& in, std::span<const RecurrentSequence> sequences,
              const RecurrentShape& shape, const RecurrenceInputs& d) {
  using A = accumulate_t<T>;
  const auto families = families_of(sequences);
  const auto rows = at::empty({3, in.qkv.size(0), shape.value_heads},
                              in.qkv.options().dtype(sizeof(A) == 8 ? at::kDouble : at::kFloat));
  const auto p = recurrence_args<T>(in, shape);
  const auto g = recurrence_gradients<T>(d_out, d, shape, mutable_ptr<A>(rows));
  runtime::parallel_items(static_cast<std::int64_t>(families.size()) * shape.key_heads, true, [&](std::int64_t item) {
    family_backward(p, g, sequences, families[static_cast<std::size_t>(item / shape.key_heads)],
                    item % shape.key_heads);
  });
  const auto add = [&](const at::Tensor& from, const at::Tensor& to) {
    if (!to.defined()) return;
    for (std::int64_t t = 0; t < from.size(0); ++t)
      for (std::int64_t u = 0; u < shape.value_heads; ++u)
        mutable_ptr<A>(to)[u] += ptr<A>(from)[t * shape.value_heads + u];
  };
  add(rows[0], d.A_log);
  add(rows[1], d.dt_bias);
  if (shape.is_mamba2()) add(rows[2], d.D);
}

}  // namespace

std::vector<RecurrentSequence> recurrent_sequences(std::span<const kernels::AttentionSequence> sequences) {
  std::vector<RecurrentSequence> all;
  for (const auto& s : sequences) {
    RecurrentSequence own{s.start, s.length};
    if (s.prefix_length > 0) {
      const auto same = [&](const RecurrentSequence& r) {
        return r.start == s.prefix_start && r.length == s.prefix_length && r.parent == RecurrentSequence::kNone;
      };
      const auto found = std::find_if(all.begin(), all.end(), same);
      NRL_CHECK_ARG(found != all.end(), "a recurrent layer continues whole sequences, but a prefix of ",
                    s.prefix_length, " tokens at row ", s.prefix_start, " is none");
      own.parent = found - all.begin();
    }
    all.push_back(own);
  }
  return all;
}

void check_shape(const RecurrentShape& s) {
  NRL_CHECK_ARG(s.key_heads >= 1 && s.value_heads >= 1 && s.value_heads % s.key_heads == 0 && s.key_dim >= 16 &&
                    s.key_dim % 16 == 0 && s.key_dim <= kernels::kMostKeyDim && s.value_dim >= 16 &&
                    s.value_dim % 16 == 0 && s.conv_width >= 1 && s.conv_width <= kernels::kMostConvWidth,
                "a recurrent layer with ", s.key_heads, " key heads of ", s.key_dim, ", ", s.value_heads,
                " value heads of ", s.value_dim, " and a convolution over ", s.conv_width,
                " tokens: expected heads of multiples of 16 (keys up to ", kernels::kMostKeyDim,
                "), value heads a multiple of the key heads, and at most ", kernels::kMostConvWidth, " tokens");
}

void recurrence_forward(const RecurrenceInputs& in, std::span<const RecurrentSequence> sequences,
                        const RecurrentShape& shape, const at::Tensor& out, const at::Tensor& state) {
  check_rows(in, shape, out, tokens_of(sequences));
  if (out.is_cuda()) return recurrence_forward_cuda.get(out)(in, sequences, shape, out, state);
  dispatch_floating(out.scalar_type(), "recurrence_forward",
                    [&](auto tag) { forward<decltype(tag)>(in, sequences, shape, out, state); });
}

void recurrence_backward(const at::Tensor& d_out, const RecurrenceInputs& in,
                         std::span<const RecurrentSequence> sequences, const RecurrentShape& shape,
                         const RecurrenceInputs& d) {
  check_rows(in, shape, d_out, tokens_of(sequences));
  check_rows(d, shape, d_out, tokens_of(sequences));
  if (d_out.is_cuda()) return recurrence_backward_cuda.get(d_out)(d_out, in, sequences, shape, d);
  dispatch_floating(d_out.scalar_type(), "recurrence_backward",
                    [&](auto tag) { backward<decltype(tag)>(d_out, in, sequences, shape, d); });
}

}  // namespace nemo_rl::ops
