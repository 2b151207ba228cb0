#include "kernels/short_conv.h"

#include "kernels/cpu/plain.h"
#include "kernels/cpu/wide_lanes.h"
#include "kernels/recurrence.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

/// The sum for 16 channels from `c` on.
template <class T>
NRL_VEC Wide<T> convolved(const ShortConvArgs<T>& p, std::int64_t row, std::int64_t c) {
  using V = Wide<T>;
  V sum = p.bias == nullptr ? V{} : load<V>(p.bias + c);
  const T* const* before = p.before + row * (p.W - 1);
  for (std::int64_t i = 0; i + 1 < p.W; ++i)
    if (before[i] != nullptr) sum = mul_add(load<V>(before[i] + c), load<V>(p.w + i * p.C + c), sum);
  return mul_add(load<V>(p.x + row * p.stride_x + c), load<V>(p.w + (p.W - 1) * p.C + c), sum);
}

template <class T>
void forward(const ShortConvArgs<T>& p, T* y, std::int64_t stride_y, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row)
    for (std::int64_t c = 0; c < p.C; c += 16) {
      Wide<T> sum = convolved(p, row, c);
      store(y + row * stride_y + c, p.silu ? sum * sigmoid_of(sum) : sum);
    }
}

template <class T>
void backward(const ShortConvArgs<T>& p, const T* dy, std::int64_t stride_dy, T* dx, std::int64_t stride_dx,
              const ShortConvGradients<T>& d, std::int64_t rows, accumulate_t<T>* sum, std::int64_t begin,
              std::int64_t end) {
  using A = accumulate_t<T>;
  using V = Wide<T>;
  const std::int64_t width = end - begin;
  fill(sum, rows * width, A(0));
  for (std::int64_t c = begin; c < end; c += 16) {
    V d_bias{}, d_w[kMostConvWidth];
    for (auto& each : d_w) each = V{};
    for (std::int64_t row = 0; row < rows; ++row) {
      V du = load<V>(dy + row * stride_dy + c);
      if (p.silu) {
        V u = convolved(p, row, c), s = sigmoid_of(u);
        du = du * s * (u * (A(1) - s) + A(1));
      }
      d_bias += du;
      for (std::int64_t i = 0; i < p.W; ++i) {
        const T* const x = i + 1 < p.W ? p.before[row * (p.W - 1) + i] : p.x + row * p.stride_x;
        if (x == nullptr) continue;
        A* const place = sum + (x - p.x) / p.stride_x * width + c - begin;
        store(place, mul_add(load<V>(p.w + i * p.C + c), du, load<V>(place)));
        d_w[i] = mul_add(load<V>(x + c), du, d_w[i]);
      }
    }
    if (d.bias != nullptr) store(d.bias + c, load<V>(d.bias + c) + d_bias);
    if (d.w == nullptr) continue;
    for (std::int64_t i = 0; i < p.W; ++i) {
      A lanes[16];
      store(lanes, d_w[i]);
      for (std::int64_t lane = 0; lane < 16; ++lane) d.w[(c + lane) * p.W + i] += lanes[lane];
    }
  }
  for (std::int64_t row = 0; row < rows; ++row)
    for (std::int64_t c = 0; c < width; c += 16)
      store(dx + row * stride_dx + begin + c, load<V>(sum + row * width + c));
}

}  // namespace

void short_conv_forward_f32(const ShortConvArgs<float>& p, float* y, std::int64_t stride, std::int64_t b,
                            std::int64_t e) {
  forward(p, y, stride, b, e);
}
void short_conv_forward_f64(const ShortConvArgs<double>& p, double* y, std::int64_t stride, std::int64_t b,
                            std::int64_t e) {
  forward(p, y, stride, b, e);
}
void short_conv_forward_bf16(const ShortConvArgs<bfloat16>& p, bfloat16* y, std::int64_t stride, std::int64_t b,
                             std::int64_t e) {
  forward(p, y, stride, b, e);
}

void short_conv_backward_f32(const ShortConvArgs<float>& p, const float* dy, std::int64_t stride_dy, float* dx,
                             std::int64_t stride_dx, const ShortConvGradients<float>& d, std::int64_t rows, float* sum,
                             std::int64_t b, std::int64_t e) {
  backward(p, dy, stride_dy, dx, stride_dx, d, rows, sum, b, e);
}
void short_conv_backward_f64(const ShortConvArgs<double>& p, const double* dy, std::int64_t stride_dy, double* dx,
                             std::int64_t stride_dx, const ShortConvGradients<double>& d, std::int64_t rows,
                             double* sum, std::int64_t b, std::int64_t e) {
  backward(p, dy, stride_dy, dx, stride_dx, d, rows, sum, b, e);
}
void short_conv_backward_bf16(const ShortConvArgs<bfloat16>& p, const bfloat16* dy, std::int64_t stride_dy,
                              bfloat16* dx, std::int64_t stride_dx, const ShortConvGradients<bfloat16>& d,
                              std::int64_t rows, float* sum, std::int64_t b, std::int64_t e) {
  backward(p, dy, stride_dy, dx, stride_dx, d, rows, sum, b, e);
}

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
