#include "kernels/cpu/gated_delta_keys.h"
#include "kernels/gated_delta.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

/// Strips of a state that are updated at a time: as many as the registers hold.
template <class A>
constexpr int kStripsAtATime = kRegisterBytes > 32 ? (sizeof(A) == 4 ? 4 : 2) : 1;
/// Rows whose queries and keys are normalised before the strips go over them.
constexpr std::int64_t kRows = 16;

/// Queries, keys and gates of up to kRows rows.
template <class A>
struct Piece {
  alignas(64) A query[kRows][kMostKeyDim];
  alignas(64) A key[kRows][kMostKeyDim];
  DeltaGates<A> gates[kRows];
};

/// One token for W strips of a state, which lie dk · kStrip elements apart: updates them. Returns in `out` what the
/// query reads of the new state; `value` becomes delta.
template <Recurrence kRule, int W, class A>
NRL_VEC void update_state(A* state, std::int64_t dk, const A* key, const A* query, A decay, A beta,
                          Vec<A, 16> (&value)[W], Vec<A, 16> (&out)[W]) {
  using V = Vec<A, 16>;
  const std::int64_t strip = dk * kStrip;
  if constexpr (kRule == Recurrence::gated_delta) {
    V even[W], odd[W];
    for (int w = 0; w < W; ++w) even[w] = V{}, odd[w] = V{};
    for (std::int64_t k = 0; k < dk; k += 2) {
      V even_key(key[k]), odd_key(key[k + 1]);
      for (int w = 0; w < W; ++w) {
        even[w] = mul_add(load<V>(state + w * strip + k * kStrip), even_key, even[w]);
        odd[w] = mul_add(load<V>(state + w * strip + (k + 1) * kStrip), odd_key, odd[w]);
      }
    }
    for (int w = 0; w < W; ++w) value[w] = (value[w] - (even[w] + odd[w]) * decay) * beta;
  } else {
    for (int w = 0; w < W; ++w) value[w] = value[w] * beta;
  }
  for (int w = 0; w < W; ++w) out[w] = V{};
  V all_decay(decay);
  for (std::int64_t k = 0; k < dk; ++k) {
    V own_key(key[k]);
    for (int w = 0; w < W; ++w) {
      V s = mul_add(own_key, value[w], load<V>(state + w * strip + k * kStrip) * all_decay);
      store(state + w * strip + k * kStrip, s);
      out[w] = mul_add(s, V(query[k]), out[w]);
    }
  }
}

/// `skip`: what multiplies a value that is added to the result (Mamba-2's D).
template <Recurrence kRule, int W, class T, class A>
void run_strips(const T* value, std::int64_t stride_value, std::int64_t rows, const Piece<A>& piece, std::int64_t dk,
                A skip, A* state, T* out, std::int64_t stride_out) {
  using V = Vec<A, 16>;
  for (std::int64_t t = 0; t < rows; ++t) {
    V v[W], o[W];
    for (int w = 0; w < W; ++w) v[w] = load<V>(value + t * stride_value + w * kStrip);
    update_state<kRule, W>(state, dk, piece.key[t], piece.query[t], piece.gates[t].decay, piece.gates[t].beta, v, o);
    if constexpr (kRule == Recurrence::mamba2)
      for (int w = 0; w < W; ++w) o[w] = mul_add(load<V>(value + t * stride_value + w * kStrip), V(skip), o[w]);
    for (int w = 0; w < W; ++w) store(out + t * stride_out + w * kStrip, o[w]);
  }
}

template <Recurrence kRule, class T>
void run(const RecurrenceArgs<T>& p, std::int64_t start, std::int64_t length, std::int64_t head, accumulate_t<T>* state,
         T* out, std::int64_t stride_out) {
  using A = accumulate_t<T>;
  const auto& s = p.shape;
  const A skip = kRule == Recurrence::mamba2 ? static_cast<A>(p.D[head]) : A(0);
  const std::int64_t dk = s.key_dim, strips = s.value_dim / kStrip, key_head = head / s.group();
  Piece<A> piece;
  for (std::int64_t row = start; row < start + length; row += kRows) {
    const std::int64_t rows = row + kRows < start + length ? kRows : start + length - row;
    for (std::int64_t t = 0; t < rows; ++t) {
      const std::int64_t place = (row + t) * p.stride_qkv + key_head * dk;
      read_key<kRule>(p.q + place, dk, query_scale<A>(s), piece.query[t]);
      read_key<kRule>(p.k + place, dk, A(1), piece.key[t]);
      piece.gates[t] = gates_at<kRule>(p, row + t, head);
    }
    const T* value = p.v + row * p.stride_qkv + head * s.value_dim;
    T* const o = out + row * stride_out + head * s.value_dim;
    constexpr int W = kStripsAtATime<A>;
    std::int64_t strip = 0;
    for (; strip + W <= strips; strip += W)
      run_strips<kRule, W>(value + strip * kStrip, p.stride_qkv, rows, piece, dk, skip, state + strip * dk * kStrip,
                           o + strip * kStrip, stride_out);
    for (; strip < strips; ++strip)
      run_strips<kRule, 1>(value + strip * kStrip, p.stride_qkv, rows, piece, dk, skip, state + strip * dk * kStrip,
                           o + strip * kStrip, stride_out);
  }
}

template <class T>
void forward(const RecurrenceArgs<T>& p, std::int64_t start, std::int64_t length, std::int64_t head,
             accumulate_t<T>* state, T* out, std::int64_t stride_out) {
  if (p.shape.is_mamba2()) run<Recurrence::mamba2>(p, start, length, head, state, out, stride_out);
  else run<Recurrence::gated_delta>(p, start, length, head, state, out, stride_out);
}

}  // namespace

void recurrence_forward_f32(const RecurrenceArgs<float>& p, std::int64_t start, std::int64_t length, std::int64_t head,
                            float* state, float* out, std::int64_t stride_out) {
  forward(p, start, length, head, state, out, stride_out);
}
void recurrence_forward_f64(const RecurrenceArgs<double>& p, std::int64_t start, std::int64_t length, std::int64_t head,
                            double* state, double* out, std::int64_t stride_out) {
  forward(p, start, length, head, state, out, stride_out);
}
void recurrence_forward_bf16(const RecurrenceArgs<bfloat16>& p, std::int64_t start, std::int64_t length,
                             std::int64_t head, float* state, bfloat16* out, std::int64_t stride_out) {
  forward(p, start, length, head, state, out, stride_out);
}

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
