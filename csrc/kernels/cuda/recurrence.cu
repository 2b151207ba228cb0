// The recurrences of kernels/gated_delta.h on CUDA. A warp holds kStateColumns columns of a head's state in shared
// memory, a lane each, and goes over the tokens in order: a token's result follows from the state before it alone, so
// prefill, decode, scoring and training give the same bits.
//
// The backward goes back token by token. It keeps the state before every kDeltaChunk tokens, and computes those of a
// chunk again. With D the gradient of the state S' = decay · S + k delta^T after a token, and o = S'^T q:
//   D += q do^T,  dq = S' do,  dk = D delta,  d_delta = D^T k,  d_decay = sum(D · S),  dS = decay · D
// and of delta = beta · x, x = v - decay · S^T k in a gated delta net:
//   dx = beta · d_delta,  d_beta = d_delta · x,  d_decay -= dx · S^T k,  dk -= decay · S dx,  dS -= decay · k dx^T
#include "kernels/cuda/group_reduce.cuh"
#include "kernels/cuda/model_launchers.h"
#include "kernels/cuda/recurrence_launchers.h"
#include "kernels/cuda/vector_access.cuh"

namespace nemo_rl::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = static_cast<int>(kStateColumns);
constexpr int kStride = kColumns + 1;  // a state is read by rows and by columns
static_assert(kColumns == kWarp, "a lane a column");

__host__ __device__ __forceinline__ std::int64_t strips_of(std::int64_t dv) { return (dv + kColumns - 1) / kColumns; }

/// A query or key is read as y = x · scale / sqrt(sum x^2 + kL2Epsilon): the factor, in every lane.
template <class T>
__device__ __forceinline__ float l2_inverse(const T* x, std::int64_t dk) {
  float sum = 0;
  for (std::int64_t i = threadIdx.x % kWarp; i < dk; i += kWarp) sum = fmaf(widen(x[i]), widen(x[i]), sum);
  sum = warp_all(sum, AddOp());
  return __fdiv_rn(1.0f, sqrtf(__fadd_rn(sum, static_cast<float>(kL2Epsilon))));
}

template <class T>
__device__ __forceinline__ float query_scale(const RecurrenceArgs<T>& p) {
  return static_cast<float>(1 / sqrt(static_cast<double>(p.shape.key_dim)));
}

template <bool Mamba2, class T>
__device__ __forceinline__ DeltaGates<float> gates_at(const RecurrenceArgs<T>& p, std::int64_t row, std::int64_t head) {
  const double a = widen(p.a[row * p.stride_ab + head]), A_log = widen(p.A_log[head]), dt_bias = widen(p.dt_bias[head]);
  if constexpr (Mamba2) return step_gates<float>(a, A_log, dt_bias, p.shape.least_step, p.shape.greatest_step);
  else return delta_gates<float>(a, widen(p.b[row * p.stride_ab + head]), A_log, dt_bias);
}

/// A warp's columns of a head's state, and the token that it reads. The block is one warp.
template <bool Mamba2, class T>
struct HeadStrip {
  const RecurrenceArgs<T>& p;
  std::int64_t head, column, dk;
  bool active;  ///< the lane has a column
  int lane;
  float *state, *key, *query;  ///< in shared memory: [dk][kStride], [dk], [dk]

  __device__ HeadStrip(const RecurrenceArgs<T>& args, std::int64_t head, std::int64_t strip, float* shared)
      : p(args),
        head(head),
        column(strip * kColumns + threadIdx.x),
        dk(args.shape.key_dim),
        active(column < args.shape.value_dim),
        lane(static_cast<int>(threadIdx.x)),
        state(shared),
        key(shared + dk * kStride),
        query(key + dk) {}

  /// f(k, this lane's number in row k of the state).
  template <class F>
  __device__ __forceinline__ void for_rows(const F& f) const {
    for (std::int64_t k = 0; k < dk; ++k) f(k, state[k * kStride + lane]);
  }
  __device__ __forceinline__ void read_key(const T* x, float scale, float* y) const {
    float factor = 1;
    if constexpr (!Mamba2) factor = l2_inverse(x, dk);
    for (std::int64_t i = lane; i < dk; i += kWarp)
      y[i] = Mamba2 ? widen(x[i]) : __fmul_rn(__fmul_rn(widen(x[i]), factor), scale);
  }
  /// Brings queries, keys and gates of a row; all lanes are done with those before.
  __device__ __forceinline__ DeltaGates<float> enter(std::int64_t row) const {
    __syncthreads();
    const std::int64_t place = row * p.stride_qkv + head / p.shape.group() * dk;
    read_key(p.q + place, query_scale(p), query);
    read_key(p.k + place, 1.0f, key);
    __syncthreads();
    return gates_at<Mamba2>(p, row, head);
  }
  __device__ __forceinline__ float value(std::int64_t row) const {
    return active ? widen(p.v[row * p.stride_qkv + head * p.shape.value_dim + column]) : 0.0f;
  }
  /// This column of S^T k: the even rows, the odd rows, and their sum.
  __device__ __forceinline__ float read_by_key() const {
    float even = 0, odd = 0;
    for (std::int64_t k = 0; k < dk; k += 2) {
      even = fmaf(state[k * kStride + lane], key[k], even);
      odd = fmaf(state[(k + 1) * kStride + lane], key[k + 1], odd);
    }
    return __fadd_rn(even, odd);
  }
  /// The row's delta before beta: v - decay · S^T k, or v in Mamba-2.
  __device__ __forceinline__ float change(std::int64_t row, float decay) const {
    if constexpr (Mamba2) return value(row);
    else return __fsub_rn(value(row), __fmul_rn(read_by_key(), decay));
  }
  /// Updates the state by a row. Returns what the query reads.
  __device__ __forceinline__ float advance(std::int64_t row) const {
    const DeltaGates<float> gates = enter(row);
    const float delta = __fmul_rn(change(row, gates.decay), gates.beta);
    float out = 0;
    for_rows([&](std::int64_t k, float& s) {
      s = fmaf(key[k], delta, __fmul_rn(s, gates.decay));
      out = fmaf(s, query[k], out);
    });
    if constexpr (Mamba2) out = fmaf(value(row), widen(p.D[head]), out);
    return out;
  }
};

template <bool Mamba2, class T>
__global__ void __launch_bounds__(kWarp)
    forward_kernel(RecurrenceArgs<T> p, CudaFamilies all, float* slots, T* out, std::int64_t stride_out) {
  extern __shared__ __align__(16) float shared[];
  const std::int64_t U = p.shape.value_heads, dk = p.shape.key_dim, dv = p.shape.value_dim, strips = strips_of(dv);
  const std::int64_t head = blockIdx.x / strips % U;
  const CudaFamily family = all.families[blockIdx.x / strips / U];
  const RecurrentSequence root = all.sequences[family.root];
  const HeadStrip<Mamba2, T> strip(p, head, blockIdx.x % strips, shared);
  float* const after_root = strip.query + dk;  // [dk][kStride], where a family has children
  const auto run = [&](const RecurrentSequence& s) {
    for (std::int64_t row = s.start; row < s.start + s.length; ++row) {
      const float o = strip.advance(row);
      if (strip.active) out[row * stride_out + head * dv + strip.column] = static_cast<T>(o);
    }
  };
  float* const slot =
      root.slot == RecurrentSequence::kNone ? nullptr : slots + (root.slot * U + head) * dk * dv + strip.column;
  strip.for_rows([&](std::int64_t k, float& s) { s = root.continues && strip.active ? slot[k * dv] : 0.0f; });
  run(root);
  if (slot != nullptr && strip.active) strip.for_rows([&](std::int64_t k, float& s) { slot[k * dv] = s; });
  if (family.first_child == family.last_child) return;
  strip.for_rows([&](std::int64_t k, float& s) { after_root[k * kStride + strip.lane] = s; });
  for (std::int64_t i = family.first_child; i < family.last_child; ++i) {
    strip.for_rows([&](std::int64_t k, float& s) { s = after_root[k * kStride + strip.lane]; });
    run(all.sequences[all.children[i]]);
  }
}

/// The backward of one strip of one head over the sequences of a family.
template <bool Mamba2, class T>
struct StripBackward {
  const HeadStrip<Mamba2, T>& strip;
  const RecurrenceGradients<T>& g;
  const RecurrenceWorkspace& w;
  bool first;                                       ///< of the head's strips: the gradients that all add up begin
  float *d_state, *row_out, *row_delta, *row_back;  ///< in shared memory: [dk][kStride], then kColumns each
  float *kept, *in_chunk, *after_root, *total;      ///< in device memory: states of this strip

  __device__ StripBackward(const HeadStrip<Mamba2, T>& strip, const RecurrenceGradients<T>& g,
                           const RecurrenceWorkspace& w, bool first)
      : strip(strip), g(g), w(w), first(first) {
    d_state = strip.query + strip.dk;
    row_out = d_state + strip.dk * kStride, row_delta = row_out + kColumns, row_back = row_delta + kColumns;
    const std::int64_t size = strip.dk * kColumns;
    after_root = w.states + blockIdx.x * recurrence_floats();
    total = after_root + size, in_chunk = total + size, kept = in_chunk + kDeltaChunk * size;
  }
  __device__ std::int64_t recurrence_floats() const {
    return ((w.longest + kDeltaChunk - 1) / kDeltaChunk + kDeltaChunk + 2) * strip.dk * kColumns;
  }
  /// The lane's column goes from one place to another.
  __device__ __forceinline__ void move(const float* from, std::int64_t from_stride, float* to,
                                       std::int64_t to_stride) const {
    for (std::int64_t k = 0; k < strip.dk; ++k) to[k * to_stride + strip.lane] = from[k * from_stride + strip.lane];
  }
  __device__ __forceinline__ void keep(float* to) const { move(strip.state, kStride, to, kColumns); }
  __device__ __forceinline__ void bring(const float* from) const { move(from, kColumns, strip.state, kStride); }
  __device__ __forceinline__ void clear(float* x, std::int64_t stride) const {
    for (std::int64_t k = 0; k < strip.dk; ++k) x[k * stride + strip.lane] = 0;
  }
  __device__ __forceinline__ void add(float& to, float x) const { to = first ? x : to + x; }

  /// The family of a root.
  __device__ void run(const CudaFamilies& all, const CudaFamily& family) const {
    const RecurrentSequence root = all.sequences[family.root];
    clear(total, kColumns);
    if (family.first_child < family.last_child) {
      clear(strip.state, kStride);
      for (std::int64_t row = root.start; row < root.start + root.length; ++row) strip.advance(row);
      keep(after_root);
    }
    for (std::int64_t i = family.first_child; i < family.last_child; ++i) {
      bring(after_root);
      clear(d_state, kStride);
      run(all.sequences[all.children[i]]);
      for (std::int64_t k = 0; k < strip.dk; ++k) total[k * kColumns + strip.lane] += d_state[k * kStride + strip.lane];
    }
    clear(strip.state, kStride);
    move(total, kColumns, d_state, kStride);
    run(root);
  }

  /// A sequence, from the state before it; d_state becomes that of this state.
  __device__ void run(const RecurrentSequence& s) const {
    const std::int64_t chunks = (s.length + kDeltaChunk - 1) / kDeltaChunk, size = strip.dk * kColumns;
    for (std::int64_t t = 0; t < s.length; ++t) {
      if (t % kDeltaChunk == 0) keep(kept + t / kDeltaChunk * size);
      if (t < (chunks - 1) * kDeltaChunk) strip.advance(s.start + t);
    }
    for (std::int64_t chunk = chunks; chunk-- > 0;) {
      const std::int64_t begin = chunk * kDeltaChunk, left = s.length - begin,
                         count = left < kDeltaChunk ? left : kDeltaChunk;
      bring(kept + chunk * size);
      for (std::int64_t t = 0; t < count; ++t) {
        keep(in_chunk + t * size);
        if (t + 1 < count) strip.advance(s.start + begin + t);
      }
      for (std::int64_t t = count; t-- > 0;) {
        bring(in_chunk + t * size);
        go_back(s.start + begin + t);
      }
    }
  }

  __device__ void go_back(std::int64_t row) const {
    const auto& p = strip.p;
    const std::int64_t dk = strip.dk, dv = p.shape.value_dim, U = p.shape.value_heads;
    const DeltaGates<float> gates = strip.enter(row);
    const float value = strip.value(row),
                d_out = strip.active ? widen(g.d_out[row * g.stride_out + strip.head * dv + strip.column]) : 0.0f;
    float d_delta = 0, d_decay = 0;
    strip.for_rows([&](std::int64_t k, float& s) {
      float& d = d_state[k * kStride + strip.lane];
      d = fmaf(strip.query[k], d_out, d);
      d_delta = fmaf(d, strip.key[k], d_delta);
      d_decay = fmaf(d, s, d_decay);
    });
    const float read = Mamba2 ? 0.0f : strip.read_by_key(), x = value - gates.decay * read, d_x = gates.beta * d_delta,
                back = Mamba2 ? 0.0f : -gates.decay * d_x;
    d_decay -= d_x * read;
    row_out[strip.lane] = d_out, row_delta[strip.lane] = gates.beta * x, row_back[strip.lane] = back;
    __syncthreads();
    add_key_gradients(row, gates.decay);
    __syncthreads();
    for (std::int64_t k = 0; k < dk; ++k) {
      float& d = d_state[k * kStride + strip.lane];
      d = fmaf(strip.key[k], back, gates.decay * d);
    }
    const float d_value = Mamba2 ? fmaf(d_out, widen(p.D[Mamba2 ? strip.head : 0]), d_x) : d_x;
    if (strip.active) g.d_v[row * g.stride_qkv + strip.head * dv + strip.column] = static_cast<T>(d_value);
    const float sums[3] = {warp_all(d_delta * x, AddOp()), warp_all(d_decay, AddOp()),
                           warp_all(d_out * value, AddOp())};
    if (strip.lane == 0)
      for (int i = 0; i < 3; ++i) add(w.d_gates[(row * U + strip.head) * 3 + i], sums[i]);
  }

  /// A lane takes rows of the state, and sums over its columns.
  __device__ __forceinline__ void add_key_gradients(std::int64_t row, float decay) const {
    for (std::int64_t k = strip.lane; k < strip.dk; k += kWarp) {
      float d_query = 0, d_key = 0;
      for (int v = 0; v < kColumns; ++v) {
        const float s = strip.state[k * kStride + v], after = fmaf(strip.key[k], row_delta[v], decay * s);
        d_query = fmaf(after, row_out[v], d_query);
        d_key = fmaf(d_state[k * kStride + v], row_delta[v], d_key);
        d_key = fmaf(s, row_back[v], d_key);
      }
      const std::int64_t place = (row * strip.p.shape.value_heads + strip.head) * strip.dk + k;
      add(w.d_query[place], d_query);
      add(w.d_key[place], d_key);
    }
  }
};

template <bool Mamba2, class T>
__global__ void __launch_bounds__(kWarp)
    backward_kernel(RecurrenceArgs<T> p, RecurrenceGradients<T> g, CudaFamilies all, RecurrenceWorkspace w) {
  extern __shared__ __align__(16) float shared[];
  const std::int64_t U = p.shape.value_heads, strips = strips_of(p.shape.value_dim);
  for (std::int64_t item = blockIdx.x; item < all.count * U; item += gridDim.x)
    for (std::int64_t s = 0; s < strips; ++s) {
      __syncthreads();
      const HeadStrip<Mamba2, T> strip(p, item % U, s, shared);
      StripBackward<Mamba2, T>(strip, g, w, s == 0).run(all, all.families[item / U]);
    }
}

/// d_x of y = x · scale / sqrt(sum x^2 + kL2Epsilon), or of y = x; d_y: the sum over the heads of a group, a warp.
template <bool Mamba2, class T>
__device__ __forceinline__ void store_key(const RecurrenceArgs<T>& p, const float* d_heads, float scale, const T* x,
                                          T* d_x) {
  const std::int64_t dk = p.shape.key_dim;
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const auto d_y = [&](std::int64_t i) {
    float sum = d_heads[i];
    for (std::int64_t head = 1; head < p.shape.group(); ++head) sum += d_heads[head * dk + i];
    return sum;
  };
  float inverse = 1, along = 0;
  if constexpr (!Mamba2) {
    inverse = l2_inverse(x, dk);
    for (std::int64_t i = lane; i < dk; i += kWarp) along = fmaf(widen(x[i]), d_y(i), along);
    along = warp_all(along, AddOp()) * inverse * inverse;
  }
  for (std::int64_t i = lane; i < dk; i += kWarp)
    d_x[i] = static_cast<T>(Mamba2 ? d_y(i) : (d_y(i) - widen(x[i]) * along) * (inverse * scale));
}

template <bool Mamba2, class T>
__global__ void __launch_bounds__(kThreads)
    keys_kernel(RecurrenceArgs<T> p, RecurrenceGradients<T> g, RecurrenceWorkspace w, std::int64_t tokens) {
  const std::int64_t item = blockIdx.x * std::int64_t{kThreads / kWarp} + threadIdx.x / kWarp, P = p.shape.key_heads;
  if (item >= tokens * P) return;
  const std::int64_t row = item / P, head = item % P, dk = p.shape.key_dim,
                     from = (row * p.shape.value_heads + head * p.shape.group()) * dk;
  const std::int64_t place = row * p.stride_qkv + head * dk, to = row * g.stride_qkv + head * dk;
  store_key<Mamba2>(p, w.d_query + from, query_scale(p), p.q + place, g.d_q + to);
  store_key<Mamba2>(p, w.d_key + from, 1.0f, p.k + place, g.d_k + to);
}

template <bool Mamba2, class T>
__global__ void __launch_bounds__(kThreads)
    gates_kernel(RecurrenceArgs<T> p, RecurrenceGradients<T> g, RecurrenceWorkspace w, std::int64_t tokens) {
  const std::int64_t U = p.shape.value_heads;
  for (std::int64_t item = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; item < tokens * U;
       item += std::int64_t{kThreads} * gridDim.x) {
    const std::int64_t row = item / U, head = item % U;
    const DeltaGates<float> gates = gates_at<Mamba2>(p, row, head);
    const float d_beta = w.d_gates[item * 3], d_log_decay = w.d_gates[item * 3 + 1] * gates.decay;
    float d_a = -d_log_decay * gates.rate * gates.slope;
    if constexpr (Mamba2) {
      d_a += d_beta * gates.slope;
      g.d_D[item] = w.d_gates[item * 3 + 2];
    } else {
      g.d_b[row * g.stride_ab + head] = static_cast<T>(d_beta * gates.beta * (1.0f - gates.beta));
    }
    g.d_a[row * g.stride_ab + head] = static_cast<T>(d_a);
    g.d_dt_bias[item] = d_a;
    g.d_A_log[item] = d_log_decay * gates.log_decay;
  }
}

template <class Kernel>
cudaError_t allow_shared(const Kernel& kernel, std::int64_t bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

template <bool Mamba2, class T>
cudaError_t backward(const RecurrenceArgs<T>& p, const RecurrenceGradients<T>& g, const CudaFamilies& all,
                     const RecurrenceWorkspace& w, std::int64_t tokens, cudaStream_t stream) {
  const std::int64_t dk = p.shape.key_dim, bytes = (2 * dk * (kStride + 1) + 3 * kColumns) * sizeof(float);
  const auto kernel = backward_kernel<Mamba2, T>;
  if (const auto status = allow_shared(kernel, bytes); status != cudaSuccess) return status;
  kernel<<<static_cast<unsigned>(w.blocks), kWarp, bytes, stream>>>(p, g, all, w);
  const std::int64_t heads = tokens * p.shape.key_heads, warps = kThreads / kWarp;
  keys_kernel<Mamba2, T><<<static_cast<unsigned>((heads + warps - 1) / warps), kThreads, 0, stream>>>(p, g, w, tokens);
  gates_kernel<Mamba2, T><<<grid_for(tokens * p.shape.value_heads, kThreads), kThreads, 0, stream>>>(p, g, w, tokens);
  return cudaGetLastError();
}

}  // namespace

template <class T>
cudaError_t recurrence_forward_launch(const RecurrenceArgs<T>& p, const CudaFamilies& all, float* slots, T* out,
                                      std::int64_t stride_out, cudaStream_t stream) {
  const std::int64_t blocks = all.count * p.shape.value_heads * strips_of(p.shape.value_dim);
  if (blocks == 0) return cudaSuccess;
  const std::int64_t bytes = 2 * p.shape.key_dim * (kStride + 1) * static_cast<std::int64_t>(sizeof(float));
  const auto kernel = p.shape.is_mamba2() ? forward_kernel<true, T> : forward_kernel<false, T>;
  if (const auto status = allow_shared(kernel, bytes); status != cudaSuccess) return status;
  kernel<<<static_cast<unsigned>(blocks), kWarp, bytes, stream>>>(p, all, slots, out, stride_out);
  return cudaGetLastError();
}

template <class T>
cudaError_t recurrence_backward_launch(const RecurrenceArgs<T>& p, const RecurrenceGradients<T>& g,
                                       const CudaFamilies& all, const RecurrenceWorkspace& w, std::int64_t tokens,
                                       cudaStream_t stream) {
  if (w.blocks == 0 || tokens == 0) return cudaSuccess;
  return p.shape.is_mamba2() ? backward<true>(p, g, all, w, tokens, stream)
                             : backward<false>(p, g, all, w, tokens, stream);
}

template cudaError_t recurrence_forward_launch(const RecurrenceArgs<float>&, const CudaFamilies&, float*, float*,
                                               std::int64_t, cudaStream_t);
template cudaError_t recurrence_forward_launch(const RecurrenceArgs<bfloat16>&, const CudaFamilies&, float*, bfloat16*,
                                               std::int64_t, cudaStream_t);
template cudaError_t recurrence_backward_launch(const RecurrenceArgs<float>&, const RecurrenceGradients<float>&,
                                                const CudaFamilies&, const RecurrenceWorkspace&, std::int64_t,
                                                cudaStream_t);
template cudaError_t recurrence_backward_launch(const RecurrenceArgs<bfloat16>&, const RecurrenceGradients<bfloat16>&,
                                                const CudaFamilies&, const RecurrenceWorkspace&, std::int64_t,
                                                cudaStream_t);

}  // namespace nemo_rl::kernels
