#include "kernels/cpu/gated_delta_keys.h"
#include "kernels/cpu/plain.h"
#include "kernels/gated_delta.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

/// The scratch of one call, for `length` rows.
template <class A>
struct Scratch {
  Scratch(A* memory, std::int64_t length, std::int64_t dk)
      : query(memory),
        key(query + length * dk),
        d_query(key + length * dk),
        d_key(d_query + length * dk),
        d_beta(d_key + length * dk),
        d_log_decay(d_beta + length),
        m(d_log_decay + length),
        delta(m + kDeltaPiece * kDeltaStrips * kStrip),
        states(delta + kDeltaPiece * kDeltaStrips * kStrip),
        pieces(states + (kDeltaPiece + 1) * kDeltaStrips * kStrip * dk) {}
  A *query, *key;           ///< [length, dk] normalised
  A *d_query, *d_key;       ///< [length, dk]
  A *d_beta, *d_log_decay;  ///< [length] of one value head
  A *m, *delta;             ///< [kDeltaPiece, strips]
  A* states;                ///< before each row of a piece, and behind its last
  A* pieces;                ///< before each piece
};

/// The first register of a Vec, to which the others are added.
template <class A>
NRL_VEC ShortVec<A> folded_once(Vec<A, 16> v) {
  if constexpr (ShortVec<A>::kLanes == 16) {
    return v;
  } else {
    ShortVec<A> sum;
    for (int i = 0; i < sum.kParts; ++i) sum.part[i] = v.part[i];
    for (int i = sum.kParts; i < v.kParts; ++i) sum.part[i % sum.kParts] = sum.part[i % sum.kParts] + v.part[i];
    return sum;
  }
}

/// out[k] += the sum over the lanes of term(k), for k of [0, dk).
template <class A, class Term>
NRL_VEC void add_row_sums(std::int64_t dk, A* out, const Term& term) {
  using V = ShortVec<A>;
  constexpr int L = V::kLanes;
  for (std::int64_t k = 0; k < dk; k += L) {
    V rows[L];
    for (int i = 0; i < L; ++i) rows[i] = folded_once<A>(term(k + i));
    transpose(rows);
    V sum = rows[0];
    for (int i = 1; i < L; ++i) sum += rows[i];
    store(out + k, load<V>(out + k) + sum);
  }
}

/// Strips [strip, strip + W) of value head `head`.
template <int W, class T>
class StripBackward {
  using A = accumulate_t<T>;
  using V = Vec<A, 16>;

 public:
  StripBackward(const GatedDeltaArgs<T>& p, const GatedDeltaGradients<T>& g, std::int64_t start, std::int64_t length,
                std::int64_t head, std::int64_t strip, const Scratch<A>& scratch)
      : p_(p), g_(g), start_(start), length_(length), head_(head), strip_(strip), s_(scratch) {}

  void run(const A* state, A* d_state) {
    const std::int64_t part = W * kStrip * dk(), pieces = (length_ + kDeltaPiece - 1) / kDeltaPiece;
    copy(state, part, s_.pieces);
    for (std::int64_t i = 0; i + 1 < pieces; ++i) {
      copy(s_.pieces + i * part, part, s_.pieces + (i + 1) * part);
      for (std::int64_t t = i * kDeltaPiece; t < (i + 1) * kDeltaPiece; ++t)
        advance(t, s_.pieces + (i + 1) * part, s_.pieces + (i + 1) * part, 0);
    }
    for (std::int64_t i = pieces; i-- > 0;) {
      const std::int64_t begin = i * kDeltaPiece, end = begin + kDeltaPiece < length_ ? begin + kDeltaPiece : length_;
      copy(s_.pieces + i * part, part, s_.states);
      for (std::int64_t t = begin; t < end; ++t)
        advance(t, s_.states + (t - begin) * part, s_.states + (t - begin + 1) * part, t - begin);
      for (std::int64_t t = end; t-- > begin;) step(t, t - begin, s_.states + (t - begin) * part, part, d_state);
    }
  }

 private:
  std::int64_t dk() const { return p_.shape.key_dim; }
  std::int64_t column() const { return head_ * p_.shape.value_dim + strip_ * kStrip; }
  const T* value(std::int64_t t) const {
    return p_.qkv + (start_ + t) * p_.stride_qkv + 2 * p_.shape.key_size() + column();
  }

  void advance(std::int64_t t, const A* before, A* after, std::int64_t place) {
    const auto gates = gates_at(p_, start_ + t, head_);
    V v[W], m[W], delta[W], none[W];
    for (int w = 0; w < W; ++w) v[w] = load<V>(value(t) + w * kStrip);
    update_state<W, false>(before, after, dk() * kStrip, dk(), s_.key + t * dk(), v, gates.decay, gates.beta, m, delta,
                           static_cast<const A*>(nullptr), none);
    for (int w = 0; w < W; ++w) {
      store(s_.m + (place * W + w) * kStrip, m[w]);
      store(s_.delta + (place * W + w) * kStrip, delta[w]);
    }
  }

  /// Row t, whose state before it is `before`, that behind it `part` elements on. `d_state` becomes the gradient of
  /// `before`.
  void step(std::int64_t t, std::int64_t place, const A* before, std::int64_t part, A* d_state) {
    const auto gates = gates_at(p_, start_ + t, head_);
    const std::int64_t strip = dk() * kStrip;
    const A *query = s_.query + t * dk(), *key = s_.key + t * dk(), *after = before + part;
    V d_out[W], d_delta[W], d_m[W], m[W], delta[W], d_decay{};
    for (int w = 0; w < W; ++w) {
      d_out[w] = load<V>(g_.d_out + (start_ + t) * g_.stride_out + column() + w * kStrip);
      m[w] = load<V>(s_.m + (place * W + w) * kStrip);
      delta[w] = load<V>(s_.delta + (place * W + w) * kStrip);
      d_delta[w] = V{};
    }
    add_row_sums(dk(), s_.d_query + t * dk(), [&](std::int64_t k) __attribute__((always_inline)) {
      V sum{}, q(query[k]), own_key(key[k]);
      for (int w = 0; w < W; ++w) {
        A* const place_of = d_state + w * strip + k * kStrip;
        V g = mul_add(q, d_out[w], load<V>(place_of));
        store(place_of, g);
        d_delta[w] = mul_add(g, own_key, d_delta[w]);
        sum = mul_add(load<V>(after + w * strip + k * kStrip), d_out[w], sum);
      }
      return sum;
    });
    V beta_terms{}, m_terms{};
    T* const d_value = g_.d_qkv + (start_ + t) * g_.stride_qkv + 2 * p_.shape.key_size() + column();
    for (int w = 0; w < W; ++w) {
      V d_v = d_delta[w] * gates.beta;
      store(d_value + w * kStrip, d_v);
      d_m[w] = -d_v;
      beta_terms = mul_add(d_delta[w], load<V>(value(t) + w * kStrip) - m[w], beta_terms);
      m_terms = mul_add(d_m[w], m[w], m_terms);
    }
    V decay(gates.decay);
    add_row_sums(dk(), s_.d_key + t * dk(), [&](std::int64_t k) __attribute__((always_inline)) {
      V sum{}, own_key(key[k]);
      for (int w = 0; w < W; ++w) {
        A* const place_of = d_state + w * strip + k * kStrip;
        V g = load<V>(place_of), state = load<V>(before + w * strip + k * kStrip);
        sum = mul_add(g, delta[w], sum);
        sum = mul_add(state * decay, d_m[w], sum);
        d_decay = mul_add(g, state, d_decay);
        store(place_of, mul_add(own_key, d_m[w], g) * decay);
      }
      return sum;
    });
    s_.d_beta[t] += sum_of(beta_terms);
    s_.d_log_decay[t] += gates.decay * sum_of(d_decay) + sum_of(m_terms);
  }

  const GatedDeltaArgs<T>& p_;
  const GatedDeltaGradients<T>& g_;
  const std::int64_t start_, length_, head_, strip_;
  const Scratch<A>& s_;
};

/// d_x of y = x · scale · inverse(x), `inverse` from l2_normalised.
template <class T>
void l2_backward(const T* x, std::int64_t n, accumulate_t<T> scale, const accumulate_t<T>* d_y, T* d_x) {
  using A = accumulate_t<T>;
  using V = Wide<T>;
  const A inverse = A(1) / std::sqrt(sum_of_squares(x, n) + static_cast<A>(kL2Epsilon));
  V products{};
  for (std::int64_t i = 0; i < n; i += 16) products = mul_add(load<V>(x + i), load<V>(d_y + i), products);
  const A along = sum_of(products) * inverse * inverse;
  for (std::int64_t i = 0; i < n; i += 16)
    store(d_x + i, (load<V>(d_y + i) - load<V>(x + i) * along) * (inverse * scale));
}

template <class T>
void gate_gradients(const GatedDeltaArgs<T>& p, const GatedDeltaGradients<T>& g, std::int64_t start,
                    std::int64_t length, std::int64_t head, const Scratch<accumulate_t<T>>& s) {
  using A = accumulate_t<T>;
  for (std::int64_t t = 0; t < length; ++t) {
    const auto gates = gates_at(p, start + t, head);
    const std::int64_t row = start + t, U = p.shape.value_heads;
    const A d_a = -s.d_log_decay[t] * gates.rate * gates.slope;
    g.d_b[row * g.stride_ab + head] = static_cast<T>(s.d_beta[t] * gates.beta * (A(1) - gates.beta));
    g.d_a[row * g.stride_ab + head] = static_cast<T>(d_a);
    g.d_dt_bias[row * U + head] = d_a;
    g.d_A_log[row * U + head] = s.d_log_decay[t] * gates.log_decay;
  }
}

template <class T>
void backward(const GatedDeltaArgs<T>& p, const GatedDeltaGradients<T>& g, std::int64_t start, std::int64_t length,
              std::int64_t key_head, const accumulate_t<T>* state, accumulate_t<T>* d_state, accumulate_t<T>* memory) {
  using A = accumulate_t<T>;
  const auto& shape = p.shape;
  const std::int64_t dk = shape.key_dim, strips = shape.value_dim / kStrip;
  const Scratch<A> s(memory, length, dk);
  const auto queries = [&](std::int64_t t) { return (start + t) * p.stride_qkv + key_head * dk; };
  for (std::int64_t t = 0; t < length; ++t) {
    l2_normalised(p.qkv + queries(t), dk, query_scale<A>(shape), s.query + t * dk);
    l2_normalised(p.qkv + queries(t) + shape.key_size(), dk, A(1), s.key + t * dk);
  }
  fill(s.d_query, 2 * length * dk, A(0));
  for (std::int64_t i = 0; i < shape.group(); ++i) {
    const std::int64_t head = key_head * shape.group() + i, offset = i * shape.state_size();
    fill(s.d_beta, 2 * length, A(0));
    std::int64_t strip = 0;
    for (; strip + kDeltaStrips <= strips; strip += kDeltaStrips)
      StripBackward<kDeltaStrips, T>(p, g, start, length, head, strip, s)
          .run(state + offset + strip * dk * kStrip, d_state + offset + strip * dk * kStrip);
    for (; strip < strips; ++strip)
      StripBackward<1, T>(p, g, start, length, head, strip, s)
          .run(state + offset + strip * dk * kStrip, d_state + offset + strip * dk * kStrip);
    gate_gradients(p, g, start, length, head, s);
  }
  for (std::int64_t t = 0; t < length; ++t) {
    T* const d_q = g.d_qkv + (start + t) * g.stride_qkv + key_head * dk;
    l2_backward(p.qkv + queries(t), dk, query_scale<A>(shape), s.d_query + t * dk, d_q);
    l2_backward(p.qkv + queries(t) + shape.key_size(), dk, A(1), s.d_key + t * dk, d_q + shape.key_size());
  }
}

}  // namespace

void gated_delta_backward_f32(const GatedDeltaArgs<float>& p, const GatedDeltaGradients<float>& g, std::int64_t start,
                              std::int64_t length, std::int64_t key_head, const float* state, float* d_state,
                              float* scratch) {
  backward(p, g, start, length, key_head, state, d_state, scratch);
}
void gated_delta_backward_f64(const GatedDeltaArgs<double>& p, const GatedDeltaGradients<double>& g, std::int64_t start,
                              std::int64_t length, std::int64_t key_head, const double* state, double* d_state,
                              double* scratch) {
  backward(p, g, start, length, key_head, state, d_state, scratch);
}
void gated_delta_backward_bf16(const GatedDeltaArgs<bfloat16>& p, const GatedDeltaGradients<bfloat16>& g,
                               std::int64_t start, std::int64_t length, std::int64_t key_head, const float* state,
                               float* d_state, float* scratch) {
  backward(p, g, start, length, key_head, state, d_state, scratch);
}

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
