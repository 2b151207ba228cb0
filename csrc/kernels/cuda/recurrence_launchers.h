// Host functions that launch the CUDA kernels of recurrent layers (ops/gated_delta.h). All pointers are device
// pointers. They return what cudaGetLastError says after the launch. A state is [dk, dv].
#pragma once
#include <cuda_runtime_api.h>

#include "kernels/gated_delta.h"
#include "kernels/gated_norm.h"

namespace nemo_rl::kernels {

// ---- short convolution (short_conv.cu)
/// Where the input of a token before another one lies: a row of x, `kNoInput`, or -2 - i for row i of the states
/// [slots · (W - 1), C].
inline constexpr std::int64_t kNoInput = -1;

template <class T>
struct CudaConv {
  const T* x;  ///< [T, C]
  std::int64_t stride_x;
  const std::int64_t* before;  ///< [T, W - 1]: the inputs before each row, the earliest first
  const T *w, *bias;           ///< [C, W]; [C] or null
  T* state;                    ///< null: no sequence has a slot
  std::int64_t rows, C, W;
  bool silu;
};
/// y [T, C]; then the last inputs of the `count` sequences go to their slots.
template <class T>
cudaError_t short_conv_forward_launch(const CudaConv<T>& conv, T* y, std::int64_t stride_y,
                                      const RecurrentSequence* sequences, std::int64_t count, cudaStream_t stream);

template <class T>
struct CudaConvGradients {
  const T* dy;
  std::int64_t stride_dy;
  T* dx;
  std::int64_t stride_dx;
  float *dw, *d_bias;  ///< [C, W], [C], added to; null: not wanted
  /// Row r is an input of the tokens readers[i] / W as tap readers[i] % W, for first[r] <= i < first[r + 1].
  const std::int64_t *first, *readers;
  float* du;     ///< workspace [T, C]
  float* parts;  ///< workspace [ceil(T / kRowsPerPart), C · W]
};
template <class T>
cudaError_t short_conv_backward_launch(const CudaConv<T>& conv, const CudaConvGradients<T>& d, cudaStream_t stream);

// ---- recurrence (recurrence.cu)
/// A sequence without a parent and those that continue it: children[first_child, last_child).
struct CudaFamily {
  std::int64_t root = 0, first_child = 0, last_child = 0;
};
struct CudaFamilies {
  const RecurrentSequence* sequences;
  const CudaFamily* families;
  const std::int64_t* children;
  std::int64_t count;
};
/// out [T, U·dv]; slots [slots, U, dk·dv] or null.
template <class T>
cudaError_t recurrence_forward_launch(const RecurrenceArgs<T>& args, const CudaFamilies& all, float* slots, T* out,
                                      std::int64_t stride_out, cudaStream_t stream);

inline constexpr std::int64_t kStateColumns = 32;  ///< of a state that a warp has
/// Workspaces of the backward. `states`: recurrence_state_floats for each of `blocks` thread blocks.
struct RecurrenceWorkspace {
  float* states;
  std::int64_t longest, blocks;  ///< tokens of the longest sequence
  float *d_query, *d_key;        ///< [T, U, dk]
  float* d_gates;                ///< [T, U, 3]: of beta, the decay and D
};
inline std::int64_t recurrence_state_floats(const RecurrentShape& s, std::int64_t longest) {
  return ((longest + kDeltaChunk - 1) / kDeltaChunk + kDeltaChunk + 2) * s.key_dim * kStateColumns;
}
template <class T>
cudaError_t recurrence_backward_launch(const RecurrenceArgs<T>& args, const RecurrenceGradients<T>& g,
                                       const CudaFamilies& all, const RecurrenceWorkspace& w, std::int64_t tokens,
                                       cudaStream_t stream);

// ---- norm and gate (gated_norm.cu)
template <class T>
cudaError_t gated_norm_forward_launch(const GatedNormArgs<T>& args, T* y, std::int64_t stride_y, std::int64_t rows,
                                      cudaStream_t stream);
/// shares [rows, heads·D]: what each number adds to the gradient of its weight.
template <class T>
cudaError_t gated_norm_backward_launch(const GatedNormArgs<T>& args, const GatedNormGradients<T>& g, float* shares,
                                       std::int64_t rows, cudaStream_t stream);
template <class T>
cudaError_t head_gate_forward_launch(const HeadGateArgs<T>& args, T* y, std::int64_t rows, cudaStream_t stream);
template <class T>
cudaError_t head_gate_backward_launch(const HeadGateArgs<T>& args, const T* dy, T* dx, T* dg, std::int64_t rows,
                                      cudaStream_t stream);

}  // namespace nemo_rl::kernels
