#include "ops/packed_weights.h"

#include <ATen/Parallel.h>

#include <atomic>

#include "ops/kernel_types.h"
#include "runtime/large_tensor.h"
#include "runtime/parallel_items.h"
#include "runtime/tensor.h"

namespace nemo_rl::ops {
namespace {

constexpr std::int64_t kStrip = kernels::kPackedStrip;

bool can_be_packed(const at::Tensor& w, bool gated) {
  const std::int64_t rows = gated ? 2 * kStrip : kStrip;
  return PackedWeights::most_rows() > 0 && w.is_cpu() && w.scalar_type() == at::kBFloat16 && w.dim() == 2 &&
         w.is_contiguous() && w.numel() > 0 && w.size(0) % rows == 0 && w.size(1) % kernels::kPackedTerms == 0 &&
         w.size(1) <= kernels::kPackedMostTerms;
}

/// x as the kernels of few rows read it.
kernels::LinearInput<bfloat16> packed_rows(const at::Tensor& x) {
  const std::int64_t M = x.size(0), K = x.size(1);
  void* const packed =
      runtime::thread_workspace(static_cast<std::size_t>(kernels::linear_packed_bytes(M, K, sizeof(bfloat16))));
  const kernels::LinearInput<bfloat16> input{ptr<bfloat16>(x), x.stride(0), M, K, packed};
  kernels::packed_weights_pack_rows(input);
  return input;
}

/// Calls f(begin, end) for tiles of `width` columns of N.
template <class F>
void over_tiles(const kernels::LinearInput<bfloat16>& input, std::int64_t N, std::int64_t width, const F& f) {
  runtime::parallel_tiles(N / width, runtime::tiles_at_least(input.K * width * input.M),
                          [&](std::int64_t begin, std::int64_t end, bool) { f(begin, end); });
}

const bfloat16* bias_of(const std::optional<at::Tensor>& bias) { return bias ? ptr<bfloat16>(*bias) : nullptr; }

}  // namespace

kernels::PackedMatrix PackedWeights::Matrix::view() const {
  auto* const at = static_cast<std::byte*>(memory.data_ptr());
  return {at, reinterpret_cast<kernels::PackedPatch*>(at + bytes()), K};
}

void PackedWeights::pack(const at::Tensor& w, bool gated) {
  if (!can_be_packed(w, gated)) return;
  const std::int64_t N = w.size(0), K = w.size(1), strips = N / kStrip;
  auto& m = matrices_[w.const_data_ptr()];
  if (m.N != N || m.K != K) {
    m.N = N, m.K = K;
    const auto patches = strips * kernels::packed_patches(K) * static_cast<std::int64_t>(sizeof(kernels::PackedPatch));
    m.memory = runtime::empty_large({m.bytes() + patches}, at::TensorOptions().dtype(at::kByte));
  }
  m.gated = gated;
  std::atomic<bool> fits{true};
  runtime::parallel_items(strips, true, [&](std::int64_t s) {
    const std::int64_t first = gated ? s / 2 * kStrip + s % 2 * (N / 2) : s * kStrip;
    if (!kernels::packed_weights_pack(ptr<bfloat16>(w) + first * K, K, m.view(), s)) fits = false;
  });
  m.is_packed = fits;
}

void PackedWeights::clear() {
  for (auto& [place, matrix] : matrices_) matrix.is_packed = false;
}

std::int64_t PackedWeights::bytes() const {
  std::int64_t sum = 0;
  for (const auto& [place, matrix] : matrices_) sum += static_cast<std::int64_t>(matrix.memory.nbytes());
  return sum;
}

const PackedWeights::Matrix* PackedWeights::find(const at::Tensor& w) const {
  const auto found = matrices_.find(w.const_data_ptr());
  if (found == matrices_.end()) return nullptr;
  const Matrix& m = found->second;
  return m.is_packed && w.is_contiguous() && w.size(0) == m.N && w.size(1) == m.K ? &m : nullptr;
}

const PackedWeights::Matrix* PackedWeights::for_rows(const at::Tensor& w, std::int64_t rows, bool gated) const {
  if (rows > most_rows()) return nullptr;
  const Matrix* const found = find(w);
  return found != nullptr && found->gated == gated ? found : nullptr;
}

void packed_weights_forward(const at::Tensor& x, const PackedWeights::Matrix& w, const std::optional<at::Tensor>& bias,
                            const at::Tensor& y, bool accumulate) {
  const auto input = packed_rows(x);
  const auto run = [&](auto* kernel, auto* out) {
    const kernels::LinearForwardArgs<bfloat16, std::remove_pointer_t<decltype(out)>> args{
        input, nullptr, 0, bias_of(bias), out, y.stride(0), w.N, accumulate};
    over_tiles(input, w.N, kStrip, [&](std::int64_t begin, std::int64_t end) { kernel(args, w.view(), begin, end); });
  };
  if (y.scalar_type() == at::kFloat) return run(kernels::packed_weights_forward_bf16_f32, mutable_ptr<float>(y));
  run(kernels::packed_weights_forward_bf16, mutable_ptr<bfloat16>(y));
}

void packed_weights_swiglu(const at::Tensor& x, const PackedWeights::Matrix& w, const std::optional<at::Tensor>& bias,
                           const at::Tensor& gate_up, const at::Tensor& act, kernels::Gate activation) {
  const auto input = packed_rows(x);
  const kernels::LinearSwigluArgs<bfloat16> args{input,
                                                 nullptr,
                                                 0,
                                                 bias_of(bias),
                                                 gate_up.defined() ? mutable_ptr<bfloat16>(gate_up) : nullptr,
                                                 mutable_ptr<bfloat16>(act),
                                                 w.N / 2,
                                                 activation};
  over_tiles(input, w.N, 2 * kStrip, [&](std::int64_t begin, std::int64_t end) {
    kernels::packed_weights_swiglu_bf16(args, w.view(), begin, end);
  });
}

}  // namespace nemo_rl::ops
