// Mamba-2's recurrence: values against a plain loop, the same bits for any pieces, and gradients against differences.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/random.h"
#include "kernels/gated_delta.h"

namespace nemo_rl::kernels {
namespace {

constexpr std::int64_t kTokens = 41;

RecurrentShape shape_of(std::int64_t key_dim, std::int64_t value_dim) {
  RecurrentShape s{1, 2, key_dim, value_dim, 4, Recurrence::mamba2};
  s.least_step = 0.3, s.greatest_step = 2;
  return s;
}

/// Numbers between -2 and 2.
template <class T>
std::vector<T> drawn(std::int64_t n, std::uint32_t seed) {
  std::vector<T> x(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < x.size(); ++i)
    x[i] = static_cast<T>(random_bits({seed, RandomStream::init, 0, 0, static_cast<std::uint32_t>(i)})[0] * 0x1.0p-30 -
                          2.0);
  return x;
}

/// A row is [v | k | q], as behind the convolution.
template <class T>
struct Inputs {
  explicit Inputs(const RecurrentShape& s)
      : shape(s),
        vkq(drawn<T>(kTokens * s.conv_size(), 1)),
        a(drawn<T>(kTokens * s.value_heads, 2)),
        A_log(drawn<T>(s.value_heads, 3)),
        dt_bias(drawn<T>(s.value_heads, 4)),
        D(drawn<T>(s.value_heads, 5)) {}
  RecurrenceArgs<T> args() const {
    const T* const k = vkq.data() + shape.value_size();
    return {k + shape.key_size(),
            k,
            vkq.data(),
            shape.conv_size(),
            nullptr,
            a.data(),
            shape.value_heads,
            A_log.data(),
            dt_bias.data(),
            D.data(),
            shape};
  }
  std::vector<std::vector<T>*> all() { return {&vkq, &a, &A_log, &dt_bias, &D}; }
  RecurrentShape shape;
  std::vector<T> vkq, a, A_log, dt_bias, D;
};

void forward(const RecurrenceArgs<float>& p, std::int64_t start, std::int64_t length, std::int64_t head, float* state,
             float* out) {
  recurrence_forward_f32(p, start, length, head, state, out, p.shape.value_size());
}
void forward(const RecurrenceArgs<double>& p, std::int64_t start, std::int64_t length, std::int64_t head, double* state,
             double* out) {
  recurrence_forward_f64(p, start, length, head, state, out, p.shape.value_size());
}

template <class T>
std::vector<T> result(const Inputs<T>& in, std::int64_t piece) {
  std::vector<T> out(static_cast<std::size_t>(kTokens * in.shape.value_size()));
  for (std::int64_t head = 0; head < in.shape.value_heads; ++head) {
    std::vector<T> state(static_cast<std::size_t>(in.shape.state_size()));
    for (std::int64_t start = 0; start < kTokens; start += piece)
      forward(in.args(), start, std::min(piece, kTokens - start), head, state.data(), out.data());
  }
  return out;
}

std::vector<double> plain(const Inputs<double>& in) {
  const auto& s = in.shape;
  const auto p = in.args();
  std::vector<double> out;
  std::vector<double> state(static_cast<std::size_t>(s.value_heads * s.state_size()));
  for (std::int64_t t = 0; t < kTokens; ++t)
    for (std::int64_t u = 0; u < s.value_heads; ++u) {
      const double x = in.a[t * s.value_heads + u] + in.dt_bias[u];
      const double step = std::min(std::max(std::log1p(std::exp(x)), s.least_step), s.greatest_step);
      const double decay = std::exp(-std::exp(in.A_log[u]) * step);
      const double *const k = p.k + t * p.stride_qkv, *const q = p.q + t * p.stride_qkv;
      for (std::int64_t n = 0; n < s.value_dim; ++n) {
        const double v = p.v[t * p.stride_qkv + u * s.value_dim + n];
        double sum = 0;
        for (std::int64_t i = 0; i < s.key_dim; ++i) {
          auto& own = state[static_cast<std::size_t>((u * s.value_dim + n) * s.key_dim + i)];
          own = decay * own + k[i] * step * v;
          sum += own * q[i];
        }
        out.push_back(sum + in.D[u] * v);
      }
    }
  return out;
}

double dot(const std::vector<double>& x, const std::vector<double>& y) {
  double sum = 0;
  for (std::size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i];
  return sum;
}

TEST(Recurrence, Mamba2OutputMatchesAPlainLoop) {
  for (const std::int64_t value_dim : {16, 80}) {
    const Inputs<double> in(shape_of(32, value_dim));
    const auto expected = plain(in), ours = result(in, kTokens);
    ASSERT_EQ(ours.size(), expected.size());
    for (std::size_t i = 0; i < ours.size(); ++i)
      EXPECT_NEAR(ours[i], expected[i], 1e-10 * (1 + std::abs(expected[i])));
  }
}

TEST(Recurrence, Mamba2OutputIsBitIdenticalForAnyChunkLength) {
  for (const std::int64_t value_dim : {16, 64, 80}) {
    const Inputs<float> in(shape_of(128, value_dim));
    const auto whole = result(in, kTokens);
    for (const std::int64_t piece : {1, 2, 7, 16, 40}) EXPECT_EQ(result(in, piece), whole) << piece;
  }
}

TEST(Recurrence, Mamba2GradientsMatchFiniteDifferences) {
  const auto s = shape_of(32, 80);
  Inputs<double> in(s);
  const auto d_out = drawn<double>(kTokens * s.value_size(), 6);
  Inputs<double> d(s), rows(s);
  for (auto* x : {&rows.A_log, &rows.dt_bias, &rows.D}) x->assign(static_cast<std::size_t>(kTokens * s.value_heads), 0);
  double* const d_k = d.vkq.data() + s.value_size();
  const RecurrenceGradients<double> g{
      d_out.data(),        s.value_size(), d_k + s.key_size(), d_k,           d.vkq.data(),
      s.conv_size(),       nullptr,        d.a.data(),         s.value_heads, rows.A_log.data(),
      rows.dt_bias.data(), rows.D.data()};
  std::vector<double> state(static_cast<std::size_t>(s.group() * s.state_size())), d_state(state.size()),
      scratch(static_cast<std::size_t>(recurrence_scratch(s, kTokens)));
  recurrence_backward_f64(in.args(), g, 0, kTokens, 0, state.data(), d_state.data(), scratch.data());
  const std::vector<std::vector<double>*> heads{&d.A_log, &d.dt_bias, &d.D},
      of_rows{&rows.A_log, &rows.dt_bias, &rows.D};
  for (std::size_t i = 0; i < heads.size(); ++i) {
    heads[i]->assign(static_cast<std::size_t>(s.value_heads), 0);
    for (std::size_t n = 0; n < of_rows[i]->size(); ++n) (*heads[i])[n % heads[i]->size()] += (*of_rows[i])[n];
  }
  for (std::size_t i = 0; i < in.all().size(); ++i) {
    const auto direction = drawn<double>(static_cast<std::int64_t>(in.all()[i]->size()), 7);
    double difference = 0;
    for (const double side : {1.0, -1.0}) {
      auto moved = in;
      for (std::size_t n = 0; n < direction.size(); ++n) (*moved.all()[i])[n] += side * 1e-6 * direction[n];
      difference += side * dot(result(moved, kTokens), d_out) / 2e-6;
    }
    EXPECT_NEAR(dot(*d.all()[i], direction), difference, 1e-5 * std::abs(difference)) << i;
  }
}

}  // namespace
}  // namespace nemo_rl::kernels
