// GAE as a scan. A token is an affine map of the state (value, advantage) of the next valid token; maps compose, so any
// grouping of a row gives its advantages. The CUDA kernel groups by threads, warps and tiles.
#pragma once
#include "common/host_device.h"

namespace nemo_rl::kernels {

/// The state to the right of a token: V of the next valid token, and the advantages of both passes there.
struct GaeState {
  double value, advantage, value_advantage;
};

/// The map from the state at the right of a run of tokens to the state at its left:
///   value' = has_value ? value : value_in
///   advantage' = decay * advantage_in + from_value * value_in + offset       (and with _v for the returns' pass)
struct GaeRun {
  double value, from_value, offset, decay, from_value_v, offset_v, decay_v;
  int has_value;
};

/// A masked token.
NRL_INLINE GaeRun gae_identity() { return {0, 0, 0, 1, 0, 0, 1, 0}; }

/// A valid token with reward r and value V; decay = gamma * lambda of either pass.
NRL_INLINE GaeRun gae_token(double reward, double value, double gamma, double decay, double decay_value) {
  return {value, gamma, reward - value, decay, gamma, reward - value, decay_value, 1};
}

/// `right` acts on the state first, then `left`.
NRL_INLINE GaeRun gae_compose(const GaeRun& left, const GaeRun& right) {
  GaeRun out;
  out.has_value = left.has_value | right.has_value;
  out.value = left.has_value ? left.value : right.value;
  const double inner = right.has_value ? right.value : 0.0, outer = right.has_value ? 0.0 : 1.0;
  out.decay = left.decay * right.decay;
  out.from_value = left.decay * right.from_value + left.from_value * outer;
  out.offset = left.decay * right.offset + left.from_value * inner + left.offset;
  out.decay_v = left.decay_v * right.decay_v;
  out.from_value_v = left.decay_v * right.from_value_v + left.from_value_v * outer;
  out.offset_v = left.decay_v * right.offset_v + left.from_value_v * inner + left.offset_v;
  return out;
}

NRL_INLINE GaeState gae_apply(const GaeRun& run, const GaeState& s) {
  return {run.has_value ? run.value : s.value, run.decay * s.advantage + run.from_value * s.value + run.offset,
          run.decay_v * s.value_advantage + run.from_value_v * s.value + run.offset_v};
}

}  // namespace nemo_rl::kernels
