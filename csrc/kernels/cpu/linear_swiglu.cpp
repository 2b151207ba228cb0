// The gated product: act = silu(x · w_gate^T) · (x · w_up^T). A tile holds as many gates as ups, so that the activation
// is computed while both are at hand. The same operations as linear_forward followed by swiglu_forward: the same bits.
#include "kernels/cpu/linear_wide.h"
#include "kernels/cpu/packed_strip.h"
#include "kernels/cpu/swiglu_lanes.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

constexpr int kHalf = static_cast<int>(kSwigluTileN) / 2;

/// A tile's sums: kHalf gates, then as many ups.
template <class T, int kHalf>
struct StoreSwiglu {
  static_assert(kHalf % kLanes == 0);
  const LinearSwigluArgs<T>& p;
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
      forward_lanes(gate, up, act);
      put(act, present, p.act + m * p.I + i);
      if (p.gate_up) {
        put(gate, present, p.gate_up + m * 2 * p.I + i);
        put(up, present, p.gate_up + m * 2 * p.I + p.I + i);
      }
    }
  }
  [[gnu::always_inline]] static void round(const float* sums, const T* bias, int present, T* out) {
    if (!bias) return store16(out, load16(sums));
    T at[kLanes];
    for (int j = 0; j < kLanes; ++j) at[j] = bias[j < present ? j : 0];
    store16(out, load16(sums) + load16(at));
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

template <class T>
StoreSwiglu<T, kHalf> store_strip(const LinearSwigluArgs<T>& p, std::int64_t strip) {
  return {p, strip * kHalf, static_cast<int>(smaller<std::int64_t>(kHalf, p.I - strip * kHalf))};
}

template <class T>
void linear_swiglu(const LinearSwigluArgs<T>& p, std::int64_t tile_begin, std::int64_t tile_end, bool more) {
  const auto columns_of = [&](std::int64_t strip) {
    Columns<T, kSwigluTileN> columns;
    const int count = store_strip(p, strip).count;
    columns.count = kSwigluTileN;
    columns.set(0, kHalf, p.w + strip * kHalf * p.ldw, p.ldw, count);
    columns.set(kHalf, kHalf, p.w + (p.I + strip * kHalf) * p.ldw, p.ldw, count);
    return columns;
  };
  const auto store_of = [&](std::int64_t strip) { return store_strip(p, strip); };
  run_tiles(p.input, LinearTiles(p.input.M, 2 * p.I, p.input.K, kSwigluTileN), p.ldw, tile_begin, tile_end, more,
            columns_of, store_of);
}

template <class T>
void linear_swiglu_wide(const LinearSwigluArgs<T>& p, const LinearWideTile& tile) {
  run_wide<2>(p.input, tile, [&](std::int64_t strip) { return store_strip(p, strip); });
}

void packed_weights_swiglu(const LinearSwigluArgs<bfloat16>& p, const PackedMatrix& packed, std::int64_t begin,
                           std::int64_t end) {
  constexpr int kStrip = static_cast<int>(kPackedStrip);
  run_packed_strips<2>(p.input, packed, begin, end,
                       [&](std::int64_t tile) { return StoreSwiglu<bfloat16, kStrip>{p, tile * kStrip, kStrip}; });
}

}  // namespace

void linear_swiglu_f32(const LinearSwigluArgs<float>& p, std::int64_t b, std::int64_t e, bool more) {
  linear_swiglu(p, b, e, more);
}
void linear_swiglu_f64(const LinearSwigluArgs<double>& p, std::int64_t b, std::int64_t e, bool more) {
  linear_swiglu(p, b, e, more);
}
void linear_swiglu_bf16(const LinearSwigluArgs<bfloat16>& p, std::int64_t b, std::int64_t e, bool more) {
  linear_swiglu(p, b, e, more);
}
void linear_swiglu_wide_f32(const LinearSwigluArgs<float>& p, const LinearWideTile& t) { linear_swiglu_wide(p, t); }
void linear_swiglu_wide_bf16(const LinearSwigluArgs<bfloat16>& p, const LinearWideTile& t) { linear_swiglu_wide(p, t); }
void packed_weights_swiglu_bf16(const LinearSwigluArgs<bfloat16>& p, const PackedMatrix& w, std::int64_t b,
                                std::int64_t e) {
  packed_weights_swiglu(p, w, b, e);
}

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
