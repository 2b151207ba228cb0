// What a refit carries: every tensor by name, shape and type, the version of the weights, and how they lie in buckets.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace nemo_rl::refit {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// The weights that came are not those that were expected; the old ones stay in place.
struct RefitRefused : std::runtime_error {
  using std::runtime_error::runtime_error;
};
/// Another rank has refused them, and has the reason; the old ones stay in place here too.
struct PeerRefused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct TensorSpec {
  std::string name;
  std::vector<std::int64_t> shape;
  at::ScalarType dtype = at::kFloat;

  std::int64_t bytes() const;
  /// "[4, 8] Float"
  std::string text() const;
  bool operator==(const TensorSpec&) const = default;
};

/// The specifications of tensors, which must be contiguous and on the CPU.
std::vector<TensorSpec> specs_of(const NamedTensors& tensors);

struct Manifest {
  std::uint64_t version = 0;
  std::optional<std::uint64_t> base = std::nullopt;  ///< the buckets hold what has changed since this version
  std::int64_t bucket_bytes = 0;
  std::vector<TensorSpec> tensors;

  /// As bytes, uint8 [n].
  at::Tensor packed() const;
  /// Of bytes. RefitRefused where they are no manifest.
  static Manifest unpacked(const at::Tensor& bytes);
};

/// What the receiver of a manifest expects.
struct Expected {
  std::vector<TensorSpec> tensors;
  std::uint64_t version = 0;
  std::optional<std::uint64_t> in_use = std::nullopt;  ///< the version of the weights so far, if it came by a refit
};

/// What of `theirs` is not as expected, in a sentence that names tensors; "" where all is. The order of tensors may
/// differ.
std::string difference(const Manifest& theirs, const Expected& expected);

/// A part of one tensor in one bucket. All in bytes.
struct Piece {
  std::size_t tensor = 0;  ///< its place in the manifest
  std::int64_t begin = 0;  ///< in the tensor
  std::int64_t place = 0;  ///< in the bucket
  std::int64_t size = 0;
};

/// One message: its pieces, then a digest (8 bytes) of each.
struct Bucket {
  std::vector<Piece> pieces;
  std::int64_t bytes = 0;  ///< of the pieces

  std::int64_t message_bytes() const { return bytes + 8 * static_cast<std::int64_t>(pieces.size()); }
};

/// Tensors in their order, cut where a bucket is full: every rank makes the same plan of a manifest.
std::vector<Bucket> buckets_of(const Manifest& manifest);

}  // namespace nemo_rl::refit
