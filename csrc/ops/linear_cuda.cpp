// Matrix products on CUDA. Forward: for each (N, K, dtypes) one cuBLASLt algorithm, chosen once whatever the number of rows M and
// checked to give a row the same bits in every batch, so that trainer and engine agree. Backward: the library's choice for each shape.
#include "ops/linear.h"

#include <map>
#include <mutex>
#include <tuple>

#include "kernels/cuda/model_launchers.h"
#include "ops/cublaslt.h"

namespace nemo_rl::ops {
namespace {

constexpr std::int64_t kCheckRows = 256;  // the M for which algorithms are chosen, and the rows of their check
constexpr std::size_t kMostBackwardShapes = 8192;

/// The largest power of two up to 16 bytes that divides a row of `ld` values.
std::uint32_t row_alignment(const at::Tensor& t) {
  const auto bytes = static_cast<std::uint64_t>(t.stride(0)) * t.element_size();
  return bytes == 0 ? 16 : static_cast<std::uint32_t>(std::min<std::uint64_t>(16, bytes & ~(bytes - 1)));
}

std::uint32_t common_alignment(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c, const char* op) {
  const std::uint32_t alignment = std::min({row_alignment(a), row_alignment(b), row_alignment(c)});
  for (const auto& t : {a, b, c})
    NRL_CHECK(reinterpret_cast<std::uintptr_t>(t.const_data_ptr()) % alignment == 0, op, ": the memory of ", t.sizes(), " does not begin at a multiple of ",
              alignment, " bytes");
  return alignment;
}

/// y[M, N] = x[M, K] · w[N, K]^T, column-major: y^T = w · x^T.
CublasProblem forward_problem(const at::Tensor& x, const at::Tensor& w, const at::Tensor& y) {
  CublasProblem p;
  p.transpose_a = true;
  p.m = w.size(0), p.n = x.size(0), p.k = x.size(1);
  p.lda = std::max(w.stride(0), p.k), p.ldb = std::max(x.stride(0), p.k), p.ldc = std::max(y.stride(0), p.m);
  p.in = cublas_type(x.scalar_type(), "linear_forward"), p.out = cublas_type(y.scalar_type(), "linear_forward");
  p.alignment = common_alignment(x, w, y, "linear_forward");
  return p;
}

bool run_forward(const at::Tensor& x, const at::Tensor& w, const at::Tensor& y, bool accumulate, const CublasAlgorithm& algorithm,
                 const CudaLaunch& launch) {
  return cublas_run(forward_problem(x, w, y), {w.const_data_ptr(), x.const_data_ptr(), y.data_ptr()}, algorithm, accumulate, launch);
}

at::Tensor bits(const at::Tensor& y) { return y.view(y.scalar_type() == at::kFloat ? at::kInt : at::kShort); }

/// Whether rows come out alike, wherever they stand and however many there are.
bool exact(const at::Tensor& x, const at::Tensor& w, at::ScalarType out, const CublasAlgorithm& algorithm, const CudaLaunch& launch) {
  const auto all = at::empty({x.size(0), w.size(0)}, w.options().dtype(out));
  if (!run_forward(x, w, all, false, algorithm, launch)) return false;
  for (const auto& [begin, count] : {std::pair{0, 1}, {100, 1}, {37, 17}, {3, 129}, {128, 128}}) {
    const auto part = at::empty({count, w.size(0)}, all.options());
    if (!run_forward(x.narrow(0, begin, count), w, part, false, algorithm, launch)) return false;
    if (!at::equal(bits(part), bits(all.narrow(0, begin, count)))) return false;
  }
  return true;
}

/// The one algorithm for these weights' shape, chosen at the first product.
CublasAlgorithm pinned_algorithm(const at::Tensor& x, const at::Tensor& w, const at::Tensor& y, const CudaLaunch& launch) {
  static std::mutex mutex;
  static std::map<std::tuple<int, std::int64_t, std::int64_t, at::ScalarType, at::ScalarType, std::uint32_t>, CublasAlgorithm> pinned;
  CublasProblem problem = forward_problem(x, w, y);
  const auto key = std::tuple(static_cast<int>(x.get_device()), w.size(0), w.size(1), x.scalar_type(), y.scalar_type(), problem.alignment);
  const std::lock_guard lock(mutex);
  if (const auto found = pinned.find(key); found != pinned.end()) return found->second;
  const auto sample = at::linspace(-1, 1, kCheckRows * w.size(1), x.options().dtype(at::kFloat)).sin_().view({kCheckRows, w.size(1)}).to(x.scalar_type());
  problem.n = kCheckRows, problem.ldb = w.size(1), problem.ldc = w.size(0);
  for (const auto& algorithm : cublas_algorithms(problem, /*whole_sums=*/true, x.get_device()))
    if (exact(sample, w, y.scalar_type(), algorithm, launch)) return pinned.emplace(key, algorithm).first->second;
  NRL_CHECK(false, "linear_forward: cuBLASLt offers no algorithm for weights ", w.sizes(), " ", c10::toString(w.scalar_type()), " on ", w.device().str(),
            " that gives a row the same bits in every batch: trainer and engine would differ");
}

void linear_forward_on_cuda(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias, const at::Tensor& y, bool accumulate) {
  const CudaLaunch launch(x, "linear_forward");
  NRL_CHECK_ARG(y.scalar_type() == x.scalar_type() || y.scalar_type() == at::kFloat, "linear_forward: no product of ", c10::toString(x.scalar_type()),
                " into ", c10::toString(y.scalar_type()));
  if (x.size(1) == 0) {
    if (!accumulate) y.zero_();
    NRL_CHECK_ARG(!bias, "linear_forward: a bias without a product");
    return;
  }
  if (bias) {  // the product is added to it: one rounding, as on the CPU
    const auto add = [&](auto tag, auto out) {
      using T = decltype(tag);
      using O = decltype(out);
      launch.check(kernels::bias_rows_launch(ptr<T>(*bias), mutable_ptr<O>(y), y.stride(0), y.size(0), y.size(1), accumulate, launch.stream));
    };
    NRL_CHECK_ARG(bias->is_contiguous() && bias->device() == x.device(), "linear_forward: bias must be contiguous on ", x.device().str());
    if (x.scalar_type() == at::kFloat) {
      add(float{}, float{});
    } else if (y.scalar_type() == at::kFloat) {
      add(bfloat16{}, float{});
    } else {
      add(bfloat16{}, bfloat16{});
    }
  }
  const CublasAlgorithm algorithm = pinned_algorithm(x, w, y, launch);
  NRL_CHECK(run_forward(x, w, y, accumulate || bias.has_value(), algorithm, launch), "linear_forward: cuBLASLt refused x ", x.sizes(), ", w ", w.sizes(),
            " on ", x.device().str());
  launch.check(cudaGetLastError());
}

/// c[M, N] (+)= a · b with a [M, K] (or [K, M], transposed) and b [K, N]; column-major: c^T = b^T · a^T.
void linear_backward_on_cuda(const at::Tensor& a, bool transposed, const at::Tensor& b, const at::Tensor& c, bool accumulate, const char* op) {
  static std::mutex mutex;
  static std::map<std::tuple<int, bool, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, cudaDataType_t, cudaDataType_t,
                             std::uint32_t>, CublasAlgorithm> chosen;
  const CudaLaunch launch(a, op);
  CublasProblem p;
  p.transpose_b = transposed;
  p.m = c.size(1), p.n = c.size(0), p.k = b.size(0);
  p.lda = std::max(b.stride(0), p.m), p.ldb = std::max(a.stride(0), a.size(1)), p.ldc = std::max(c.stride(0), p.m);
  p.in = cublas_type(a.scalar_type(), op), p.out = cublas_type(c.scalar_type(), op);
  p.alignment = common_alignment(a, b, c, op);
  const auto key = std::tuple(static_cast<int>(a.get_device()), transposed, p.m, p.n, p.k, p.lda, p.ldb, p.ldc, p.in, p.out, p.alignment);
  CublasAlgorithm algorithm;
  {
    const std::lock_guard lock(mutex);
    auto found = chosen.find(key);
    if (found == chosen.end()) {
      const auto offered = cublas_algorithms(p, /*whole_sums=*/false, a.get_device());
      NRL_CHECK(!offered.empty(), op, ": cuBLASLt offers no algorithm for ", a.sizes(), " and ", b.sizes(), " ", c10::toString(a.scalar_type()), " into ",
                c10::toString(c.scalar_type()));
      if (chosen.size() >= kMostBackwardShapes) chosen.clear();
      found = chosen.emplace(key, offered.front()).first;
    }
    algorithm = found->second;
  }
  NRL_CHECK(cublas_run(p, {b.const_data_ptr(), a.const_data_ptr(), c.data_ptr()}, algorithm, accumulate, launch), op, ": cuBLASLt refused ", a.sizes(),
            " and ", b.sizes(), " on ", a.device().str());
  launch.check(cudaGetLastError());
}

const bool registered = [] {
  linear_forward_cuda.set(linear_forward_on_cuda);
  linear_backward_cuda.set(linear_backward_on_cuda);
  return true;
}();

}  // namespace
}  // namespace nemo_rl::ops
