// Host functions that launch the CUDA kernels of losses and advantage estimators. All pointers are device pointers; the
// arguments are those of the CPU kernels. They return what cudaGetLastError says after the launch.
#pragma once
#include <cuda_runtime_api.h>

#include "kernels/clipped_pg_loss.h"
#include "kernels/gae.h"
#include "kernels/masked_reduce.h"
#include "kernels/reinforce_plus_plus.h"
#include "kernels/value_loss.h"

namespace nemo_rl::kernels {

/// rows: workspace [B, kPGRowSize]; metrics: [kNumPGMetrics].
template <class T>
cudaError_t clipped_pg_loss_launch(const ClippedPGArgs<T>& args, const ClippedPGConfig& config, double* rows,
                                   double* metrics, cudaStream_t stream);
/// rows: workspace [B, kValueRowSize]; metrics: [kNumValueMetrics].
template <class T>
cudaError_t value_loss_launch(const ValueLossArgs<T>& args, const ValueLossConfig& config, double* rows,
                              double* metrics, cudaStream_t stream);
template <class T>
cudaError_t gae_launch(const GaeArgs<T>& args, const GaeConfig& config, cudaStream_t stream);
template <class T>
cudaError_t token_advantages_launch(const TokenAdvantageArgs<T>& args, cudaStream_t stream);
/// rows: workspace [B]; scale: workspace [1].
template <class T>
cudaError_t whiten_launch(const MaskedArgs<T>& args, WhitenRule rule, bool zero_masked, Moments* rows,
                          WhitenScale* scale, cudaStream_t stream);

}  // namespace nemo_rl::kernels
