// The gated product: act = silu(x · w_gate^T) · (x · w_up^T). A tile holds as many gates as ups, so that the activation
// is computed while both are at hand. The same operations as linear_forward followed by swiglu_forward: the same bits.
#include "kernels/cpu/linear_store.h"
#include "kernels/cpu/linear_wide.h"
#include "kernels/cpu/packed_strip.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

template <class T>
void linear_swiglu(const LinearSwigluArgs<T>& p, std::int64_t tile_begin, std::int64_t tile_end, bool more) {
  const auto columns_of = [&](std::int64_t strip) {
    Columns<T, kSwigluTileN> columns;
    const int count = store_strip(p, strip).count;
    columns.count = kSwigluTileN;
    const std::int64_t offset = (strip - p.first_strip) * kHalf * p.ldw;
    columns.set(0, kHalf, p.w + offset, p.ldw, count);
    columns.set(kHalf, kHalf, p.up + offset, p.ldw, count);
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
  packed_weights_swiglu<PackedChains>(p, w, b, e);
}

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
