// Descriptors, heuristics and launches of cuBLASLt.
#include <memory>
#include <mutex>
#include <type_traits>
#include <unordered_map>

#include "runtime/cublaslt.h"

namespace nemo_rl::runtime {
namespace {

constexpr std::size_t kMaxWorkspace = std::size_t{32} << 20;
constexpr int kMaxCandidates = 32;

void check(cublasStatus_t status, const char* what) {
  NRL_CHECK(status == CUBLAS_STATUS_SUCCESS, "cuBLASLt: ", what, ": ", cublasLtGetStatusString(status));
}

template <class T, cublasStatus_t (*Destroy)(T)>
struct Destroyer {
  using pointer = T;
  void operator()(T handle) const { Destroy(handle); }
};
using Operation = std::unique_ptr<cublasLtMatmulDesc_t, Destroyer<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>>;
using Layout = std::unique_ptr<cublasLtMatrixLayout_t, Destroyer<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>>;
using Preference =
    std::unique_ptr<cublasLtMatmulPreference_t, Destroyer<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>>;

Layout make_layout(cudaDataType_t type, std::int64_t rows, std::int64_t columns, std::int64_t ld) {
  cublasLtMatrixLayout_t layout = nullptr;
  check(cublasLtMatrixLayoutCreate(&layout, type, static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(columns),
                                   ld),
        "matrix layout");
  return Layout(layout);
}

struct Descriptors {
  explicit Descriptors(const CublasProblem& p)
      : a(p.transpose_a ? make_layout(p.in, p.k, p.m, p.lda) : make_layout(p.in, p.m, p.k, p.lda)),
        b(p.transpose_b ? make_layout(p.in, p.n, p.k, p.ldb) : make_layout(p.in, p.k, p.n, p.ldb)),
        c(make_layout(p.out, p.m, p.n, p.ldc)) {
    cublasLtMatmulDesc_t raw = nullptr;
    check(cublasLtMatmulDescCreate(&raw, CUBLAS_COMPUTE_32F, CUDA_R_32F), "operation");
    operation.reset(raw);
    const cublasOperation_t of_a = p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N,
                            of_b = p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    check(cublasLtMatmulDescSetAttribute(raw, CUBLASLT_MATMUL_DESC_TRANSA, &of_a, sizeof(of_a)), "operation of a");
    check(cublasLtMatmulDescSetAttribute(raw, CUBLASLT_MATMUL_DESC_TRANSB, &of_b, sizeof(of_b)), "operation of b");
  }
  Operation operation;
  Layout a, b, c;
};

/// One handle a device, made at the first product: loading the module needs no driver.
cublasLtHandle_t handle_of(int device) {
  static std::mutex mutex;
  static std::unordered_map<int, cublasLtHandle_t> handles;
  const std::lock_guard lock(mutex);
  auto& handle = handles[device];
  if (handle == nullptr) check(cublasLtCreate(&handle), "handle");
  return handle;
}

template <class V>
void set(const Preference& preference, cublasLtMatmulPreferenceAttributes_t name, V value) {
  check(cublasLtMatmulPreferenceSetAttribute(preference.get(), name, &value, sizeof(value)), "preference");
}

/// Whether every output is summed along k by one thread block in one go.
bool sums_whole(const cublasLtMatmulAlgo_t& algo) {
  std::int32_t parts = 0;
  std::uint32_t scheme = 0;
  std::size_t written = 0;
  const auto get = [&](cublasLtMatmulAlgoConfigAttributes_t name, auto& value) {
    return cublasLtMatmulAlgoConfigGetAttribute(&algo, name, &value, sizeof(value), &written) == CUBLAS_STATUS_SUCCESS;
  };
  return get(CUBLASLT_ALGO_CONFIG_SPLITK_NUM, parts) && parts <= 1 &&
         get(CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, scheme) && scheme == CUBLASLT_REDUCTION_SCHEME_NONE;
}

}  // namespace

cudaDataType_t cublas_type(at::ScalarType dtype, const char* op) {
  return dispatch_cuda(dtype, op,
                       [](auto tag) { return std::is_same_v<decltype(tag), float> ? CUDA_R_32F : CUDA_R_16BF; });
}

std::vector<CublasAlgorithm> cublas_algorithms(const CublasProblem& problem, bool whole_sums, int device) {
  const Descriptors d(problem);
  cublasLtMatmulPreference_t raw = nullptr;
  check(cublasLtMatmulPreferenceCreate(&raw), "preference");
  const Preference preference(raw);
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(kMaxWorkspace));
  // partial sums, where they are allowed, meet in a workspace in a fixed order: the same bits in every run
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<std::uint32_t>(whole_sums ? CUBLASLT_REDUCTION_SCHEME_NONE : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  for (const auto name : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
    set(preference, name, problem.alignment);
  cublasLtMatmulHeuristicResult_t found[kMaxCandidates];
  int count = 0;
  const auto status =
      cublasLtMatmulAlgoGetHeuristic(handle_of(device), d.operation.get(), d.a.get(), d.b.get(), d.c.get(), d.c.get(),
                                     preference.get(), whole_sums ? kMaxCandidates : 1, found, &count);
  std::vector<CublasAlgorithm> out;
  if (status != CUBLAS_STATUS_SUCCESS) return out;
  for (int i = 0; i < count; ++i)
    if (found[i].state == CUBLAS_STATUS_SUCCESS && (!whole_sums || sums_whole(found[i].algo)))
      out.push_back({found[i].algo, found[i].workspaceSize});
  return out;
}

bool cublas_run(const CublasProblem& problem, const CublasOperands& operands, const CublasAlgorithm& algorithm,
                bool accumulate, const CudaLaunch& launch) {
  const Descriptors d(problem);
  const float alpha = 1, beta = accumulate ? 1 : 0;
  const auto bytes = static_cast<std::int64_t>(algorithm.workspace_bytes);
  const auto workspace = bytes > 0 ? launch.scratch(bytes, at::kByte) : at::Tensor();
  return cublasLtMatmul(handle_of(launch.like.get_device()), d.operation.get(), &alpha, operands.a, d.a.get(),
                        operands.b, d.b.get(), &beta, operands.c, d.c.get(), operands.c, d.c.get(), &algorithm.algo,
                        bytes > 0 ? workspace.data_ptr() : nullptr, algorithm.workspace_bytes,
                        launch.stream) == CUBLAS_STATUS_SUCCESS;
}

}  // namespace nemo_rl::runtime
