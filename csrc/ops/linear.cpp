#include "ops/linear.h"

#include <ATen/Parallel.h>

#include "kernels/linear.h"
#include "ops/gemm.h"
#include "ops/kernel_types.h"
#include "ops/packed_weights.h"
#include "ops/swiglu.h"
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

bool fits(const std::optional<at::Tensor>& bias, const at::Tensor& w) {
  return !bias || (bias->numel() == w.size(0) && bias->scalar_type() == w.scalar_type());
}

/// Room for a strip of so many columns, widened; 0 where w is multiplied as it lies.
template <class T>
std::int64_t strip_floats(std::int64_t M, std::int64_t K, std::int64_t tile_n) {
  if constexpr (std::is_same_v<T, bfloat16>) return kernels::linear_strip_floats_bf16(M, K, tile_n);
  return 0;
}

/// This thread's room for a strip, beside its other scratch memory.
float* thread_strip(std::int64_t floats) {
  thread_local runtime::ScratchMemory memory;
  return floats == 0 ? nullptr : reinterpret_cast<float*>(memory.get(static_cast<std::size_t>(floats) * sizeof(float)));
}

/// Computes tiles by kernel(args(input, 0)) from x of up to kernels::kLinearOwnRows rows.
template <class T, class ArgsOf, class Kernel>
void run_packed_each(kernels::LinearPack<T>* pack, const at::Tensor& x, std::int64_t N, std::int64_t tile_n,
                     const ArgsOf& args_of, Kernel* kernel) {
  const std::int64_t M = x.size(0), K = x.size(1), floats = strip_floats<T>(M, K, tile_n);
  const auto bytes = static_cast<std::size_t>(kernels::linear_packed_bytes(M, K, sizeof(T)));
  const std::int64_t tiles = kernels::LinearTiles(M, N, K, tile_n).count();
  parallel_chunks(1, tiles, runtime::tiles_at_least(K * tile_n * M), bytes, [&](const ChunkTile& t) {
    const kernels::LinearInput<T> input{ptr<T>(x), x.stride(0), M, K, t.packed_rows, thread_strip(floats)};
    if (!t.is_packed) pack(input, 0, 1);
    kernel(args_of(input, 0), t.strip_begin, t.strip_end, t.more);
  });
}

/// Packs x, then computes tiles by kernel(args(input, first row)), for so many rows at a time as are still in a nearby
/// cache once packed.
template <class T, class ArgsOf, class Kernel>
void run_packed(kernels::LinearPack<T>* pack, const at::Tensor& x, std::int64_t N, std::int64_t tile_n,
                const ArgsOf& args_of, Kernel* kernel) {
  const std::int64_t M = x.size(0), K = x.size(1), block = kernels::LinearTiles(M, N, K, tile_n).block_rows;
  if (M <= kernels::kLinearOwnRows) return run_packed_each(pack, x, N, tile_n, args_of, kernel);
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
                     [&](std::int64_t begin, std::int64_t end) { pack(input, begin, end); });
    const kernels::LinearTiles tiles(input.M, N, K, tile_n);
    const std::int64_t floats = strip_floats<T>(input.M, K, tile_n),
                       at_least = runtime::tiles_at_least(K * tile_n * std::min(input.M, kernels::kLinearTileM));
    runtime::parallel_tiles(tiles.count(), floats > 0 ? std::max(tiles.steps, at_least) : at_least,
                            [&](std::int64_t begin, std::int64_t end, bool more) {
                              auto of_thread = input;
                              of_thread.strip_room = thread_strip(floats);
                              kernel(args_of(of_thread, m), begin, end, more);
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

/// What computes a forward product: tile by tile with w where it lies, or, where rows are many and the type has such
/// kernels, wide.
template <class T, class Tiles, class WideTiles>
struct ForwardKernels {
  kernels::LinearPack<T>* pack;
  Tiles* tiles;
  kernels::LinearWideOf* wide_of = nullptr;
  kernels::LinearPackWeights<T>* pack_weights = nullptr;
  WideTiles* wide = nullptr;
  kernels::LinearWide wide_for(std::int64_t K) const { return wide && K > 0 ? wide_of(K) : kernels::LinearWide{}; }
};
template <class T, class O>
using LinearKernels = ForwardKernels<T, kernels::LinearForward<T, O>, kernels::LinearForwardWide<T, O>>;
template <class T>
using SwigluKernels = ForwardKernels<T, kernels::LinearSwiglu<T>, kernels::LinearSwigluWide<T>>;

/// The product of N columns in strips of `width`, or of wide.columns; args_of(input, first row) as for run_packed,
/// pack(strip, out) as for run_wide.
template <class T, class Kernels, class ArgsOf, class Pack>
void run_forward(const Kernels& with, const kernels::LinearWide& wide, const at::Tensor& x, std::int64_t N,
                 std::int64_t width, const ArgsOf& args_of, const Pack& pack) {
  const std::int64_t M = x.size(0), K = x.size(1);
  if (M < wide.from_rows) return run_packed<T>(with.pack, x, N, width, args_of, with.tiles);
  const auto args = args_of({ptr<T>(x), x.stride(0), M, K, nullptr}, 0);
  run_wide(M, N, wide, pack, [&](const kernels::LinearWideTile& tile) { with.wide(args, tile); });
}

template <class T, class O>
void run(const LinearKernels<T, O>& with, const at::Tensor& x, const at::Tensor& w,
         const std::optional<at::Tensor>& bias, const at::Tensor& y, bool accumulate) {
  constexpr std::int64_t kWidth = kernels::kLinearTileN;
  const std::int64_t K = x.size(1), N = w.size(0), ldw = w.stride(0);
  const auto args_of = [&](const kernels::LinearInput<T>& input, std::int64_t m) {
    return kernels::LinearForwardArgs<T, O>{
        input,       ptr<T>(w), ldw,       bias ? ptr<T>(*bias) : nullptr, mutable_ptr<O>(y) + m * y.stride(0),
        y.stride(0), N,         accumulate};
  };
  const auto wide = with.wide_for(K);
  const auto pack = [&](std::int64_t strip, float* out) {
    for (std::int64_t n = strip * wide.columns; n < (strip + 1) * wide.columns; n += kWidth, out += kWidth * wide.words)
      with.pack_weights(ptr<T>(w) + std::min(n, N - 1) * ldw, ldw, std::max<std::int64_t>(0, N - n), K, out);
  };
  run_forward<T>(with, wide, x, N, kWidth, args_of, pack);
}

template <class T>
void run_swiglu(const SwigluKernels<T>& with, const at::Tensor& x, const at::Tensor& w,
                const std::optional<at::Tensor>& bias, const at::Tensor& gate_up, const at::Tensor& act) {
  constexpr std::int64_t kHalf = kernels::kSwigluTileN / 2;
  const std::int64_t K = x.size(1), I = act.size(1), ldw = w.stride(0);
  const auto args_of = [&](const kernels::LinearInput<T>& input, std::int64_t m) {
    return kernels::LinearSwigluArgs<T>{input,
                                        ptr<T>(w),
                                        ldw,
                                        bias ? ptr<T>(*bias) : nullptr,
                                        gate_up.defined() ? mutable_ptr<T>(gate_up) + m * 2 * I : nullptr,
                                        mutable_ptr<T>(act) + m * I,
                                        I};
  };
  auto wide = with.wide_for(K);
  wide.columns = kernels::kSwigluTileN;  // as many gates and their ups
  const auto pack = [&](std::int64_t strip, float* out) {
    const std::int64_t i = strip * kHalf;
    with.pack_weights(ptr<T>(w) + i * ldw, ldw, I - i, K, out);
    with.pack_weights(ptr<T>(w) + (I + i) * ldw, ldw, I - i, K, out + wide.words * kHalf);
  };
  run_forward<T>(with, wide, x, 2 * I, kernels::kSwigluTileN, args_of, pack);
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

}  // namespace

void linear_forward(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias,
                    const at::Tensor& y, bool accumulate, const PackedWeights* packed) {
  check_matrix(x, x, "x", "linear_forward");
  check_matrix(w, x, "w", "linear_forward");
  check_matrix(y, x, "y", "linear_forward");
  NRL_CHECK_ARG(x.size(1) == w.size(1) && y.size(0) == x.size(0) && y.size(1) == w.size(0) &&
                    x.scalar_type() == w.scalar_type() && fits(bias, w),
                "linear_forward: x ", x.sizes(), ", w ", w.sizes(), ", y ", y.sizes(), " or their dtypes do not match");
  if (y.numel() == 0) return;
  if (x.is_cuda()) return linear_forward_cuda.get(x)(x, w, bias, y, accumulate);
  if (const auto* copy = packed_copy(packed, w, x.size(0), /*gated=*/false))
    return packed_weights_forward(x, *copy, bias, y, accumulate);
  using namespace kernels;
  const auto type = x.scalar_type(), out = y.scalar_type();
  if (type == at::kFloat && out == at::kFloat)
    return run<float, float>(
        {linear_pack_f32, linear_forward_f32, linear_wide_f32, linear_pack_weights_f32, linear_forward_wide_f32}, x, w,
        bias, y, accumulate);
  if (type == at::kDouble && out == at::kDouble)
    return run<double, double>({linear_pack_f64, linear_forward_f64}, x, w, bias, y, accumulate);
  if (type == at::kBFloat16 && out == at::kBFloat16)
    return run<bfloat16, bfloat16>(
        {linear_pack_bf16, linear_forward_bf16, linear_wide_bf16, linear_pack_weights_bf16, linear_forward_wide_bf16},
        x, w, bias, y, accumulate);
  if (type == at::kBFloat16 && out == at::kFloat)
    return run<bfloat16, float>({linear_pack_bf16, linear_forward_bf16_f32, linear_wide_bf16, linear_pack_weights_bf16,
                                 linear_forward_wide_bf16_f32},
                                x, w, bias, y, accumulate);
  throw ArgumentError(
      detail::concat("linear_forward: no product of ", c10::toString(type), " into ", c10::toString(out)));
}

void linear_swiglu(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias,
                   const at::Tensor& gate_up, const at::Tensor& act, const PackedWeights* packed) {
  check_matrix(x, x, "x", "linear_swiglu");
  check_matrix(w, x, "w", "linear_swiglu");
  const std::int64_t M = x.size(0), I = w.size(0) / 2;
  const auto is = [&](const at::Tensor& t, std::int64_t columns) {
    return t.scalar_type() == x.scalar_type() && t.is_contiguous() && t.sizes() == at::IntArrayRef({M, columns});
  };
  NRL_CHECK_ARG(w.size(0) % 2 == 0 && x.size(1) == w.size(1) && x.scalar_type() == w.scalar_type() && is(act, I) &&
                    (!gate_up.defined() || is(gate_up, 2 * I)) && fits(bias, w),
                "linear_swiglu: x ", x.sizes(), ", w ", w.sizes(), ", act ", act.sizes(),
                " or their dtypes do not match");
  if (act.numel() == 0) return;
  if (x.is_cuda()) {  // the two ops, by definition the same bits
    const auto both = gate_up.defined() ? gate_up : at::empty({M, 2 * I}, act.options());
    linear_forward(x, w, bias, both);
    return swiglu_forward(both, act);
  }
  if (const auto* copy = packed_copy(packed, w, M, /*gated=*/true))
    return packed_weights_swiglu(x, *copy, bias, gate_up, act);
  using namespace kernels;
  switch (x.scalar_type()) {
    case at::kFloat:
      return run_swiglu<float>(
          {linear_pack_f32, linear_swiglu_f32, linear_wide_f32, linear_pack_weights_f32, linear_swiglu_wide_f32}, x, w,
          bias, gate_up, act);
    case at::kDouble:
      return run_swiglu<double>({linear_pack_f64, linear_swiglu_f64}, x, w, bias, gate_up, act);
    case at::kBFloat16:
      return run_swiglu<bfloat16>(
          {linear_pack_bf16, linear_swiglu_bf16, linear_wide_bf16, linear_pack_weights_bf16, linear_swiglu_wide_bf16},
          x, w, bias, gate_up, act);
    default:
      throw ArgumentError(detail::concat("linear_swiglu: no product of ", c10::toString(x.scalar_type())));
  }
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
  gemm(dy, false, w, dx, accumulate, "linear_backward_input");
}

void linear_backward_weight(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& dw) {
  gemm(dy, true, x, dw, true, "linear_backward_weight");
}

}  // namespace nemo_rl::ops
