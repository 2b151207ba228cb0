// Matrix products on CUDA. Forward: for each (N, K, dtypes) one cuBLASLt algorithm is checked to give a row the same
// bits in every batch, so that trainer and engine agree; for other numbers of rows M the library's choice takes its
// place where it sums in the same order. Backward: the library's choice for each shape.
#include <algorithm>
#include <bit>
#include <map>
#include <mutex>
#include <tuple>

#include "kernels/cuda/model_launchers.h"
#include "ops/kernel_types.h"
#include "ops/linear.h"
#include "runtime/cublaslt.h"

namespace nemo_rl::ops {
namespace {

constexpr std::int64_t kCheckRows = 256;  // the M for which algorithms are pinned, and the rows of their check
constexpr std::int64_t kMostComparedRows = 2048, kMostComparedValues = std::int64_t{1} << 26;
constexpr std::size_t kMostCompared = 8;  // algorithms for one M
constexpr std::size_t kMostBackwardShapes = 8192;

/// The largest power of two up to 16 bytes that divides a row of `ld` values.
std::uint32_t row_alignment(const at::Tensor& t) {
  const auto bytes = static_cast<std::uint64_t>(t.stride(0)) * t.element_size();
  return bytes == 0 ? 16 : static_cast<std::uint32_t>(std::min<std::uint64_t>(16, bytes & ~(bytes - 1)));
}

std::uint32_t common_alignment(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c, const char* op) {
  const std::uint32_t alignment = std::min({row_alignment(a), row_alignment(b), row_alignment(c)});
  for (const auto& t : {a, b, c})
    NRL_CHECK(reinterpret_cast<std::uintptr_t>(t.const_data_ptr()) % alignment == 0, op, ": the memory of ", t.sizes(),
              " does not begin at a multiple of ", alignment, " bytes");
  return alignment;
}

/// y[M, N] = x[M, K] · w[N, K]^T, column-major: y^T = w · x^T.
runtime::CublasProblem forward_problem(const at::Tensor& x, const at::Tensor& w, const at::Tensor& y) {
  runtime::CublasProblem p;
  p.transpose_a = true;
  p.m = w.size(0), p.n = x.size(0), p.k = x.size(1);
  p.lda = std::max(w.stride(0), p.k), p.ldb = std::max(x.stride(0), p.k), p.ldc = std::max(y.stride(0), p.m);
  p.in = runtime::cublas_type(x.scalar_type(), "linear_forward"),
  p.out = runtime::cublas_type(y.scalar_type(), "linear_forward");
  p.alignment = common_alignment(x, w, y, "linear_forward");
  return p;
}

bool run_forward(const at::Tensor& x, const at::Tensor& w, const at::Tensor& y, bool accumulate,
                 const runtime::CublasAlgorithm& algorithm, const runtime::CudaLaunch& launch) {
  return runtime::cublas_run(forward_problem(x, w, y), {w.const_data_ptr(), x.const_data_ptr(), y.data_ptr()},
                             algorithm, accumulate, launch);
}

at::Tensor bits(const at::Tensor& y) { return y.view(y.scalar_type() == at::kFloat ? at::kInt : at::kShort); }

/// Operands [rows, K] and [N, K] whose terms cancel, the second half of a sum being the first backwards with the other
/// sign: what is left is rounding, of which even bfloat16 shows whether two algorithms sum in one order.
struct CancellingSums {
  at::Tensor x, w;
  CancellingSums(std::int64_t rows, const at::Tensor& like) {
    const auto half = [&](std::int64_t n) {
      const auto numbers = [&](std::int64_t end) { return at::arange(1, end + 1, like.options().dtype(at::kFloat)); };
      return at::outer(numbers(n), numbers(like.size(1) / 2)).mul_(0.618).sin_().to(like.scalar_type());
    };
    const auto of_x = half(rows), of_w = half(like.size(0));
    const auto whole = [&](const at::Tensor& first, const at::Tensor& second) {
      return at::constant_pad_nd(at::cat({first, second}, 1), {0, like.size(1) % 2});  // contiguous
    };
    x = whole(of_x, of_x.flip(1));
    w = whole(of_w, of_w.flip(1).neg_());
  }
};

/// Whether rows come out alike, wherever they stand and however many there are.
bool exact(const CancellingSums& sums, at::ScalarType out, const runtime::CublasAlgorithm& algorithm,
           const runtime::CudaLaunch& launch) {
  const auto all = at::empty({sums.x.size(0), sums.w.size(0)}, sums.w.options().dtype(out));
  if (!run_forward(sums.x, sums.w, all, false, algorithm, launch)) return false;
  for (const auto& [begin, count] : {std::pair{0, 1}, {100, 1}, {37, 17}, {3, 129}, {128, 128}}) {
    const auto part = at::empty({count, sums.w.size(0)}, all.options());
    if (!run_forward(sums.x.narrow(0, begin, count), sums.w, part, false, algorithm, launch)) return false;
    if (!at::equal(bits(part), bits(all.narrow(0, begin, count)))) return false;
  }
  return true;
}

/// For about so many rows, the first of the library's choices that gives the bits of `pinned`.
runtime::CublasAlgorithm algorithm_for_rows(runtime::CublasProblem problem, std::int64_t rows, const at::Tensor& w,
                                            at::ScalarType out, const runtime::CublasAlgorithm& pinned,
                                            const runtime::CudaLaunch& launch) {
  problem.n = rows;
  const auto offered = runtime::cublas_algorithms(problem, /*whole_sums=*/true, w.get_device());
  const std::int64_t compared = std::max<std::int64_t>(
      1, std::min(std::clamp(rows, kCheckRows, kMostComparedRows), kMostComparedValues / w.size(0)));
  const CancellingSums sums(compared, w);
  const auto result = [&](const runtime::CublasAlgorithm& algorithm) {
    const auto y = at::empty({sums.x.size(0), w.size(0)}, w.options().dtype(out));
    return run_forward(sums.x, sums.w, y, false, algorithm, launch) ? y : at::Tensor();
  };
  const auto expected = result(pinned);
  if (!expected.defined()) return pinned;
  for (std::size_t i = 0; i < std::min(offered.size(), kMostCompared); ++i)
    if (const auto got = result(offered[i]); got.defined() && at::equal(bits(got), bits(expected))) return offered[i];
  return pinned;
}

/// The algorithm that is the measure for these weights' shape.
runtime::CublasAlgorithm pinned_algorithm(runtime::CublasProblem problem, const at::Tensor& w, at::ScalarType out,
                                          const runtime::CudaLaunch& launch) {
  const CancellingSums sums(kCheckRows, w);
  problem.n = kCheckRows, problem.ldb = w.size(1), problem.ldc = w.size(0);
  for (const auto& algorithm : runtime::cublas_algorithms(problem, /*whole_sums=*/true, w.get_device()))
    if (exact(sums, out, algorithm, launch)) return algorithm;
  NRL_CHECK(false, "linear_forward: cuBLASLt offers no algorithm for weights ", w.sizes(), " ",
            c10::toString(w.scalar_type()), " on ", w.device().str(),
            " that gives a row the same bits in every batch: trainer and engine would differ");
}

/// Chosen at the first product of these weights' shape with up to the next power of two of rows.
runtime::CublasAlgorithm forward_algorithm(const at::Tensor& x, const at::Tensor& w, const at::Tensor& y,
                                           const runtime::CudaLaunch& launch) {
  struct Chosen {
    runtime::CublasAlgorithm pinned;
    std::map<std::int64_t, runtime::CublasAlgorithm> for_rows;
  };
  static std::mutex mutex;
  static std::map<std::tuple<int, std::int64_t, std::int64_t, at::ScalarType, at::ScalarType, std::uint32_t>, Chosen>
      all;
  const runtime::CublasProblem problem = forward_problem(x, w, y);
  const auto key = std::tuple(static_cast<int>(x.get_device()), w.size(0), w.size(1), x.scalar_type(), y.scalar_type(),
                              problem.alignment);
  const std::lock_guard lock(mutex);
  auto found = all.find(key);
  if (found == all.end())
    found = all.emplace(key, Chosen{pinned_algorithm(problem, w, y.scalar_type(), launch), {}}).first;
  const auto rows =
      static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(std::max<std::int64_t>(1, x.size(0)))));
  auto& for_rows = found->second.for_rows;
  auto chosen = for_rows.find(rows);
  if (chosen == for_rows.end())
    chosen = for_rows.emplace(rows, algorithm_for_rows(problem, rows, w, y.scalar_type(), found->second.pinned, launch))
                 .first;
  return chosen->second;
}

void linear_forward_on_cuda(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias,
                            const at::Tensor& y, bool accumulate) {
  const runtime::CudaLaunch launch(x, "linear_forward");
  NRL_CHECK_ARG(y.scalar_type() == x.scalar_type() || y.scalar_type() == at::kFloat, "linear_forward: no product of ",
                c10::toString(x.scalar_type()), " into ", c10::toString(y.scalar_type()));
  if (x.size(1) == 0) {
    if (!accumulate) y.zero_();
    NRL_CHECK_ARG(!bias, "linear_forward: a bias without a product");
    return;
  }
  if (bias) {  // the product is added to it: one rounding, as on the CPU
    const auto add = [&](auto tag, auto out) {
      using T = decltype(tag);
      using O = decltype(out);
      launch.check(kernels::bias_rows_launch(ptr<T>(*bias), mutable_ptr<O>(y), y.stride(0), y.size(0), y.size(1),
                                             accumulate, launch.stream));
    };
    NRL_CHECK_ARG(bias->is_contiguous() && bias->device() == x.device(), "linear_forward: bias must be contiguous on ",
                  x.device().str());
    if (x.scalar_type() == at::kFloat) {
      add(float{}, float{});
    } else if (y.scalar_type() == at::kFloat) {
      add(bfloat16{}, float{});
    } else {
      add(bfloat16{}, bfloat16{});
    }
  }
  const runtime::CublasAlgorithm algorithm = forward_algorithm(x, w, y, launch);
  NRL_CHECK(run_forward(x, w, y, accumulate || bias.has_value(), algorithm, launch),
            "linear_forward: cuBLASLt refused x ", x.sizes(), ", w ", w.sizes(), " on ", x.device().str());
  launch.check(cudaGetLastError());
}

/// c[M, N] (+)= a · b with a [M, K] (or [K, M], transposed) and b [K, N]; column-major: c^T = b^T · a^T.
void linear_backward_on_cuda(const at::Tensor& a, bool transposed, const at::Tensor& b, const at::Tensor& c,
                             bool accumulate, const char* op) {
  static std::mutex mutex;
  static std::map<std::tuple<int, bool, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t,
                             std::int64_t, cudaDataType_t, cudaDataType_t, std::uint32_t>,
                  runtime::CublasAlgorithm>
      chosen;
  const runtime::CudaLaunch launch(a, op);
  runtime::CublasProblem p;
  p.transpose_b = transposed;
  p.m = c.size(1), p.n = c.size(0), p.k = b.size(0);
  p.lda = std::max(b.stride(0), p.m), p.ldb = std::max(a.stride(0), a.size(1)), p.ldc = std::max(c.stride(0), p.m);
  p.in = runtime::cublas_type(a.scalar_type(), op), p.out = runtime::cublas_type(c.scalar_type(), op);
  p.alignment = common_alignment(a, b, c, op);
  const auto key = std::tuple(static_cast<int>(a.get_device()), transposed, p.m, p.n, p.k, p.lda, p.ldb, p.ldc, p.in,
                              p.out, p.alignment);
  runtime::CublasAlgorithm algorithm;
  {
    const std::lock_guard lock(mutex);
    auto found = chosen.find(key);
    if (found == chosen.end()) {
      const auto offered = runtime::cublas_algorithms(p, /*whole_sums=*/false, a.get_device());
      NRL_CHECK(!offered.empty(), op, ": cuBLASLt offers no algorithm for ", a.sizes(), " and ", b.sizes(), " ",
                c10::toString(a.scalar_type()), " into ", c10::toString(c.scalar_type()));
      if (chosen.size() >= kMostBackwardShapes) chosen.clear();
      found = chosen.emplace(key, offered.front()).first;
    }
    algorithm = found->second;
  }
  NRL_CHECK(
      runtime::cublas_run(p, {b.const_data_ptr(), a.const_data_ptr(), c.data_ptr()}, algorithm, accumulate, launch), op,
      ": cuBLASLt refused ", a.sizes(), " and ", b.sizes(), " on ", a.device().str());
  launch.check(cudaGetLastError());
}

const bool registered = [] {
  linear_forward_cuda.set(linear_forward_on_cuda);
  linear_backward_cuda.set(linear_backward_on_cuda);
  return true;
}();

}  // namespace
}  // namespace nemo_rl::ops
