#include "ops/linear.h"

#include <ATen/Parallel.h>

#include <functional>

#include "kernels/linear.h"
#include "ops/gemm.h"
#include "ops/kernel_types.h"
#include "ops/packed_weights.h"
#include "ops/swiglu.h"
#include "ops/weight_blocks.h"
#include "runtime/parallel_items.h"
#include "runtime/tensor.h"

namespace nemo_rl::ops {

runtime::CudaSlot<LinearForwardLauncher> linear_forward_cuda("linear_forward");
runtime::CudaSlot<GemmLauncher> linear_backward_cuda("linear_backward");

namespace {

void check_matrix(const at::Tensor& t, const at::Tensor& like, const char* name, const char* op) {
  NRL_CHECK_ARG(t.dim() == 2 && t.stride(1) == 1 && t.device() == like.device() && (t.is_cpu() || t.is_cuda()), op,
                ": ", name, " must be a matrix with a contiguous last dimension on the CPU or, as all operands, on ",
                like.device().str(), ", got shape ", t.sizes(), " on ", t.device().str());
}

const PackedWeights::Matrix* packed_copy(const PackedWeights* packed, const at::Tensor& w, std::int64_t rows,
                                         bool gated) {
  return packed == nullptr ? nullptr : packed->for_rows(w, rows, gated);
}

BlockMatrix checked_blocks(const at::Tensor& x, const at::Tensor& w, std::int64_t columns, const char* op) {
  check_matrix(x, w, "the operand beside weights in blocks", op);
  NRL_CHECK_ARG(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16, op,
                ": weights in blocks are multiplied in float32 or bfloat16, not in ", c10::toString(x.scalar_type()));
  return {w, columns};
}

/// Weights that are unpacked at a time on a device: 128 MiB of bfloat16.
constexpr std::int64_t kDeviceStripWeights = std::int64_t{1} << 26;

/// Calls f(rows, n, count) with rows [n, n + count) of w in the dtype of `like`, strip by strip.
template <class F>
void for_device_strips(const BlockMatrix& w, const at::Tensor& like, const F& f) {
  constexpr std::int64_t kTile = kernels::kBlockTileRows;
  const std::int64_t N = w.rows(), K = w.columns(),
                     most = std::min(N, std::max(kTile, kDeviceStripWeights / K / kTile * kTile));
  const auto room = at::empty({most, K}, like.options());
  for (std::int64_t n = 0; n < N; n += most) {
    const auto rows = room.narrow(0, 0, std::min(most, N - n));
    unpack_blocks_cuda.get(rows)(w, rows, n);
    f(rows, n, rows.size(0));
  }
}

/// From one unpacked row of K weights to the next: not a multiple of 4 KiB, which would put rows into the same sets of
/// the caches.
std::int64_t room_stride(std::int64_t K) { return K + (K % 1024 == 992 ? 64 : 32); }

void unpack_rows(const BlockMatrix& w, std::int64_t n, std::int64_t count, float* out, std::int64_t stride) {
  kernels::unpack_blocks_f32(w.format(), w.tiles(), n, count, w.columns(), out, stride);
}
void unpack_rows(const BlockMatrix& w, std::int64_t n, std::int64_t count, bfloat16* out, std::int64_t stride) {
  kernels::unpack_blocks_bf16(w.format(), w.tiles(), n, count, w.columns(), out, stride);
}
/// Never called: check_blocks.
void unpack_rows(const BlockMatrix&, std::int64_t, std::int64_t, double*, std::int64_t) {}

bool fits(const std::optional<at::Tensor>& bias, std::int64_t N, const at::Tensor& x) {
  return !bias || (bias->numel() == N && bias->scalar_type() == x.scalar_type());
}

/// w [N, K] as the kernels of type T read it: rows that lie in memory, or blocks whose rows a thread unpacks into its
/// own room before it reads them.
template <class T>
class Weights {
 public:
  explicit Weights(const at::Tensor& w) : at_(ptr<T>(w)), stride_(w.stride(0)) {}
  explicit Weights(const BlockMatrix& w) : stride_(room_stride(w.columns())), blocks_(&w) {}

  bool in_blocks() const { return blocks_ != nullptr; }
  std::int64_t stride() const { return stride_; }
  /// Rows [n, n + count), stride() apart; of blocks valid until the thread's next call with this `slot`, 0 or 1, and at
  /// most kernels::kLinearTileN.
  const T* rows(std::int64_t n, std::int64_t count, std::int64_t slot = 0) const {
    if (!in_blocks()) return at_ + n * stride_;
    const std::int64_t each = kernels::kLinearTileN * stride_;
    thread_local runtime::ScratchMemory memory;
    auto* const room = reinterpret_cast<T*>(memory.get(static_cast<std::size_t>(2 * each) * sizeof(T))) + slot * each;
    unpack_rows(*blocks_, n, count, room, stride_);
    return room;
  }

 private:
  const T* at_ = nullptr;
  std::int64_t stride_;
  const BlockMatrix* blocks_ = nullptr;
};

/// Calls f(strip, begin, end) for the tiles [begin, end) of each strip in turn.
template <class F>
void for_strips(const kernels::LinearTiles& tiles, std::int64_t begin, std::int64_t end, const F& f) {
  while (begin < end) {
    const std::int64_t last = std::min(end, (begin / tiles.steps + 1) * tiles.steps);
    f(tiles.strip(begin), begin, last);
    begin = last;
  }
}

/// How x is packed, and the room that a thread needs for a strip of w in another layout; nullptr: none.
template <class T>
struct Packing {
  std::function<kernels::LinearPack<T>> pack;
  kernels::LinearStripFloats* strip_floats = nullptr;
  std::int64_t floats(std::int64_t M, std::int64_t K, std::int64_t tile_n) const {
    return strip_floats == nullptr ? 0 : strip_floats(M, K, tile_n);
  }
};

/// This thread's room for a strip, beside its other scratch memory.
float* thread_strip(std::int64_t floats) {
  thread_local runtime::ScratchMemory memory;
  return floats == 0 ? nullptr : reinterpret_cast<float*>(memory.get(static_cast<std::size_t>(floats) * sizeof(float)));
}

/// Computes tiles by multiply(input, 0, begin, end, more) from x of up to kernels::kLinearOwnRows rows.
template <class T, class Multiply>
void run_packed_each(const Packing<T>& packing, const at::Tensor& x, std::int64_t N, std::int64_t tile_n,
                     const Multiply& multiply) {
  const std::int64_t M = x.size(0), K = x.size(1), floats = packing.floats(M, K, tile_n);
  const auto bytes = static_cast<std::size_t>(kernels::linear_packed_bytes(M, K, sizeof(T)));
  const std::int64_t tiles = kernels::LinearTiles(M, N, K, tile_n).count();
  parallel_chunks(1, tiles, runtime::tiles_at_least(K * tile_n * M), bytes, [&](const ChunkTile& t) {
    const kernels::LinearInput<T> input{ptr<T>(x), x.stride(0), M, K, t.packed_rows, thread_strip(floats)};
    if (!t.is_packed) packing.pack(input, 0, 1);
    multiply(input, 0, t.strip_begin, t.strip_end, t.more);
  });
}

/// Packs x, then computes tiles by multiply(input, first row, begin, end, more), for so many rows at a time as are
/// still in a nearby cache once packed.
template <class T, class Multiply>
void run_packed(const Packing<T>& packing, const at::Tensor& x, std::int64_t N, std::int64_t tile_n,
                const Multiply& multiply) {
  const std::int64_t M = x.size(0), K = x.size(1), block = kernels::LinearTiles(M, N, K, tile_n).block_rows;
  if (M <= kernels::kLinearOwnRows) return run_packed_each(packing, x, N, tile_n, multiply);
  const std::int64_t tile = kernels::linear_packed_bytes(kernels::kLinearTileM, K, sizeof(T));
  const std::int64_t at_once =
      std::max<std::int64_t>(1, kernels::kLinearPackedBytes / kernels::linear_packed_bytes(block, K, sizeof(T))) *
      block;
  void* packed = runtime::thread_workspace(
      static_cast<std::size_t>(kernels::linear_packed_bytes(std::min(M, at_once), K, sizeof(T))));
  for (std::int64_t m = 0; m < M; m += at_once) {
    const kernels::LinearInput<T> input{ptr<T>(x) + m * x.stride(0), x.stride(0), std::min(at_once, M - m), K, packed};
    const std::int64_t steps = (input.M + kernels::kLinearTileM - 1) / kernels::kLinearTileM;
    at::parallel_for(0, steps, std::max<std::int64_t>(1, kernels::kLinearPackGrain / tile),
                     [&](std::int64_t begin, std::int64_t end) { packing.pack(input, begin, end); });
    const kernels::LinearTiles tiles(input.M, N, K, tile_n);
    const std::int64_t floats = packing.floats(input.M, K, tile_n),
                       at_least = runtime::tiles_at_least(K * tile_n * std::min(input.M, kernels::kLinearTileM));
    runtime::parallel_tiles(tiles.count(), floats > 0 ? std::max(tiles.steps, at_least) : at_least,
                            [&](std::int64_t begin, std::int64_t end, bool more) {
                              auto of_thread = input;
                              of_thread.strip_room = thread_strip(floats);
                              multiply(of_thread, m, begin, end, more);
                            });
  }
}

/// Computes tiles by kernel(LinearWideTile) from strips of wide.columns columns that pack(strip, out) packs for all
/// threads, as many at a time as are still in a nearby cache once packed.
template <class Pack, class Kernel>
void run_wide(std::int64_t M, std::int64_t N, const kernels::LinearWide& wide, const Pack& pack, const Kernel& kernel) {
  const std::int64_t rows = wide.rows, words = wide.words, width = wide.columns, strips = (N + width - 1) / width,
                     strip_words = width * words;
  const std::int64_t at_once = std::clamp<std::int64_t>(kernels::kLinearWideStripWords / strip_words, 1, strips);
  const auto bytes = [words](std::int64_t lines) {
    return static_cast<std::size_t>(kernels::linear_wide_packed(lines, words)) * sizeof(float);
  };
  auto* const packed = reinterpret_cast<float*>(runtime::thread_workspace(bytes(at_once * width)));
  for (std::int64_t first = 0; first < strips; first += at_once) {
    const std::int64_t count = std::min(at_once, strips - first);
    runtime::parallel_tiles(count, 1, [&](std::int64_t begin, std::int64_t end, bool) {
      for (std::int64_t i = begin; i < end; ++i) pack(first + i, packed + i * strip_words);
    });
    parallel_chunks((M + rows - 1) / rows, count, 1, bytes(rows), [&](const ChunkTile& t) {
      kernel(kernels::LinearWideTile{t.chunk * rows, std::min(M, (t.chunk + 1) * rows), first + t.strip_begin,
                                     first + t.strip_end, packed + t.strip_begin * strip_words,
                                     static_cast<float*>(t.packed_rows), t.is_packed});
    });
  }
}

/// What computes a forward product of x in T and w in W: tile by tile with w where it lies, or, where rows are many and
/// the type has such kernels, wide.
template <class T, class W, class Tiles, class WideTiles>
struct ForwardKernels {
  kernels::LinearPack<T>* pack;
  Tiles* tiles;
  kernels::LinearWideOf* wide_of = nullptr;
  kernels::LinearPackWeights<W>* pack_weights = nullptr;
  WideTiles* wide = nullptr;
  kernels::LinearWide wide_for(std::int64_t K) const { return wide && K > 0 ? wide_of(K) : kernels::LinearWide{}; }
};
template <class T, class O, class W = T>
using LinearKernels = ForwardKernels<T, W, kernels::LinearForward<T, O, W>, kernels::LinearForwardWide<T, O>>;
template <class T, class W = T>
using SwigluKernels = ForwardKernels<T, W, kernels::LinearSwiglu<T, W>, kernels::LinearSwigluWide<T>>;

/// The product of N columns in strips of `width`, or of wide.columns. args_of(input, first row, w): the kernels'
/// arguments, with w null where they do not read it; unpack(args, strip) sets where the rows of a strip lie, if w lies
/// in blocks; pack(strip, out) as for run_wide.
template <class T, class W, class Kernels, class ArgsOf, class Unpack, class Pack>
void run_forward(const Kernels& with, const kernels::LinearWide& wide, const at::Tensor& x, const Weights<W>& w,
                 std::int64_t N, std::int64_t width, const ArgsOf& args_of, const Unpack& unpack, const Pack& pack) {
  const std::int64_t M = x.size(0), K = x.size(1);
  constexpr bool kMayWiden = std::is_same_v<W, bfloat16>;
  if (M < wide.from_rows)
    return run_packed<T>(
        {with.pack, kMayWiden ? kernels::linear_strip_floats_bf16 : nullptr}, x, N, width,
        [&](const kernels::LinearInput<T>& input, std::int64_t m, std::int64_t begin, std::int64_t end, bool more) {
          auto args = args_of(input, m, w.in_blocks() ? nullptr : w.rows(0, N));
          if (!w.in_blocks()) return with.tiles(args, begin, end, more);
          for_strips(kernels::LinearTiles(input.M, N, K, width), begin, end,
                     [&](std::int64_t strip, std::int64_t first, std::int64_t last) {
                       unpack(args, strip);
                       with.tiles(args, first, last, /*more=*/false);
                     });
        });
  const auto args = args_of({ptr<T>(x), x.stride(0), M, K, nullptr}, 0, static_cast<const T*>(nullptr));
  run_wide(M, N, wide, pack, [&](const kernels::LinearWideTile& tile) { with.wide(args, tile); });
}

template <class T, class O, class W = T>
void run(const LinearKernels<T, O, W>& with, const at::Tensor& x, const Weights<W>& w,
         const std::optional<at::Tensor>& bias, const at::Tensor& y, bool accumulate) {
  constexpr std::int64_t kWidth = kernels::kLinearTileN;
  const std::int64_t K = x.size(1), N = y.size(1), ldw = w.stride();
  const auto args_of = [&]<class Any>(const kernels::LinearInput<T>& input, std::int64_t m, const Any* at) {
    return kernels::LinearForwardArgs<T, O, Any>{
        input,       at, ldw,       bias ? ptr<T>(*bias) : nullptr, mutable_ptr<O>(y) + m * y.stride(0),
        y.stride(0), N,  accumulate};
  };
  const auto unpack = [&](kernels::LinearForwardArgs<T, O, W>& args, std::int64_t strip) {
    args.first_strip = strip;
    args.w = w.rows(strip * kWidth, std::min(kWidth, N - strip * kWidth));
  };
  const auto wide = with.wide_for(K);
  const auto pack = [&](std::int64_t strip, float* out) {
    for (std::int64_t n = strip * wide.columns; n < (strip + 1) * wide.columns;
         n += kWidth, out += kWidth * wide.words) {
      const std::int64_t first = std::min(n, N - 1);
      with.pack_weights(w.rows(first, std::min(kWidth, N - first)), ldw, std::max<std::int64_t>(0, N - n), K, out);
    }
  };
  run_forward<T>(with, wide, x, w, N, kWidth, args_of, unpack, pack);
}

template <class T, class W = T>
void run_swiglu(const SwigluKernels<T, W>& with, const at::Tensor& x, const Weights<W>& w,
                const std::optional<at::Tensor>& bias, const at::Tensor& gate_up, const at::Tensor& act,
                kernels::Gate activation) {
  constexpr std::int64_t kHalf = kernels::kSwigluTileN / 2;
  const std::int64_t K = x.size(1), I = act.size(1), ldw = w.stride();
  const auto args_of = [&]<class Any>(const kernels::LinearInput<T>& input, std::int64_t m, const Any* gates) {
    return kernels::LinearSwigluArgs<T, Any>{input,
                                             gates,
                                             ldw,
                                             bias ? ptr<T>(*bias) : nullptr,
                                             gate_up.defined() ? mutable_ptr<T>(gate_up) + m * 2 * I : nullptr,
                                             mutable_ptr<T>(act) + m * I,
                                             I,
                                             activation,
                                             gates == nullptr ? nullptr : gates + I * ldw};
  };
  const auto unpack = [&](kernels::LinearSwigluArgs<T, W>& args, std::int64_t strip) {
    const std::int64_t i = strip * kHalf, count = std::min(kHalf, I - i);
    args.first_strip = strip;
    args.w = w.rows(i, count, 0);
    args.up = w.rows(I + i, count, 1);
  };
  auto wide = with.wide_for(K);
  wide.columns = kernels::kSwigluTileN;  // as many gates and their ups
  const auto pack = [&](std::int64_t strip, float* out) {
    const std::int64_t i = strip * kHalf, count = std::min(kHalf, I - i);
    with.pack_weights(w.rows(i, count), ldw, I - i, K, out);
    with.pack_weights(w.rows(I + i, count), ldw, I - i, K, out + wide.words * kHalf);
  };
  run_forward<T>(with, wide, x, w, 2 * I, kernels::kSwigluTileN, args_of, unpack, pack);
}

/// W: at::Tensor or BlockMatrix.
template <class W>
void forward_on_cpu(const at::Tensor& x, const W& w, const std::optional<at::Tensor>& bias, const at::Tensor& y,
                    bool accumulate) {
  using namespace kernels;
  const auto type = x.scalar_type(), out = y.scalar_type();
  if (type == at::kFloat && out == at::kFloat)
    return run<float, float>(
        {linear_pack_f32, linear_forward_f32, linear_wide_f32, linear_pack_weights_f32, linear_forward_wide_f32}, x,
        Weights<float>(w), bias, y, accumulate);
  if (type == at::kDouble && out == at::kDouble)
    return run<double, double>({linear_pack_f64, linear_forward_f64}, x, Weights<double>(w), bias, y, accumulate);
  if (type == at::kBFloat16 && out == at::kBFloat16)
    return run<bfloat16, bfloat16>(
        {linear_pack_bf16, linear_forward_bf16, linear_wide_bf16, linear_pack_weights_bf16, linear_forward_wide_bf16},
        x, Weights<bfloat16>(w), bias, y, accumulate);
  if (type == at::kBFloat16 && out == at::kFloat)
    return run<bfloat16, float>({linear_pack_bf16, linear_forward_bf16_f32, linear_wide_bf16, linear_pack_weights_bf16,
                                 linear_forward_wide_bf16_f32},
                                x, Weights<bfloat16>(w), bias, y, accumulate);
  throw ArgumentError(
      detail::concat("linear_forward: no product of ", c10::toString(type), " into ", c10::toString(out)));
}

template <class W>
void swiglu_on_cpu(const at::Tensor& x, const W& w, const std::optional<at::Tensor>& bias, const at::Tensor& gate_up,
                   const at::Tensor& act, kernels::Gate activation) {
  using namespace kernels;
  switch (x.scalar_type()) {
    case at::kFloat:
      return run_swiglu<float>(
          {linear_pack_f32, linear_swiglu_f32, linear_wide_f32, linear_pack_weights_f32, linear_swiglu_wide_f32}, x,
          Weights<float>(w), bias, gate_up, act, activation);
    case at::kDouble:
      return run_swiglu<double>({linear_pack_f64, linear_swiglu_f64}, x, Weights<double>(w), bias, gate_up, act,
                                activation);
    case at::kBFloat16:
      return run_swiglu<bfloat16>(
          {linear_pack_bf16, linear_swiglu_bf16, linear_wide_bf16, linear_pack_weights_bf16, linear_swiglu_wide_bf16},
          x, Weights<bfloat16>(w), bias, gate_up, act, activation);
    default:
      throw ArgumentError(detail::concat("linear_swiglu: no product of ", c10::toString(x.scalar_type())));
  }
}

template <class T, class O>
void backward_product(const at::Tensor& a, bool transposed, const at::Tensor& b, const at::Tensor& c, bool accumulate) {
  const kernels::GemmInput<T> input{ptr<T>(a),
                                    transposed ? 1 : a.stride(0),
                                    transposed ? a.stride(0) : 1,
                                    ptr<T>(b),
                                    b.stride(0),
                                    c.size(0),
                                    c.size(1),
                                    b.size(0)};
  run_gemm<T, O>({input, mutable_ptr<O>(c), c.stride(0), accumulate});
}

/// dx (+)= dy · w, w in blocks: rows of w are unpacked by the thread that packs them.
template <class T, class O>
void backward_blocks(const at::Tensor& dy, const BlockMatrix& w, const at::Tensor& dx, bool accumulate) {
  using namespace kernels;
  const std::int64_t N = w.rows(), stride = room_stride(w.columns());
  const GemmInput<T> whole{ptr<T>(dy), dy.stride(0), 1, nullptr, stride, dx.size(0), dx.size(1), N};
  run_gemm<T, O>({whole, mutable_ptr<O>(dx), dx.stride(0), accumulate}, [&](GemmInput<T> input, std::int64_t k0,
                                                                            std::int64_t begin, std::int64_t end) {
    thread_local runtime::ScratchMemory memory;
    auto* const room = reinterpret_cast<T*>(memory.get(static_cast<std::size_t>(kGemmPackTerms * stride) * sizeof(T)));
    input.b = room;
    for (std::int64_t unit = begin; unit < end; ++unit) {
      input.first_term = k0 + unit * kGemmPackTerms;
      const std::int64_t count = std::min(kGemmPackTerms, N - input.first_term);
      unpack_rows(w, input.first_term, count, room, stride);
      gemm_pack_of(input)(input, k0, unit, unit + 1);
    }
  });
}

void gemm(const at::Tensor& a, bool transposed, const at::Tensor& b, const at::Tensor& c, bool accumulate,
          const char* op) {
  check_matrix(a, a, "the first operand", op);
  check_matrix(b, a, "the second operand", op);
  check_matrix(c, a, "the result", op);
  const auto rows = transposed ? a.size(1) : a.size(0), terms = transposed ? a.size(0) : a.size(1);
  NRL_CHECK_ARG(b.size(0) == terms && c.size(0) == rows && c.size(1) == b.size(1) && a.scalar_type() == b.scalar_type(),
                op, ": shapes ", a.sizes(), ", ", b.sizes(), " -> ", c.sizes(), " or dtypes do not match");
  if (rows == 0 || c.size(1) == 0) return;
  if (terms == 0) {
    if (!accumulate) c.zero_();
    return;
  }
  if (a.is_cuda()) return linear_backward_cuda.get(a)(a, transposed, b, c, accumulate, op);
  const auto type = a.scalar_type(), out = c.scalar_type();
  if (type == at::kFloat && out == at::kFloat) return backward_product<float, float>(a, transposed, b, c, accumulate);
  if (type == at::kDouble && out == at::kDouble)
    return backward_product<double, double>(a, transposed, b, c, accumulate);
  if (type == at::kBFloat16 && out == at::kBFloat16)
    return backward_product<bfloat16, bfloat16>(a, transposed, b, c, accumulate);
  if (type == at::kBFloat16 && out == at::kFloat)
    return backward_product<bfloat16, float>(a, transposed, b, c, accumulate);
  throw ArgumentError(detail::concat(op, ": no product of ", c10::toString(type), " into ", c10::toString(out)));
}

/// dx (+)= dy · w, w in blocks on a device. Several strips are added up in float32 and rounded once.
void backward_device_blocks(const at::Tensor& dy, const BlockMatrix& w, const at::Tensor& dx, bool accumulate) {
  at::Tensor sum;
  for_device_strips(w, dy, [&](const at::Tensor& rows, std::int64_t n, std::int64_t count) {
    const bool in_place = dx.scalar_type() == at::kFloat || count == w.rows();
    if (n == 0) sum = in_place ? dx : at::empty(dx.sizes(), dx.options().dtype(at::kFloat));
    gemm(dy.narrow(1, n, count), false, rows, sum, n > 0 || (accumulate && in_place), "linear_backward_input");
  });
  if (sum.is_same(dx)) return;
  if (accumulate) dx.add_(sum);
  else dx.copy_(sum);
}

/// x in bfloat16 times w in blocks that is not rounded to it.
void forward_mixed(const at::Tensor& x, const BlockMatrix& w, const std::optional<at::Tensor>& bias,
                   const at::Tensor& y, bool accumulate) {
  using namespace kernels;
  const Weights<float> single(w);
  if (y.scalar_type() == at::kBFloat16)
    return run<bfloat16, bfloat16, float>({linear_pack_bf16, linear_forward_mixed_bf16, linear_wide_bf16,
                                           linear_pack_weights_f32, linear_forward_wide_bf16},
                                          x, single, bias, y, accumulate);
  run<bfloat16, float, float>({linear_pack_bf16, linear_forward_mixed_bf16_f32, linear_wide_bf16,
                               linear_pack_weights_f32, linear_forward_wide_bf16_f32},
                              x, single, bias, y, accumulate);
}

bool are_mixed(const at::Tensor& x) { return x.scalar_type() == at::kBFloat16 && kernels::block_weights_are_single(); }

/// Whether the kernels read w in blocks for so many rows.
bool reads_blocks(const at::Tensor& x, const BlockMatrix& w) {
  return x.scalar_type() == at::kBFloat16 && x.size(0) <= kernels::block_product_rows(w.format());
}

Packing<bfloat16> packing_for(const BlockMatrix& w) {
  return {[format = w.format()](const kernels::LinearInput<bfloat16>& input, std::int64_t begin, std::int64_t end) {
    kernels::linear_pack_for_blocks(format, input, begin, end);
  }};
}

template <class O>
void forward_where_blocks_lie(kernels::LinearForwardBlocks<O>* kernel, const at::Tensor& x, const BlockMatrix& w,
                              const std::optional<at::Tensor>& bias, const at::Tensor& y, bool accumulate) {
  run_packed<bfloat16>(packing_for(w), x, w.rows(), kernels::kLinearTileN,
                       [&](const kernels::LinearInput<bfloat16>& input, std::int64_t m, std::int64_t begin,
                           std::int64_t end, bool more) {
                         const kernels::LinearForwardArgs<bfloat16, O> args{input,
                                                                            nullptr,
                                                                            0,
                                                                            bias ? ptr<bfloat16>(*bias) : nullptr,
                                                                            mutable_ptr<O>(y) + m * y.stride(0),
                                                                            y.stride(0),
                                                                            w.rows(),
                                                                            accumulate};
                         kernel(args, {w.format(), w.tiles()}, begin, end, more);
                       });
}

void swiglu_where_blocks_lie(const at::Tensor& x, const BlockMatrix& w, const std::optional<at::Tensor>& bias,
                             const at::Tensor& gate_up, const at::Tensor& act, kernels::Gate activation) {
  run_packed<bfloat16>(packing_for(w), x, w.rows(), kernels::kSwigluTileN,
                       [&](const kernels::LinearInput<bfloat16>& input, std::int64_t m, std::int64_t begin,
                           std::int64_t end, bool more) {
                         const std::int64_t I = act.size(1);
                         const kernels::LinearSwigluArgs<bfloat16> args{
                             input,
                             nullptr,
                             0,
                             bias ? ptr<bfloat16>(*bias) : nullptr,
                             gate_up.defined() ? mutable_ptr<bfloat16>(gate_up) + m * 2 * I : nullptr,
                             mutable_ptr<bfloat16>(act) + m * I,
                             I,
                             activation};
                         kernels::linear_swiglu_blocks_bf16(args, {w.format(), w.tiles()}, begin, end, more);
                       });
}

void forward_blocks(const at::Tensor& x, const BlockMatrix& w, const std::optional<at::Tensor>& bias,
                    const at::Tensor& y, bool accumulate) {
  check_matrix(y, x, "y", "linear_forward");
  NRL_CHECK_ARG(x.size(1) == w.columns() && y.size(0) == x.size(0) && y.size(1) == w.rows() && fits(bias, w.rows(), x),
                "linear_forward: x ", x.sizes(), ", blocks of [", w.rows(), ", ", w.columns(), "], y ", y.sizes(),
                " or their dtypes do not match");
  if (y.numel() == 0) return;
  if (x.is_cuda())
    return for_device_strips(w, x, [&](const at::Tensor& rows, std::int64_t n, std::int64_t count) {
      const auto of_rows = bias ? std::optional(bias->narrow(0, n, count)) : std::nullopt;
      linear_forward(x, rows, of_rows, y.narrow(1, n, count), accumulate);
    });
  if (reads_blocks(x, w) && y.scalar_type() == at::kBFloat16)
    return forward_where_blocks_lie<bfloat16>(kernels::linear_forward_blocks_bf16, x, w, bias, y, accumulate);
  if (reads_blocks(x, w) && y.scalar_type() == at::kFloat)
    return forward_where_blocks_lie<float>(kernels::linear_forward_blocks_bf16_f32, x, w, bias, y, accumulate);
  if (are_mixed(x) && y.scalar_type() != at::kDouble) return forward_mixed(x, w, bias, y, accumulate);
  forward_on_cpu(x, w, bias, y, accumulate);
}

void swiglu_blocks(const at::Tensor& x, const BlockMatrix& w, const std::optional<at::Tensor>& bias,
                   const at::Tensor& gate_up, const at::Tensor& act, kernels::Gate activation) {
  const std::int64_t M = x.size(0), I = w.rows() / 2;
  const auto is = [&](const at::Tensor& t, std::int64_t columns) {
    return t.scalar_type() == x.scalar_type() && t.is_contiguous() && t.sizes() == at::IntArrayRef({M, columns});
  };
  NRL_CHECK_ARG(w.rows() % 2 == 0 && x.size(1) == w.columns() && is(act, I) &&
                    (!gate_up.defined() || is(gate_up, 2 * I)) && fits(bias, 2 * I, x),
                "linear_swiglu: x ", x.sizes(), ", blocks of [", w.rows(), ", ", w.columns(), "], act ", act.sizes(),
                " or their dtypes do not match");
  if (act.numel() == 0) return;
  if (x.is_cuda() || I % kernels::kBlockTileRows != 0) {  // the first row of ups may lie within a tile
    const auto both = gate_up.defined() ? gate_up : at::empty({M, 2 * I}, act.options());
    forward_blocks(x, w, bias, both, /*accumulate=*/false);
    return swiglu_forward(both, act, activation);
  }
  if (reads_blocks(x, w)) return swiglu_where_blocks_lie(x, w, bias, gate_up, act, activation);
  if (are_mixed(x))
    return run_swiglu<bfloat16, float>(
        {kernels::linear_pack_bf16, kernels::linear_swiglu_mixed_bf16, kernels::linear_wide_bf16,
         kernels::linear_pack_weights_f32, kernels::linear_swiglu_wide_bf16},
        x, Weights<float>(w), bias, gate_up, act, activation);
  swiglu_on_cpu(x, w, bias, gate_up, act, activation);
}

void backward_input_blocks(const at::Tensor& dy, const BlockMatrix& w, const at::Tensor& dx, bool accumulate) {
  check_matrix(dx, dy, "dx", "linear_backward_input");
  const auto type = dy.scalar_type(), out = dx.scalar_type();
  NRL_CHECK_ARG(dy.size(1) == w.rows() && dx.size(0) == dy.size(0) && dx.size(1) == w.columns() &&
                    (out == type || out == at::kFloat),
                "linear_backward_input: dy ", dy.sizes(), ", blocks of [", w.rows(), ", ", w.columns(), "], dx ",
                dx.sizes(), " or their dtypes do not match");
  if (dx.numel() == 0) return;
  if (dy.is_cuda()) return backward_device_blocks(dy, w, dx, accumulate);
  if (type == at::kFloat) return backward_blocks<float, float>(dy, w, dx, accumulate);
  if (out == at::kBFloat16) return backward_blocks<bfloat16, bfloat16>(dy, w, dx, accumulate);
  backward_blocks<bfloat16, float>(dy, w, dx, accumulate);
}

}  // namespace

void linear_forward(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias,
                    const at::Tensor& y, bool accumulate, const PackedWeights* packed) {
  check_matrix(x, x, "x", "linear_forward");
  if (in_blocks(w)) return forward_blocks(x, checked_blocks(x, w, x.size(1), "linear_forward"), bias, y, accumulate);
  check_matrix(w, x, "w", "linear_forward");
  check_matrix(y, x, "y", "linear_forward");
  NRL_CHECK_ARG(x.size(1) == w.size(1) && y.size(0) == x.size(0) && y.size(1) == w.size(0) &&
                    x.scalar_type() == w.scalar_type() && fits(bias, w.size(0), x),
                "linear_forward: x ", x.sizes(), ", w ", w.sizes(), ", y ", y.sizes(), " or their dtypes do not match");
  if (y.numel() == 0) return;
  if (x.is_cuda()) return linear_forward_cuda.get(x)(x, w, bias, y, accumulate);
  if (const auto* copy = packed_copy(packed, w, x.size(0), /*gated=*/false))
    return packed_weights_forward(x, *copy, bias, y, accumulate);
  forward_on_cpu(x, w, bias, y, accumulate);
}

void linear_swiglu(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias,
                   const at::Tensor& gate_up, const at::Tensor& act, kernels::Gate activation,
                   const PackedWeights* packed) {
  NRL_CHECK_ARG(activation == kernels::Gate::silu || activation == kernels::Gate::gelu_tanh,
                "linear_swiglu: the activation must be silu or gelu_tanh");
  check_matrix(x, x, "x", "linear_swiglu");
  if (in_blocks(w))
    return swiglu_blocks(x, checked_blocks(x, w, x.size(1), "linear_swiglu"), bias, gate_up, act, activation);
  check_matrix(w, x, "w", "linear_swiglu");
  const std::int64_t M = x.size(0), I = w.size(0) / 2;
  const auto is = [&](const at::Tensor& t, std::int64_t columns) {
    return t.scalar_type() == x.scalar_type() && t.is_contiguous() && t.sizes() == at::IntArrayRef({M, columns});
  };
  NRL_CHECK_ARG(w.size(0) % 2 == 0 && x.size(1) == w.size(1) && x.scalar_type() == w.scalar_type() && is(act, I) &&
                    (!gate_up.defined() || is(gate_up, 2 * I)) && fits(bias, 2 * I, x),
                "linear_swiglu: x ", x.sizes(), ", w ", w.sizes(), ", act ", act.sizes(),
                " or their dtypes do not match");
  if (act.numel() == 0) return;
  if (x.is_cuda()) {  // the two ops, by definition the same bits
    const auto both = gate_up.defined() ? gate_up : at::empty({M, 2 * I}, act.options());
    linear_forward(x, w, bias, both);
    return swiglu_forward(both, act, activation);
  }
  if (const auto* copy = packed_copy(packed, w, M, /*gated=*/true))
    return packed_weights_swiglu(x, *copy, bias, gate_up, act, activation);
  swiglu_on_cpu(x, w, bias, gate_up, act, activation);
}

void linear_ask_ahead(const at::Tensor& w, bool gated, const PackedWeights* packed) {
  runtime::Team* team = runtime::Team::current();
  if (team == nullptr || !w.is_cpu() || !w.is_contiguous()) return;
  if (const auto* copy = packed_copy(packed, w, 1, gated))
    return team->ask_ahead({{{copy->memory.const_data_ptr(), copy->bytes()}, {}}});
  const std::int64_t parts = gated ? 2 : 1,
                     bytes = static_cast<std::int64_t>(w.nbytes()) / parts;  // gates and ups are read side by side
  const auto* at = static_cast<const char*>(w.const_data_ptr());
  team->ask_ahead({{{at, bytes}, {at + bytes, gated ? bytes : 0}}});
}

void linear_backward_input(const at::Tensor& dy, const at::Tensor& w, const at::Tensor& dx, bool accumulate) {
  if (in_blocks(w))
    return backward_input_blocks(dy, checked_blocks(dy, w, dx.size(1), "linear_backward_input"), dx, accumulate);
  gemm(dy, false, w, dx, accumulate, "linear_backward_input");
}

void linear_backward_weight(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& dw) {
  gemm(dy, true, x, dw, true, "linear_backward_weight");
}

}  // namespace nemo_rl::ops
