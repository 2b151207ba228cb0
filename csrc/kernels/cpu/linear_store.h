// What becomes of the sums of a forward product: y = sums (+ bias) (+ y), or the gated activation of gates and ups.
#pragma once
#include "kernels/cpu/linear_panel.h"
#include "kernels/cpu/swiglu_lanes.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

/// y[0, cols) = sums (+ bias) (+ y), in this order for every output.
template <class A, class T, class O>
[[gnu::always_inline]] inline void store_row(const A* sums, const T* __restrict bias, bool accumulate, O* __restrict y,
                                             int cols) {
  if (!bias && !accumulate) {
    for (int j = 0; j < cols; ++j) y[j] = static_cast<O>(sums[j]);
  } else if (!bias) {
    for (int j = 0; j < cols; ++j) y[j] = static_cast<O>(sums[j] + static_cast<A>(y[j]));
  } else {
    for (int j = 0; j < cols; ++j) {
      A sum = sums[j] + static_cast<A>(bias[j]);
      if (accumulate) sum += static_cast<A>(y[j]);
      y[j] = static_cast<O>(sum);
    }
  }
}

/// Of a strip of kWidth columns, of which `count` exist.
template <class T, class O, std::int64_t kWidth = kLinearTileN, class W = T>
struct StoreColumns {
  const LinearForwardArgs<T, O, W>& p;
  std::int64_t n0;
  int count;
  [[gnu::always_inline]] void ask_ahead(std::int64_t m) const { ask_for_writing(p.y + m * p.ldy + n0, count); }
  [[gnu::always_inline]] void operator()(std::int64_t m, const accumulate_t<T>* sums) const {
    const T* bias = p.bias ? p.bias + n0 : nullptr;
    O* y = p.y + m * p.ldy + n0;
    if (count == kWidth) {
      store_row(sums, bias, p.accumulate, y, kWidth);  // a known length: whole vectors
    } else {
      store_row(sums, bias, p.accumulate, y, count);
    }
  }
};

template <std::int64_t kWidth = kLinearTileN, class T, class O, class W>
StoreColumns<T, O, kWidth, W> store_strip(const LinearForwardArgs<T, O, W>& p, std::int64_t strip) {
  return {p, strip * kWidth, static_cast<int>(smaller(kWidth, p.N - strip * kWidth))};
}

/// The rows of w of a strip.
template <class T, class O, class W>
Columns<W, kLinearTileN> columns_of(const LinearForwardArgs<T, O, W>& p, std::int64_t strip) {
  Columns<W, kLinearTileN> columns;
  columns.count = store_strip(p, strip).count;
  columns.set(0, kLinearTileN, p.w + (strip - p.first_strip) * kLinearTileN * p.ldw, p.ldw, columns.count);
  return columns;
}

constexpr int kHalf = static_cast<int>(kSwigluTileN) / 2;

/// A tile's sums: kHalf gates, then as many ups.
template <class T, int kHalf, class W = T>
struct StoreSwiglu {
  static_assert(kHalf % kLanes == 0);
  const LinearSwigluArgs<T, W>& p;
  std::int64_t i0;
  int count;
  [[gnu::always_inline]] void ask_ahead(std::int64_t m) const {
    ask_for_writing(p.act + m * p.I + i0, count);
    if (!p.gate_up) return;
    ask_for_writing(p.gate_up + m * 2 * p.I + i0, count);
    ask_for_writing(p.gate_up + m * 2 * p.I + p.I + i0, count);
  }
  [[gnu::always_inline]] void operator()(std::int64_t m, const accumulate_t<T>* sums) const {
    for (int j = 0; j < kHalf; j += kLanes) {
      const std::int64_t i = i0 + j;
      const int present = static_cast<int>(smaller<std::int64_t>(count - j, kLanes));
      if (present <= 0) return;
      T gate[kLanes], up[kLanes], act[kLanes];  // rounded to T, as when they are stored
      round(sums + j, p.bias ? p.bias + i : nullptr, present, gate);
      round(sums + kHalf + j, p.bias ? p.bias + p.I + i : nullptr, present, up);
      if (p.activation == Gate::silu) forward_lanes<Gate::silu, true>(gate, up, act);
      else forward_lanes<Gate::gelu_tanh, true>(gate, up, act);
      put(act, present, p.act + m * p.I + i);
      if (p.gate_up) {
        put(gate, present, p.gate_up + m * 2 * p.I + i);
        put(up, present, p.gate_up + m * 2 * p.I + p.I + i);
      }
    }
  }
  [[gnu::always_inline]] static void round(const float* sums, const T* bias, int present, T* out) {
    if (!bias) return store(out, load<Floats>(sums));
    T at[kLanes];
    for (int j = 0; j < kLanes; ++j) at[j] = bias[j < present ? j : 0];
    store(out, load<Floats>(sums) + load<Floats>(at));
  }
  [[gnu::always_inline]] static void round(const double* sums, const double* bias, int present, double* out) {
    for (int j = 0; j < kLanes; ++j) out[j] = bias ? sums[j] + bias[j < present ? j : 0] : sums[j];
  }
  [[gnu::always_inline]] static void put(const T* values, int present, T* to) {
    if (present == kLanes) {
      __builtin_memcpy(to, values, kLanes * sizeof(T));
    } else {
      __builtin_memcpy(to, values, static_cast<std::size_t>(present) * sizeof(T));
    }
  }
};

template <class T, class W>
StoreSwiglu<T, kHalf, W> store_strip(const LinearSwigluArgs<T, W>& p, std::int64_t strip) {
  return {p, strip * kHalf, static_cast<int>(smaller<std::int64_t>(kHalf, p.I - strip * kHalf))};
}

/// Its gates, then its ups.
template <class T, class W>
Columns<W, kSwigluTileN> columns_of(const LinearSwigluArgs<T, W>& p, std::int64_t strip) {
  Columns<W, kSwigluTileN> columns;
  const int count = store_strip(p, strip).count;
  columns.count = kSwigluTileN;
  const std::int64_t offset = (strip - p.first_strip) * kHalf * p.ldw;
  columns.set(0, kHalf, p.w + offset, p.ldw, count);
  columns.set(kHalf, kHalf, p.up + offset, p.ldw, count);
  return columns;
}

template <class T, class O, class W>
LinearTiles tiles_of(const LinearForwardArgs<T, O, W>& p) {
  return LinearTiles(p.input.M, p.N, p.input.K);
}
template <class T, class W>
LinearTiles tiles_of(const LinearSwigluArgs<T, W>& p) {
  return LinearTiles(p.input.M, 2 * p.I, p.input.K, kSwigluTileN);
}

/// Computes tiles [begin, end) of p from x, p's packed rows in the type of w.
template <class Args, class T>
void run_columns(const Args& p, const LinearInput<T>& x, std::int64_t begin, std::int64_t end, bool more) {
  run_tiles(
      x, tiles_of(p), p.ldw, begin, end, more, [&](std::int64_t strip) { return columns_of(p, strip); },
      [&](std::int64_t strip) { return store_strip(p, strip); });
}

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
