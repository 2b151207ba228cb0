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

  /// Up to how many rows products are faster with packed weights; 0: not on this machine, whose processor lacks
  /// AVX-512.
  static std::int64_t most_rows() { return kernels::packed_weights_rows(); }

  /// Packs w [N, K] on LibTorch's threads. Left as they are: weights that are not bfloat16 on the CPU, whose N (of
  /// `gated` N/2) is no multiple of 32 or K of 8, or whose exponents lie too far apart.
  void pack(const at::Tensor& w, bool gated);
  /// The weights have changed. The memory stays, for the next time.
  void clear();
  bool holds(const at::Tensor& w) const { return find(w) != nullptr; }
  /// Memory that the copy takes.
  std::int64_t bytes() const;

  /// While this lives, products on this thread read `weights`, if any, wherever they hold the matrix.
  class Use {
   public:
    explicit Use(const PackedWeights* weights) : before_(current_) { current_ = weights; }
    ~Use() { current_ = before_; }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    const PackedWeights* before_;
  };
  /// Of w as the gated product reads it, or the other one, for so many rows; nullptr: the product reads w itself.
  static const Matrix* in_use(const at::Tensor& w, std::int64_t rows, bool gated);

 private:
  const Matrix* find(const at::Tensor& w) const;

  std::map<const void*, Matrix> matrices_;  ///< by where their weights lie
  static thread_local const PackedWeights* current_;
};

/// linear_forward and linear_swiglu (ops/linear.h) with packed weights: the same bits. Shapes and dtypes have been
/// checked.
void packed_weights_forward(const at::Tensor& x, const PackedWeights::Matrix& w, const std::optional<at::Tensor>& bias,
                            const at::Tensor& y, bool accumulate);
void packed_weights_swiglu(const at::Tensor& x, const PackedWeights::Matrix& w, const std::optional<at::Tensor>& bias,
                           const at::Tensor& gate_up, const at::Tensor& act);

}  // namespace nemo_rl::ops
