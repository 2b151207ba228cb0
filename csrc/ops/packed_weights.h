// A copy of a model's bfloat16 weights in twelve bits each (kernels/packed_weights.h), which products of few rows read
// in their place.
#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <optional>

#include "kernels/packed_weights.h"

namespace nemo_rl::ops {

class PackedWeights {
 public:
  struct Matrix {
    at::Tensor memory;  ///< strips, then patches
    std::int64_t N = 0, K = 0;
    bool gated = false;      ///< gates and ups in turn, strip by strip, for linear_swiglu
    bool is_packed = false;  ///< as the weights are now
    kernels::PackedMatrix view() const;
    /// Of the strips.
    std::int64_t bytes() const { return N / kernels::kPackedStrip * kernels::packed_strip_bytes(K); }
  };

  /// The most rows for which products are faster with packed weights. 0: never on this machine, because its processor
  /// lacks AVX-512.
  static std::int64_t most_rows() { return kernels::packed_weights_rows(); }

  /// Packs w [N, K] on LibTorch's threads. It does not pack weights that are not bfloat16 on the CPU, whose N (of
  /// `gated` N/2) is no multiple of 32, whose K is no multiple of 8, or whose exponents lie too far apart.
  void pack(const at::Tensor& w, bool gated);
  /// Marks the copy as outdated, because the weights have changed. The memory stays for the next copy.
  void clear();
  bool holds(const at::Tensor& w) const { return find(w) != nullptr; }
  /// Memory that the copy takes.
  std::int64_t bytes() const;

  /// The packed w for so many rows, in the order of the gated product or of the ordinary one. nullptr: the product
  /// reads w itself.
  const Matrix* for_rows(const at::Tensor& w, std::int64_t rows, bool gated) const;

 private:
  const Matrix* find(const at::Tensor& w) const;

  std::map<const void*, Matrix> matrices_;  ///< by where their weights lie
};

/// linear_forward and linear_swiglu (ops/linear.h) with packed weights: the same bits. Shapes and dtypes have been
/// checked.
void packed_weights_forward(const at::Tensor& x, const PackedWeights::Matrix& w, const std::optional<at::Tensor>& bias,
                            const at::Tensor& y, bool accumulate);
void packed_weights_swiglu(const at::Tensor& x, const PackedWeights::Matrix& w, const std::optional<at::Tensor>& bias,
                           const at::Tensor& gate_up, const at::Tensor& act, kernels::Gate activation);

}  // namespace nemo_rl::ops
