#include "kernels/rope.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

template <bool kInterleaved, class T>
void rotate(const RopeArgs<T>& p, std::int64_t begin, std::int64_t end) {
  using A = accumulate_t<T>;
  const std::int64_t half = p.rotary / 2, step = kInterleaved ? 2 : 1, other = kInterleaved ? 1 : half;
  const A sign = p.inverse ? A(-1) : A(1);
  for (std::int64_t t = begin; t < end; ++t) {
    const float* cos = p.cos + p.positions[t] * half;
    const float* sin = p.sin + p.positions[t] * half;
    for (std::int64_t h = 0; h < p.heads; ++h) {
      T* x = p.x + t * p.stride_x + h * p.H;
      for (std::int64_t i = 0; i < half; ++i) {
        T &one = x[i * step], &two = x[i * step + other];
        const A a = static_cast<A>(one), b = static_cast<A>(two);
        const A c = static_cast<A>(cos[i]), s = sign * static_cast<A>(sin[i]);
        A first, second;
        rope_rotate(a, b, c, s, first, second);
        one = static_cast<T>(first);
        two = static_cast<T>(second);
      }
    }
  }
}

template <class T>
void rope(const RopeArgs<T>& p, std::int64_t begin, std::int64_t end) {
  return p.interleaved ? rotate<true>(p, begin, end) : rotate<false>(p, begin, end);
}

}  // namespace

void rope_f32(const RopeArgs<float>& p, std::int64_t b, std::int64_t e) { rope(p, b, e); }
void rope_f64(const RopeArgs<double>& p, std::int64_t b, std::int64_t e) { rope(p, b, e); }
void rope_bf16(const RopeArgs<bfloat16>& p, std::int64_t b, std::int64_t e) { rope(p, b, e); }

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
