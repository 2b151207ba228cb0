// The backward of the gated delta rule in chunks (Yang et al., 2024, "Gated Delta Networks", section 3.3). It need not
// sum in the order of the forward, so nearly all of it is products of small matrices.
//
// With G_t = the sum of the log decays of rows 1..t of a chunk, gamma_t = exp(G_t), Gamma_ti = exp(G_t - G_i), and the
// state S before the chunk:
//   N = Gamma * (K K^T) below the diagonal, P = Gamma * (Q K^T) up to the diagonal
//   x_t = v_t - gamma_t S^T k_t - sum_{i<t} N_ti delta_i
//   delta_t = beta_t x_t
//   o_t = gamma_t S^T q_t + sum_{i<=t} P_ti delta_i
//   S' = gamma_R S + sum_i (gamma_R / gamma_i) k_i delta_i^T
// In Mamba-2 x_t = v_t, nothing is read of S by a key (N is absent), and o_t has D v_t in addition.
// Squares are stored turned: row i, column t.
#include "kernels/cpu/gated_delta_keys.h"
#include "kernels/cpu/plain.h"
#include "kernels/cpu/strips.h"
#include "kernels/gated_delta.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

/// Rows of W strips, in ascending order or from the last: x_t -= the sum of N(t, i) z_i over the rows before it in that
/// order, z_t = beta_t x_t. N(t, i) = turned[i, t] ascending, turned[t, i] from the last.
template <int W, bool kFromLast, class A>
void solve_strips(const A* turned, const A* beta, std::int64_t R, A* x, A* z) {
  using V = Vec<A, 16>;
  for (std::int64_t step = 0; step < R; ++step) {
    const std::int64_t t = kFromLast ? R - 1 - step : step;
    V sums[W];
    for (int w = 0; w < W; ++w) sums[w] = load<V>(x + (w * R + t) * 16);
    for (std::int64_t done = 0; done < step; ++done) {
      const std::int64_t i = kFromLast ? R - 1 - done : done;
      V factor(kFromLast ? -turned[(i / 16 * R + t) * 16 + i % 16] : -turned[(t / 16 * R + i) * 16 + t % 16]);
      for (int w = 0; w < W; ++w) sums[w] = mul_add(factor, load<V>(z + (w * R + i) * 16), sums[w]);
    }
    for (int w = 0; w < W; ++w) {
      store(x + (w * R + t) * 16, sums[w]);
      store(z + (w * R + t) * 16, sums[w] * beta[t]);
    }
  }
}

template <bool kFromLast, class A>
void solve(const A* turned, const A* beta, std::int64_t R, std::int64_t columns, A* x, A* z) {
  constexpr int W = kRegisterBytes > 32 ? 4 : 2;
  std::int64_t n = 0;
  for (; n + 16 * W <= columns; n += 16 * W) solve_strips<W, kFromLast>(turned, beta, R, x + n * R, z + n * R);
  for (; n < columns; n += 16) solve_strips<1, kFromLast>(turned, beta, R, x + n * R, z + n * R);
}

/// d_x of y = x * scale * inverse(x), `inverse` from l2_normalised; d_y in strips of R rows.
template <class T>
void l2_backward(const T* x, std::int64_t n, accumulate_t<T> scale, const accumulate_t<T>* d_y, std::int64_t R,
                 T* d_x) {
  using A = accumulate_t<T>;
  using V = Wide<T>;
  const A inverse = A(1) / std::sqrt(sum_of_squares(x, n) + static_cast<A>(kL2Epsilon));
  V products{};
  for (std::int64_t i = 0; i < n; i += 16) products = mul_add(load<V>(x + i), load<V>(d_y + i * R), products);
  const A along = sum_of(products) * inverse * inverse;
  for (std::int64_t i = 0; i < n; i += 16)
    store(d_x + i, (load<V>(d_y + i * R) - load<V>(x + i) * along) * (inverse * scale));
}

/// exp(x) below this x counts as 0: products with it would be subnormal, which takes a processor a hundred cycles.
constexpr double kLeastExponent = -60;

/// The value heads of one key head. Matrices are in strips (strips.h). A chunk has R rows: those of the text, and zeros
/// up to a multiple of 16.
template <Recurrence kRule, class T>
class ChunkedBackward {
  using A = accumulate_t<T>;
  using V = Vec<A, 16>;
  static constexpr bool kReadsByKey = kRule == Recurrence::gated_delta;

 public:
  ChunkedBackward(const RecurrenceArgs<T>& p, const RecurrenceGradients<T>& g, std::int64_t start, std::int64_t length,
                  std::int64_t key_head, A* scratch)
      : p_(p), g_(g), start_(start), length_(length), key_head_(key_head), next_(scratch) {
    states_ = take(chunks() * group_ * dk_ * dv_);
    x_ = take(chunks() * group_ * kRows * dv_);
    for (A** keys :
         {&query_, &key_, &query_turned_, &key_turned_, &d_query_, &d_key_, &by_out_, &by_value_, &by_delta_})
      *keys = take(kRows * dk_);
    for (A** values : {&d_out_, &delta_, &d_delta_, &d_value_, &out_turned_, &value_turned_, &delta_turned_, &spare_})
      *values = take(kRows * dv_);
    for (A** squares :
         {&ratio_, &key_query_, &key_key_, &p_turned_, &n_turned_, &d_p_turned_, &d_n_turned_, &d_p_, &d_n_})
      *squares = take(kRows * kRows);
  }

  /// `state` [group, dk, dv] before the first row. `d_state` becomes from the gradient of the state after the last row
  /// that of `state`.
  void run(const A* state, A* d_state) {
    copy(state, group_ * dk_ * dv_, states_);
    for (std::int64_t chunk = 0; chunk < chunks(); ++chunk) {
      enter(chunk, /*with_queries=*/false);
      for (std::int64_t head = 0; head < group_; ++head) advance(chunk, head);
    }
    for (std::int64_t chunk = chunks(); chunk-- > 0;) {
      enter(chunk, /*with_queries=*/true);
      fill(d_query_, kRows * dk_, A(0));
      fill(d_key_, kRows * dk_, A(0));
      for (std::int64_t head = 0; head < group_; ++head) go_back(chunk, head, d_state + head * dk_ * dv_);
      store_keys();
    }
  }

 private:
  A* take(std::int64_t count) {
    A* const part = next_;
    next_ += count;
    return part;
  }
  std::int64_t chunks() const { return (length_ + kDeltaChunk - 1) / kDeltaChunk; }
  A* state_of(std::int64_t chunk, std::int64_t head) const { return states_ + (chunk * group_ + head) * dk_ * dv_; }
  A* x_of(std::int64_t chunk, std::int64_t head) const { return x_ + (chunk * group_ + head) * kRows * dv_; }
  std::int64_t value_head(std::int64_t head) const { return key_head_ * group_ + head; }
  /// Offset of row t of the chunk in q and k.
  std::int64_t key_place(std::int64_t t) const { return (first_ + t) * p_.stride_qkv + key_head_ * dk_; }
  const T* values_at(std::int64_t t, std::int64_t head) const {
    return p_.v + (first_ + t) * p_.stride_qkv + value_head(head) * dv_;
  }

  /// Queries and keys of a chunk, and their products.
  void enter(std::int64_t chunk, bool with_queries) {
    const std::int64_t begin = chunk * kDeltaChunk;
    first_ = start_ + begin;
    rows_ = smaller(kDeltaChunk, length_ - begin);
    R_ = (rows_ + 15) / 16 * 16;
    fill(query_, R_ * dk_, A(0));
    fill(key_, R_ * dk_, A(0));
    for (std::int64_t t = 0; t < rows_; ++t) {
      if (with_queries) read_key<kRule>(p_.q + key_place(t), dk_, query_scale<A>(p_.shape), query_ + t * 16, R_ * 16);
      read_key<kRule>(p_.k + key_place(t), dk_, A(1), key_ + t * 16, R_ * 16);
    }
    turn(key_, R_, dk_, key_turned_);
    if constexpr (kReadsByKey) multiply<false>(key_, key_turned_, key_key_, R_, R_, dk_, false);
    if (!with_queries) return;
    turn(query_, R_, dk_, query_turned_);
    multiply<false>(key_, query_turned_, key_query_, R_, R_, dk_, false);
  }

  /// The gates of a chunk's rows for one value head. Rows of zeros have beta 0 and decay 1.
  void enter_head(std::int64_t head) {
    double total = 0;
    for (std::int64_t t = 0; t < R_; ++t) {
      if (t < rows_) gates_[t] = gates_at<kRule>(p_, first_ + t, value_head(head));
      if (t < rows_) total += static_cast<double>(gates_[t].log_decay);
      beta_[t] = t < rows_ ? gates_[t].beta : A(0);
      sum_[t] = total;
      gamma_[t] = factor(total);
    }
    for (std::int64_t i = 0; i < R_; ++i) {
      rest_[i] = factor(total - sum_[i]);
      for (std::int64_t n = 0; n < R_; n += 16) {
        alignas(64) A exponents[16];
        for (std::int64_t t = 0; t < 16; ++t)
          exponents[t] = static_cast<A>(n + t < i ? 2 * kLeastExponent : sum_[n + t] - sum_[i]);
        V x = load<V>(exponents);
        store(ratio_ + (n * R_ + i * 16), select(x < V(kLeastExponent), V{}, exp_of(x)));
      }
    }
    if constexpr (kReadsByKey) {
      scale_lanes(key_key_, ratio_, n_turned_);
      for (std::int64_t t = 0; t < R_; ++t) n_turned_[(t / 16 * R_ + t) * 16 + t % 16] = A(0);
    }
  }

  static A factor(double exponent) { return exponent < kLeastExponent ? A(0) : static_cast<A>(std::exp(exponent)); }

  /// y = x * factors, of [R, R].
  void scale_lanes(const A* x, const A* factors, A* y) const {
    for (std::int64_t i = 0; i < R_ * R_; i += 16) store(y + i, load<V>(x + i) * load<V>(factors + i));
  }
  /// y = x [R, dv] times a factor for each row.
  void scale_rows(const A* x, const A* factors, A sign, A* y) const {
    for (std::int64_t n = 0; n < dv_; n += 16)
      for (std::int64_t t = 0; t < R_; ++t)
        store(y + n * R_ + t * 16, load<V>(x + n * R_ + t * 16) * (sign * factors[t]));
  }
  void scale_state(const A* state, A factor, A* y) const {
    for (std::int64_t i = 0; i < dk_ * dv_; i += 16) store(y + i, load<V>(state + i) * factor);
  }

  /// x of a chunk, and the state after it.
  void advance(std::int64_t chunk, std::int64_t head) {
    enter_head(head);
    const A* const state = state_of(chunk, head);
    A* const x = x_of(chunk, head);
    if constexpr (kReadsByKey) multiply<false>(key_, state, x, R_, dv_, dk_, false);
    for (std::int64_t n = 0; n < dv_; n += 16)
      for (std::int64_t t = 0; t < R_; ++t) {
        V value = t < rows_ ? load<V>(values_at(t, head) + n) : V{};
        if constexpr (kReadsByKey) value = value - load<V>(x + n * R_ + t * 16) * gamma_[t];
        store(x + n * R_ + t * 16, value);
      }
    if constexpr (kReadsByKey) solve</*kFromLast=*/false>(n_turned_, beta_, R_, dv_, x, delta_);
    else scale_rows(x, beta_, A(1), delta_);
    if (chunk + 1 == chunks()) return;
    A* const after = state_of(chunk + 1, head);
    scale_state(state, gamma_[R_ - 1], after);
    scale_rows(delta_, rest_, A(1), spare_);
    multiply<true>(key_, spare_, after, dk_, dv_, R_, true);
  }

  /// Gradients of a chunk for one value head, from that of the state after it; `d_state` becomes that of the state
  /// before it.
  void go_back(std::int64_t chunk, std::int64_t head, A* d_state) {
    enter_head(head);
    const A *const state = state_of(chunk, head), *const x = x_of(chunk, head);
    scale_lanes(key_query_, ratio_, p_turned_);
    for (std::int64_t n = 0; n < dv_; n += 16)
      for (std::int64_t t = 0; t < R_; ++t)
        store(d_out_ + n * R_ + t * 16,
              t < rows_ ? load<V>(g_.d_out + (first_ + t) * g_.stride_out + value_head(head) * dv_ + n) : V{});
    scale_rows(x, beta_, A(1), delta_);
    multiply<false>(key_, d_state, spare_, R_, dv_, dk_, false);
    scale_rows(spare_, rest_, A(1), d_delta_);
    multiply<false>(p_turned_, d_out_, d_delta_, R_, dv_, R_, true);
    if constexpr (kReadsByKey) solve</*kFromLast=*/true>(n_turned_, beta_, R_, dv_, d_delta_, d_value_);
    else scale_rows(d_delta_, beta_, A(1), d_value_);
    store_values(head);
    turn(d_out_, R_, dv_, out_turned_);
    turn(delta_, R_, dv_, delta_turned_);
    multiply<false>(state, out_turned_, by_out_, dk_, R_, dv_, false);
    multiply<false>(d_state, delta_turned_, by_delta_, dk_, R_, dv_, false);
    multiply<false>(delta_, out_turned_, d_p_turned_, R_, R_, dv_, false);
    if constexpr (kReadsByKey) {
      turn(d_value_, R_, dv_, value_turned_);
      multiply<false>(state, value_turned_, by_value_, dk_, R_, dv_, false);
      multiply<false>(delta_, value_turned_, d_n_turned_, R_, R_, dv_, false);
    }
    gate_gradients(head, x, gamma_[R_ - 1] * product_of(state, d_state));
    key_gradients();
    scale_state(d_state, gamma_[R_ - 1], d_state);
    scale_rows(d_out_, gamma_, A(1), spare_);
    multiply<true>(query_, spare_, d_state, dk_, dv_, R_, true);
    if constexpr (kReadsByKey) {
      scale_rows(d_value_, gamma_, A(-1), spare_);
      multiply<true>(key_, spare_, d_state, dk_, dv_, R_, true);
    }
  }

  /// The chunk's gradients of the values, and in Mamba-2 of D.
  void store_values(std::int64_t head) const {
    const std::int64_t u = value_head(head);
    for (std::int64_t t = 0; t < rows_; ++t) {
      T* const to = g_.d_v + (first_ + t) * g_.stride_qkv + u * dv_;
      V products{};
      for (std::int64_t n = 0; n < dv_; n += 16) {
        V d = load<V>(d_value_ + n * R_ + t * 16);
        if constexpr (!kReadsByKey) {
          V out = load<V>(d_out_ + n * R_ + t * 16);
          products = mul_add(out, load<V>(values_at(t, head) + n), products);
          d = mul_add(out, V(static_cast<A>(p_.D[u])), d);
        }
        store(to + n, d);
      }
      if constexpr (!kReadsByKey) g_.d_D[(first_ + t) * p_.shape.value_heads + u] = sum_of(products);
    }
  }

  /// The sum of the products of two states' elements.
  A product_of(const A* state, const A* other) const {
    V sums[4];
    for (auto& sum : sums) sum = V{};
    for (std::int64_t i = 0; i < dk_ * dv_; i += 64)
      for (int j = 0; j < 4; ++j) sums[j] = mul_add(load<V>(state + i + j * 16), load<V>(other + i + j * 16), sums[j]);
    return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }

  /// Adds the chunk's gradients of queries and keys, [dk, R].
  void key_gradients() {
    for (std::int64_t n = 0; n < R_; n += 16)
      for (std::int64_t i = n * dk_; i < (n + 16) * dk_; i += 16) {
        V gamma = load<V>(gamma_ + n), rest = load<V>(rest_ + n);
        store(d_query_ + i, mul_add(load<V>(by_out_ + i), gamma, load<V>(d_query_ + i)));
        V from_delta = mul_add(load<V>(by_delta_ + i), rest, load<V>(d_key_ + i));
        if constexpr (kReadsByKey) from_delta = from_delta - load<V>(by_value_ + i) * gamma;
        store(d_key_ + i, from_delta);
      }
    scale_lanes(d_p_turned_, ratio_, d_p_turned_);
    turn(d_p_turned_, R_, R_, d_p_);
    multiply<true>(key_, d_p_turned_, d_query_, dk_, R_, R_, true);
    multiply<true>(query_, d_p_, d_key_, dk_, R_, R_, true);
    if constexpr (!kReadsByKey) return;
    scale_lanes(d_n_turned_, ratio_, d_n_turned_);
    for (std::int64_t t = 0; t < R_; ++t) d_n_turned_[(t / 16 * R_ + t) * 16 + t % 16] = A(0);
    turn(d_n_turned_, R_, R_, d_n_);
    for (std::int64_t i = 0; i < R_ * R_; i += 16) store(d_n_ + i, -(load<V>(d_n_ + i) + load<V>(d_n_turned_ + i)));
    multiply<true>(key_, d_n_, d_key_, dk_, R_, R_, true);
  }

  /// The decay of row s acts on all that goes from the rows before it, and from the state before the chunk, to row s
  /// and those after it, and to the state after the chunk. `whole`: what goes from state to state.
  void gate_gradients(std::int64_t head, const A* x, A whole) {
    alignas(64) A to_row[kRows], from_row[kRows], between[kRows];
    for (std::int64_t n = 0; n < R_; n += 16) {
      V to{}, from{};
      for (std::int64_t i = n * dk_; i < (n + 16) * dk_; i += 16) {
        to = mul_add(load<V>(query_turned_ + i), load<V>(by_out_ + i), to);
        if constexpr (kReadsByKey) to = to - load<V>(key_turned_ + i) * load<V>(by_value_ + i);
        from = mul_add(load<V>(key_turned_ + i), load<V>(by_delta_ + i), from);
      }
      store(to_row + n, to * load<V>(gamma_ + n));
      store(from_row + n, from * load<V>(rest_ + n));
      store(between + n, V{});
    }
    for (std::int64_t t = R_ - 1; t-- > 0;) to_row[t] += to_row[t + 1];
    A from_rows = A(0), d_log_decay[kRows];
    for (std::int64_t s = 0; s < rows_; ++s) {
      V pairs{};
      for (std::int64_t n = 0; n < R_; n += 16) pairs += load<V>(between + n);
      d_log_decay[s] = sum_of(pairs) + to_row[s] + from_rows + whole;
      for (std::int64_t n = 0; n < R_; n += 16) {
        const std::int64_t i = n * R_ + s * 16;
        V own = load<V>(p_turned_ + i) * load<V>(d_p_turned_ + i);
        if constexpr (kReadsByKey) own = own - load<V>(n_turned_ + i) * load<V>(d_n_turned_ + i);
        store(between + n, load<V>(between + n) + own);
      }
      fill(between, s + 1, A(0));
      from_rows += from_row[s];
    }
    store_gates(head, x, d_log_decay);
  }

  void store_gates(std::int64_t head, const A* x, const A* d_log_decay) const {
    const std::int64_t u = value_head(head), U = p_.shape.value_heads;
    for (std::int64_t t = 0; t < rows_; ++t) {
      V products{};
      for (std::int64_t n = 0; n < dv_; n += 16)
        products = mul_add(load<V>(x + n * R_ + t * 16), load<V>(d_delta_ + n * R_ + t * 16), products);
      const auto& gates = gates_[t];
      const std::int64_t row = first_ + t;
      A d_a = -d_log_decay[t] * gates.rate * gates.slope;
      if constexpr (kReadsByKey)
        g_.d_b[row * g_.stride_ab + u] = static_cast<T>(sum_of(products) * gates.beta * (A(1) - gates.beta));
      else d_a += sum_of(products) * gates.slope;
      g_.d_a[row * g_.stride_ab + u] = static_cast<T>(d_a);
      g_.d_dt_bias[row * U + u] = d_a;
      g_.d_A_log[row * U + u] = d_log_decay[t] * gates.log_decay;
    }
  }

  /// The chunk's gradients of queries and keys as they were before their norms.
  void store_keys() {
    turn(d_query_, dk_, R_, by_out_);
    turn(d_key_, dk_, R_, by_value_);
    for (std::int64_t t = 0; t < rows_; ++t) {
      const std::int64_t to = (first_ + t) * g_.stride_qkv + key_head_ * dk_;
      store_key(p_.q + key_place(t), query_scale<A>(p_.shape), by_out_ + t * 16, g_.d_q + to);
      store_key(p_.k + key_place(t), A(1), by_value_ + t * 16, g_.d_k + to);
    }
  }
  void store_key(const T* x, A scale, const A* d_y, T* d_x) const {
    if constexpr (kReadsByKey) return l2_backward(x, dk_, scale, d_y, R_, d_x);
    for (std::int64_t i = 0; i < dk_; i += 16) store(d_x + i, load<V>(d_y + i * R_));
  }

  static constexpr std::int64_t kRows = kDeltaChunk;
  const RecurrenceArgs<T>& p_;
  const RecurrenceGradients<T>& g_;
  const std::int64_t start_, length_, key_head_;
  const std::int64_t group_ = p_.shape.group(), dk_ = p_.shape.key_dim, dv_ = p_.shape.value_dim;
  A* next_;                        ///< scratch memory that is left
  A *states_, *x_;                 ///< [chunks, group, dk, dv] before each chunk; [chunks, group, R, dv]
  std::int64_t first_, rows_, R_;  ///< of the chunk
  A *query_, *key_;                ///< [R, dk], normalised
  A *query_turned_, *key_turned_, *d_query_, *d_key_;  ///< [dk, R]
  A *by_out_, *by_value_, *by_delta_;                  ///< [dk, R]: the states times d_out, d_value and delta
  A *d_out_, *delta_, *d_delta_, *d_value_, *spare_;   ///< [R, dv]
  A *out_turned_, *value_turned_, *delta_turned_;      ///< [dv, R]: of d_out, d_value and delta
  A* ratio_;                                           ///< [R, R]: Gamma_ti in row i, column t
  A *key_query_, *key_key_;                            ///< [R, R]: K Q^T and K K^T
  A *p_turned_, *n_turned_, *d_p_turned_, *d_n_turned_, *d_p_, *d_n_;  ///< [R, R]
  DeltaGates<A> gates_[kRows];
  double sum_[kRows];  ///< G
  alignas(64) A beta_[kRows];
  alignas(64) A gamma_[kRows];
  alignas(64) A rest_[kRows];  ///< gamma_R / gamma_i
};

template <class T>
void backward(const RecurrenceArgs<T>& p, const RecurrenceGradients<T>& g, std::int64_t start, std::int64_t length,
              std::int64_t key_head, const accumulate_t<T>* state, accumulate_t<T>* d_state, accumulate_t<T>* scratch) {
  if (p.shape.is_mamba2())
    ChunkedBackward<Recurrence::mamba2, T>(p, g, start, length, key_head, scratch).run(state, d_state);
  else ChunkedBackward<Recurrence::gated_delta, T>(p, g, start, length, key_head, scratch).run(state, d_state);
}

}  // namespace

void recurrence_backward_f32(const RecurrenceArgs<float>& p, const RecurrenceGradients<float>& g, std::int64_t start,
                             std::int64_t length, std::int64_t key_head, const float* state, float* d_state,
                             float* scratch) {
  backward(p, g, start, length, key_head, state, d_state, scratch);
}
void recurrence_backward_f64(const RecurrenceArgs<double>& p, const RecurrenceGradients<double>& g, std::int64_t start,
                             std::int64_t length, std::int64_t key_head, const double* state, double* d_state,
                             double* scratch) {
  backward(p, g, start, length, key_head, state, d_state, scratch);
}
void recurrence_backward_bf16(const RecurrenceArgs<bfloat16>& p, const RecurrenceGradients<bfloat16>& g,
                              std::int64_t start, std::int64_t length, std::int64_t key_head, const float* state,
                              float* d_state, float* scratch) {
  backward(p, g, start, length, key_head, state, d_state, scratch);
}

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
