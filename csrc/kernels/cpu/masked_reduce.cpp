#include "kernels/masked_reduce.h"

#include "kernels/cpu/vec.h"
#include "kernels/token_rows.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

/// Moments of one row in two passes over what the cache holds; sums in double, lane by lane.
template <class T>
Moments row_moments(const T* __restrict v, const T* __restrict m, std::int64_t n) {
  double count[kLanes] = {}, sum[kLanes] = {}, square[kLanes] = {};
  const std::int64_t whole = n / kLanes * kLanes;
  const auto add = [&](std::int64_t i, int l) {
    const double w = m[i + l], x = m[i + l] != T(0) ? v[i + l] : T(0);
    count[l] += w;
    sum[l] += w * x;
  };
  for (std::int64_t i = 0; i < whole; i += kLanes)
    for (int l = 0; l < kLanes; ++l) add(i, l);
  for (int l = 0; l < n - whole; ++l) add(whole, l);
  Moments out;
  double total = 0;
  for (int l = 0; l < kLanes; ++l) out.count += count[l], total += sum[l];
  if (out.count == 0) return out;
  out.mean = total / out.count;
  const double mean = out.mean;
  const auto add_square = [&](std::int64_t i, int l) {
    const double d = m[i + l] != T(0) ? static_cast<double>(v[i + l]) - mean : 0.0;
    square[l] += static_cast<double>(m[i + l]) * d * d;
  };
  for (std::int64_t i = 0; i < whole; i += kLanes)
    for (int l = 0; l < kLanes; ++l) add_square(i, l);
  for (int l = 0; l < n - whole; ++l) add_square(whole, l);
  for (int l = 0; l < kLanes; ++l) out.m2 += square[l];
  return out;
}

template <class T>
void moments(const MaskedArgs<T>& a, std::int64_t begin, std::int64_t end, Moments* rows) {
  for (std::int64_t b = begin; b < end; ++b)
    rows[b] = row_moments(a.values + row_begin(a, b), row_of(a, a.mask, b), row_length(a, b));
}

template <class T>
void whiten(const MaskedArgs<T>& a, const WhitenScale& w, bool zero_masked, std::int64_t begin, std::int64_t end) {
  const double mean = w.mean, scale = w.scale;
  for (std::int64_t b = begin; b < end; ++b) {
    T* __restrict v = a.values + row_begin(a, b);
    const T* __restrict m = row_of(a, a.mask, b);
    const std::int64_t n = row_length(a, b);
    if (w.scale == 0) {
      for (std::int64_t t = 0; t < n; ++t) v[t] = T(0);
    } else if (zero_masked) {
      for (std::int64_t t = 0; t < n; ++t)
        v[t] = m[t] != T(0) ? static_cast<T>((static_cast<double>(v[t]) - mean) * scale) : T(0);
    } else {
      for (std::int64_t t = 0; t < n; ++t) v[t] = static_cast<T>((static_cast<double>(v[t]) - mean) * scale);
    }
  }
}

}  // namespace

void masked_moments_f32(const MaskedArgs<float>& a, std::int64_t begin, std::int64_t end, Moments* rows) {
  moments(a, begin, end, rows);
}
void masked_moments_f64(const MaskedArgs<double>& a, std::int64_t begin, std::int64_t end, Moments* rows) {
  moments(a, begin, end, rows);
}
void whiten_f32(const MaskedArgs<float>& a, const WhitenScale& w, bool z, std::int64_t begin, std::int64_t end) {
  whiten(a, w, z, begin, end);
}
void whiten_f64(const MaskedArgs<double>& a, const WhitenScale& w, bool z, std::int64_t begin, std::int64_t end) {
  whiten(a, w, z, begin, end);
}

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
