// Who continues whom among the packed sequences of a recurrent layer, and the layer's sizes.
#pragma once
#include <cstdint>
#include <limits>

#include "common/host_device.h"

namespace nemo_rl::kernels {

/// Rows [start, start + length) of a packed batch. Their first token continues the last token of sequence `parent`
/// (training: a prompt that several responses share), or the state in `slot` (generation), or begins a text.
struct RecurrentSequence {
  std::int64_t start = 0;
  std::int64_t length = 0;
  std::int64_t parent = kNone;  ///< an earlier sequence that has no parent itself
  std::int64_t slot = kNone;    ///< where the state is stored after the last token
  bool continues = false;       ///< whether the slot's state is read before the first token
  static constexpr std::int64_t kNone = -1;
};

/// How a layer updates its states: a gated delta net (Yang et al., 2024) or Mamba-2 (Dao and Gu, 2024). None: only the
/// last inputs of its short convolution are kept (LFM2).
enum class Recurrence { gated_delta, mamba2, none };

/// Sizes of a recurrent layer with P key heads and U value heads. A row of its input projection is
///   [q P·dk | k P·dk | v U·dv | z U·dv | b U | a U] in a gated delta net,
///   [z U·dv | v U·dv | k P·dk | q P·dk | a U] in Mamba-2, where v, k, q and a are called x, B, C and dt.
/// The short convolution runs over q, k and v. In LFM2 P and dk are 0, U is 1, and the convolution runs over dv
/// channels.
struct RecurrentShape {
  std::int64_t key_heads = 0;    ///< P, divides U; the groups of Mamba-2
  std::int64_t value_heads = 0;  ///< U
  std::int64_t key_dim = 0;      ///< dk, a multiple of 16 up to 256
  std::int64_t value_dim = 0;    ///< dv, a multiple of 16
  std::int64_t conv_width = 0;   ///< inputs of the convolution: a token's own and those before it, at most 8
  Recurrence rule = Recurrence::gated_delta;
  double least_step = 0, greatest_step = std::numeric_limits<double>::infinity();  ///< limits of Mamba-2's time step
  NRL_HOST_DEVICE bool is_mamba2() const { return rule == Recurrence::mamba2; }
  std::int64_t key_size() const { return key_heads * key_dim; }
  std::int64_t value_size() const { return value_heads * value_dim; }
  std::int64_t conv_size() const { return 2 * key_size() + value_size(); }
  std::int64_t projection_size() const { return conv_size() + value_size() + (is_mamba2() ? 1 : 2) * value_heads; }
  NRL_HOST_DEVICE std::int64_t group() const { return value_heads / key_heads; }
  /// Elements of a head's state.
  std::int64_t state_size() const { return key_dim * value_dim; }
};
inline constexpr std::int64_t kMostKeyDim = 256, kMostConvWidth = 8;
/// Columns of a state that lie together: a state [dk, dv] is stored as [dv / kStrip, dk, kStrip].
inline constexpr std::int64_t kStrip = 16;

}  // namespace nemo_rl::kernels
