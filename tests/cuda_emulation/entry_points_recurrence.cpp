// C functions by which the tests call the CUDA launchers of recurrent layers; see entry_points_model.cpp. Tensors are
// contiguous.
#include <cuda_runtime_api.h>

#include "kernels/cuda/recurrence_launchers.h"

using namespace nemo_rl;
using namespace nemo_rl::kernels;
using Int = std::int64_t;

namespace {

/// A call with pointers of float or bfloat16.
template <class F>
Int with_type(Int bf16, const F& f) {
  return bf16 ? f(bfloat16{}) : f(float{});
}
template <class T>
T* as(void* x) {
  return static_cast<T*>(x);
}

/// sizes: P, U, dk, dv; 1 for Mamba-2.
RecurrentShape shape_of(const Int* sizes, double least, double greatest) {
  RecurrentShape s{sizes[0], sizes[1], sizes[2], sizes[3], 1};
  if (sizes[4] != 0) s.rule = Recurrence::mamba2, s.least_step = least, s.greatest_step = greatest;
  return s;
}

/// Columns of a row where q, k and v begin.
template <class T>
RecurrenceArgs<T> args_of(const RecurrentShape& s, void* qkv, void* b, void* a, void* A_log, void* dt_bias, void* D) {
  const bool m = s.is_mamba2();
  T* const row = as<T>(qkv);
  const Int K = s.key_size(), V = s.value_size();
  return {row + (m ? V + K : 0), row + (m ? V : K), row + (m ? 0 : 2 * K), s.conv_size(), as<T>(b), as<T>(a),
          s.value_heads,         as<T>(A_log),      as<T>(dt_bias),        as<T>(D),      s};
}

}  // namespace

extern "C" {

Int short_conv_forward(void* x, Int rows, Int C, Int W, Int* before, void* w, void* bias, void* state, void* y,
                       RecurrentSequence* sequences, Int count, Int silu, Int bf16) {
  return with_type(bf16, [&]<class T>(T) {
    const CudaConv<T> conv{as<T>(x), C, before, as<T>(w), as<T>(bias), as<T>(state), rows, C, W, silu != 0};
    return short_conv_forward_launch(conv, as<T>(y), C, sequences, count, nullptr);
  });
}

Int short_conv_backward(void* dy, void* x, Int rows, Int C, Int W, Int* before, Int* first, Int* readers, void* w,
                        void* bias, void* dx, float* dw, float* d_bias, float* du, float* parts, Int silu, Int bf16) {
  return with_type(bf16, [&]<class T>(T) {
    const CudaConv<T> conv{as<T>(x), C, before, as<T>(w), as<T>(bias), nullptr, rows, C, W, silu != 0};
    const CudaConvGradients<T> d{as<T>(dy), C, as<T>(dx), C, dw, d_bias, first, readers, du, parts};
    return short_conv_backward_launch(conv, d, nullptr);
  });
}

/// all: sequences, families, children; inputs: qkv, b, a, A_log, dt_bias, D.
Int recurrence_forward(Int* sizes, double least, double greatest, RecurrentSequence* sequences, CudaFamily* families,
                       Int* children, Int count, void* qkv, void* b, void* a, void* A_log, void* dt_bias, void* D,
                       float* slots, void* out, Int bf16) {
  const RecurrentShape s = shape_of(sizes, least, greatest);
  return with_type(bf16, [&]<class T>(T) {
    return recurrence_forward_launch(args_of<T>(s, qkv, b, a, A_log, dt_bias, D),
                                     {sequences, families, children, count}, slots, as<T>(out), s.value_size(),
                                     nullptr);
  });
}

Int recurrence_state_size(Int* sizes, Int longest) { return recurrence_state_floats(shape_of(sizes, 0, 0), longest); }

/// shares [3, T, U]
Int recurrence_backward(Int* sizes, double least, double greatest, RecurrentSequence* sequences, CudaFamily* families,
                        Int* children, Int count, void* qkv, void* b, void* a, void* A_log, void* dt_bias, void* D,
                        void* d_out, void* d_qkv, void* d_b, void* d_a, float* shares, float* states, Int longest,
                        Int blocks, float* d_keys, float* d_gates, Int tokens, Int bf16) {
  const RecurrentShape s = shape_of(sizes, least, greatest);
  const Int each = tokens * s.value_heads;
  const RecurrenceWorkspace w{states, longest, blocks, d_keys, d_keys + each * s.key_dim, d_gates};
  return with_type(bf16, [&]<class T>(T) {
    const auto place = args_of<T>(s, d_qkv, d_b, d_a, nullptr, nullptr, nullptr);
    const RecurrenceGradients<T> g{as<T>(d_out),
                                   s.value_size(),
                                   const_cast<T*>(place.q),
                                   const_cast<T*>(place.k),
                                   const_cast<T*>(place.v),
                                   s.conv_size(),
                                   as<T>(d_b),
                                   as<T>(d_a),
                                   s.value_heads,
                                   shares,
                                   shares + each,
                                   shares + 2 * each};
    return recurrence_backward_launch(args_of<T>(s, qkv, b, a, A_log, dt_bias, D), g,
                                      {sequences, families, children, count}, w, tokens, nullptr);
  });
}

/// Mamba-2's with gate_first.
Int gated_norm_forward(void* x, void* z, void* w, Int rows, Int heads, Int D, Int gate_first, void* y, Int bf16) {
  return with_type(bf16, [&]<class T>(T) {
    const Int width = heads * D;
    const GatedNormArgs<T> args{as<T>(x), width, as<T>(z), width, as<T>(w), heads, D, 1e-6, gate_first != 0};
    return gated_norm_forward_launch(args, as<T>(y), width, rows, nullptr);
  });
}

Int gated_norm_backward(void* dy, void* x, void* z, void* w, Int rows, Int heads, Int D, Int gate_first, void* dx,
                        void* dz, float* shares, Int bf16) {
  return with_type(bf16, [&]<class T>(T) {
    const Int width = heads * D;
    const GatedNormArgs<T> args{as<T>(x), width, as<T>(z), width, as<T>(w), heads, D, 1e-6, gate_first != 0};
    const GatedNormGradients<T> g{as<T>(dy), width, as<T>(dx), width, as<T>(dz), width};
    return gated_norm_backward_launch(args, g, shares, rows, nullptr);
  });
}

/// g [rows, heads, 2, D], of which the second halves are gates.
Int head_gate(void* dy, void* x, void* g, Int rows, Int heads, Int D, void* y, void* dx, void* dg, Int bf16) {
  return with_type(bf16, [&]<class T>(T) -> Int {
    const HeadGateArgs<T> args{as<T>(x), as<T>(g) + D, 2 * heads * D, 2 * D, heads, D};
    if (const Int status = head_gate_forward_launch(args, as<T>(y), rows, nullptr)) return status;
    return head_gate_backward_launch(args, as<T>(dy), as<T>(dx), as<T>(dg) + D, rows, nullptr);
  });
}

}  // extern "C"
