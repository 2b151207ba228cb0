// The gated product: act = silu(x · w_gate^T) · (x · w_up^T). A tile holds as many gates as ups, so that the activation is computed while
// both are at hand. The same operations as linear_forward followed by swiglu_forward: the same bits.
#include "kernels/cpu/dot_panel.h"
#include "kernels/cpu/swiglu_lanes.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

constexpr int kHalf = static_cast<int>(kLinearTileN) / 2;
static_assert(kHalf == kLanes);

template <class T>
struct StoreSwiglu {
  const LinearSwigluArgs<T>& p;
  std::int64_t i0;
  int count;
  [[gnu::always_inline]] void operator()(std::int64_t m, const accumulate_t<T>* sums) const {
    T gate[kHalf], up[kHalf], act[kHalf];  // rounded to T, as when they are stored
    round(sums, p.bias ? p.bias + i0 : nullptr, gate);
    round(sums + kHalf, p.bias ? p.bias + p.I + i0 : nullptr, up);
    forward_lanes(gate, up, act);
    put(act, p.act + m * p.I + i0);
    if (p.gate_up) {
      put(gate, p.gate_up + m * 2 * p.I + i0);
      put(up, p.gate_up + m * 2 * p.I + p.I + i0);
    }
  }
  [[gnu::always_inline]] void round(const float* sums, const T* bias, T* out) const {
    if (!bias) return store16(out, load16(sums));
    T at[kHalf];
    for (int j = 0; j < kHalf; ++j) at[j] = bias[j < count ? j : 0];
    store16(out, load16(sums) + load16(at));
  }
  [[gnu::always_inline]] void round(const double* sums, const double* bias, double* out) const {
    for (int j = 0; j < kHalf; ++j) out[j] = bias ? sums[j] + bias[j < count ? j : 0] : sums[j];
  }
  [[gnu::always_inline]] void put(const T* values, T* to) const {
    if (count == kHalf) {
      __builtin_memcpy(to, values, kHalf * sizeof(T));
    } else {
      __builtin_memcpy(to, values, static_cast<std::size_t>(count) * sizeof(T));
    }
  }
};

template <class T>
void linear_swiglu(const LinearSwigluArgs<T>& p, std::int64_t tile_begin, std::int64_t tile_end, bool more) {
  const auto count = [&](std::int64_t strip) { return static_cast<int>(smaller<std::int64_t>(kHalf, p.I - strip * kHalf)); };
  const auto columns_of = [&](std::int64_t strip) {
    Columns<T> columns;
    columns.count = kLinearTileN;
    columns.set(0, kHalf, p.w + strip * kHalf * p.ldw, p.ldw, count(strip));
    columns.set(kHalf, kHalf, p.w + (p.I + strip * kHalf) * p.ldw, p.ldw, count(strip));
    return columns;
  };
  const auto store_of = [&](std::int64_t strip) { return StoreSwiglu<T>{p, strip * kHalf, count(strip)}; };
  run_tiles(p, LinearTiles(p.M, 2 * p.I), tile_begin, tile_end, more, columns_of, store_of);
}

}  // namespace

void linear_swiglu_f32(const LinearSwigluArgs<float>& p, std::int64_t b, std::int64_t e, bool more) { linear_swiglu(p, b, e, more); }
void linear_swiglu_f64(const LinearSwigluArgs<double>& p, std::int64_t b, std::int64_t e, bool more) { linear_swiglu(p, b, e, more); }
void linear_swiglu_bf16(const LinearSwigluArgs<bfloat16>& p, std::int64_t b, std::int64_t e, bool more) { linear_swiglu(p, b, e, more); }

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
