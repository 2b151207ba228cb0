// C functions by which the tests call the model's CUDA launchers. Numbers come as int64 and double, tensors as their
// addresses; what a launch complains about is kept for take_error.
#include <cuda_runtime_api.h>

#include "kernels/cuda/attention_launchers.h"
#include "kernels/cuda/model_launchers.h"
#include "kernels/cuda/sampling_launchers.h"
#include "ops/paged_plan.h"

using namespace nemo_rl;
using namespace nemo_rl::kernels;
using Int = std::int64_t;

namespace {

AttentionShape attention_shape(Int N, Int K, Int H, Int bf16, Int window = 0, double softcap = 0) {
  return {
      N,      K,      H, 1.0 / std::sqrt(static_cast<double>(H)), bf16 ? ElementType::bfloat16 : ElementType::float32,
      window, softcap};
}

AttentionRows rows_kind(Int many) { return many ? AttentionRows::many : AttentionRows::few; }

SamplingRule sampling_rule(double temperature, double top_p, Int top_k, Int greedy) {
  return {static_cast<float>(temperature), static_cast<float>(top_p), top_k, greedy != 0};
}

template <class X, class T>
Int rms_norm_forward_of(void* x, void* w, double offset, void* y, float* rstd, Int inner, Int D, Int groups) {
  const RmsNormForwardArgs<X, T> args{
      static_cast<X*>(x), inner * D, static_cast<T*>(w), static_cast<T*>(y), inner * D, rstd, inner, D, 1e-6, offset};
  return rms_norm_forward_launch(args, groups, nullptr);
}

template <class X, class G, class T>
Int rms_norm_backward_of(void* dy, void* x, void* w, double offset, float* rstd, void* dx, Int accumulate, Int inner,
                         Int D, Int groups, float* parts, float* dw) {
  const Int stride = inner * D;
  const RmsNormBackwardArgs<X, G, T> args{static_cast<G*>(dy),
                                          stride,
                                          static_cast<X*>(x),
                                          stride,
                                          static_cast<T*>(w),
                                          rstd,
                                          static_cast<X*>(dx),
                                          stride,
                                          accumulate != 0,
                                          inner,
                                          D,
                                          offset};
  return rms_norm_backward_launch(args, groups, parts, dw, nullptr);
}

}  // namespace

extern "C" {

const char* take_error() {
  static std::string error;
  error = std::exchange(emulation::block.error, "");
  return error.empty() ? nullptr : error.c_str();
}

// ---------------------------------------------------------------- attention

Int block_rows(Int many, Int H, Int bf16) {
  return attention_block_rows(rows_kind(many), attention_shape(1, 1, H, bf16));
}
Int backward_rows(Int H, Int bf16) { return AttentionBackwardBlocks(attention_shape(1, 1, H, bf16)).query_rows; }
Int backward_keys(Int H, Int bf16) { return AttentionBackwardBlocks(attention_shape(1, 1, H, bf16)).keys; }

Int attention_forward(Int N, Int K, Int H, Int bf16, Int window, double softcap, void* qkv, void* sinks, void* cache,
                      std::int32_t* tables, AttentionBlock* blocks, Int num_blocks, void* out, float* lse, Int many) {
  const AttentionCudaArgs args{
      attention_shape(N, K, H, bf16, window, softcap), qkv, sinks, cache, tables, blocks, num_blocks, out, lse};
  return attention_forward_launch(args, rows_kind(many), nullptr);
}

/// A step over the cache as ops/attention_cuda.cpp runs it. A slice is {query_start, query_length, context_length,
/// first entry of its table in `tables`, entries}.
Int attention_paged(Int N, Int K, Int H, Int bf16, Int window, double softcap, void* qkv, Int* slices, Int num_slices,
                    std::int32_t* tables, Int rows, void* cache, void* out) {
  const AttentionShape shape = attention_shape(N, K, H, bf16, window, softcap);
  std::vector<PagedSlice> all;
  for (Int i = 0; i < num_slices; ++i, slices += 5)
    all.push_back({slices[0], slices[1], slices[2], tables + slices[3], slices[4]});
  const ops::PagedPlan plan = ops::paged_plan(all, shape, rows);
  if (const Int status = kv_cache_write_launch(shape, qkv, plan.slots.data(), rows, cache, nullptr)) return status;
  for (const AttentionRows kind : {AttentionRows::few, AttentionRows::many}) {
    const auto& blocks = plan.of(kind);
    const AttentionCudaArgs args{
        shape, qkv,    nullptr, cache, plan.block_tables.data(), blocks.data(), static_cast<Int>(blocks.size()),
        out,   nullptr};
    if (const Int status = attention_forward_launch(args, kind, nullptr)) return status;
  }
  return 0;
}

Int kv_write(Int N, Int K, Int H, Int bf16, void* qkv, Int* slots, Int tokens, void* cache) {
  return kv_cache_write_launch(attention_shape(N, K, H, bf16), qkv, slots, tokens, cache, nullptr);
}

Int kv_copy(Int K, Int H, Int bf16, void* cache, Int from, Int to, Int length) {
  return kv_cache_copy_launch(attention_shape(K, K, H, bf16), cache, from, to, length, nullptr);
}

Int attention_backward(Int N, Int K, Int H, Int bf16, Int window, double softcap, void* qkv, void* out, void* d_out,
                       float* lse, float* dots, AttentionSequence* sequences, Int* sharers, AttentionBlock* blocks,
                       Int num_blocks, AttentionKeyBlock* key_blocks, Int num_key_blocks, Int tokens, void* d_qkv) {
  const AttentionBackwardCudaArgs args{attention_shape(N, K, H, bf16, window, softcap),
                                       qkv,
                                       out,
                                       d_out,
                                       lse,
                                       dots,
                                       sequences,
                                       sharers,
                                       blocks,
                                       num_blocks,
                                       key_blocks,
                                       num_key_blocks,
                                       tokens,
                                       d_qkv};
  return attention_backward_launch(args, nullptr);
}

Int attention_sinks_backward(Int N, Int K, Int H, Int bf16, void* out, void* d_out, float* lse, void* sinks,
                             float* terms, float* parts, Int tokens, float* d_sinks) {
  AttentionBackwardCudaArgs args;
  args.shape = attention_shape(N, K, H, bf16);
  args.out = out, args.d_out = d_out, args.lse = lse, args.tokens = tokens;
  return attention_sinks_backward_launch(args, sinks, terms, parts, d_sinks, nullptr);
}

// ---------------------------------------------------------------- rows of logits

Int sample(float* logits, Int rows, Int V, double temperature, double top_p, Int top_k, Int greedy, double* uniform,
           Int with_entropy, Int* tokens, float* logprobs, float* entropy) {
  std::vector<CudaDraw> draws;
  for (Int r = 0; r < rows; ++r) draws.push_back({r, sampling_rule(temperature, top_p, top_k, greedy), uniform[r]});
  std::vector<SampledToken> sampled(rows);
  const Int status = sample_rows_launch(logits, V, draws.data(), rows, with_entropy != 0, sampled.data(), nullptr);
  for (Int r = 0; r < rows; ++r) {
    tokens[r] = sampled[r].token;
    logprobs[r] = sampled[r].logprob;
    entropy[r] = sampled[r].entropy;
  }
  return status;
}

Int score(float* logits, Int rows, Int V, double temperature, double top_p, Int top_k, Int* first, Int* targets,
          float* logprobs, float* unfiltered, float* entropy) {
  const PairRows pairs{logits, rows, V, sampling_rule(temperature, top_p, top_k, 0), first, targets};
  return score_pairs_launch(pairs, logprobs, unfiltered, entropy, nullptr);
}

Int pairs_gradient(float* logits, Int rows, Int V, double temperature, double top_p, Int top_k, Int* first,
                   Int* targets, float* g, float* g_unfiltered, void* d_logits, Int bf16) {
  const PairRows pairs{logits, rows, V, sampling_rule(temperature, top_p, top_k, 0), first, targets};
  if (bf16) return pairs_gradient_launch(pairs, g, g_unfiltered, static_cast<bfloat16*>(d_logits), nullptr);
  return pairs_gradient_launch(pairs, g, g_unfiltered, static_cast<float*>(d_logits), nullptr);
}

// ---------------------------------------------------------------- norms, activations, embedding

/// Types of x and of the weights.
Int rms_norm_forward(void* x, void* w, double offset, void* y, float* rstd, Int inner, Int D, Int groups, Int x_bf16,
                     Int w_bf16) {
  if (x_bf16) return rms_norm_forward_of<bfloat16, bfloat16>(x, w, offset, y, rstd, inner, D, groups);
  if (w_bf16) return rms_norm_forward_of<float, bfloat16>(x, w, offset, y, rstd, inner, D, groups);
  return rms_norm_forward_of<float, float>(x, w, offset, y, rstd, inner, D, groups);
}

Int rms_norm_backward(void* dy, void* x, void* w, double offset, float* rstd, void* dx, Int accumulate, Int inner,
                      Int D, Int groups, float* parts, float* dw, Int x_bf16, Int w_bf16) {
  if (x_bf16)
    return rms_norm_backward_of<bfloat16, bfloat16, bfloat16>(dy, x, w, offset, rstd, dx, accumulate, inner, D, groups,
                                                              parts, dw);
  if (w_bf16)
    return rms_norm_backward_of<float, float, bfloat16>(dy, x, w, offset, rstd, dx, accumulate, inner, D, groups, parts,
                                                        dw);
  return rms_norm_backward_of<float, float, float>(dy, x, w, offset, rstd, dx, accumulate, inner, D, groups, parts, dw);
}

Int rope(void* x, Int stride, Int* positions, float* cos, float* sin, Int heads, Int H, Int rotary, Int inverse,
         Int interleaved, Int tokens, Int bf16) {
  const auto launch = [&]<class T>(T* rows) {
    const RopeArgs<T> args{rows, stride, positions, cos, sin, heads, H, rotary, inverse != 0, interleaved != 0};
    return rope_launch(args, tokens, nullptr);
  };
  return bf16 ? launch(static_cast<bfloat16*>(x)) : launch(static_cast<float*>(x));
}

Int swiglu_forward(void* gate_up, void* act, Int I, Int tokens, Int gate, Int bf16) {
  if (bf16)
    return swiglu_forward_launch(static_cast<bfloat16*>(gate_up), static_cast<bfloat16*>(act), I, tokens, Gate(gate),
                                 nullptr);
  return swiglu_forward_launch(static_cast<float*>(gate_up), static_cast<float*>(act), I, tokens, Gate(gate), nullptr);
}

Int swiglu_backward(void* d_act, void* gate_up, void* d_gate_up, Int I, Int tokens, Int gate, Int bf16) {
  if (bf16)
    return swiglu_backward_launch(static_cast<bfloat16*>(d_act), static_cast<bfloat16*>(gate_up),
                                  static_cast<bfloat16*>(d_gate_up), I, tokens, Gate(gate), nullptr);
  return swiglu_backward_launch(static_cast<float*>(d_act), static_cast<float*>(gate_up),
                                static_cast<float*>(d_gate_up), I, tokens, Gate(gate), nullptr);
}

Int bias_rows(void* bias, void* y, Int stride, Int rows, Int N, Int accumulate, Int bias_bf16, Int y_bf16) {
  if (y_bf16)
    return bias_rows_launch(static_cast<bfloat16*>(bias), static_cast<bfloat16*>(y), stride, rows, N, accumulate != 0,
                            nullptr);
  if (bias_bf16)
    return bias_rows_launch(static_cast<bfloat16*>(bias), static_cast<float*>(y), stride, rows, N, accumulate != 0,
                            nullptr);
  return bias_rows_launch(static_cast<float*>(bias), static_cast<float*>(y), stride, rows, N, accumulate != 0, nullptr);
}

/// Rows [first, first + rows) of a matrix in blocks; `format` 0: q8_0, 1: q4_0, 2: nf4.
Int unpack_blocks(Int format, void* tiles, Int first, Int rows, Int K, void* out, Int ldo, Int bf16) {
  const auto* const from = static_cast<const std::byte*>(tiles);
  if (bf16)
    return unpack_blocks_launch(BlockFormat(format), from, first, rows, K, static_cast<bfloat16*>(out), ldo, nullptr);
  return unpack_blocks_launch(BlockFormat(format), from, first, rows, K, static_cast<float*>(out), ldo, nullptr);
}

Int embedding_blocks(Int format, void* tiles, Int* ids, float* h, Int tokens, Int D, Int bf16) {
  const auto* const from = static_cast<const std::byte*>(tiles);
  if (bf16) return embedding_blocks_launch<bfloat16>(BlockFormat(format), from, ids, h, tokens, D, nullptr);
  return embedding_blocks_launch<float>(BlockFormat(format), from, ids, h, tokens, D, nullptr);
}

Int embedding_forward(void* table, Int* ids, float* h, Int tokens, Int D, Int bf16) {
  if (bf16) return embedding_forward_launch(static_cast<bfloat16*>(table), ids, h, tokens, D, nullptr);
  return embedding_forward_launch(static_cast<float*>(table), ids, h, tokens, D, nullptr);
}

Int embedding_backward(float* dh, Int* rows, Int* first, Int* tokens, float* d_table, Int num_rows, Int D) {
  return embedding_backward_launch({dh, rows, first, tokens, d_table, num_rows, D}, nullptr);
}

// ---------------------------------------------------------------- flat buffers

Int column_sums(void* x, Int stride, Int rows, Int columns, float* parts, float* out, Int bf16) {
  if (bf16) return add_column_sums_launch(static_cast<bfloat16*>(x), stride, rows, columns, parts, out, nullptr);
  return add_column_sums_launch(static_cast<float*>(x), stride, rows, columns, parts, out, nullptr);
}

Int block_squares(float* x, Int n, Int block, double* squares) {
  return block_squares_launch(x, n, block, squares, nullptr);
}

Int weight_digest(void* bytes, Int n, std::uint64_t* parts) { return weight_digest_launch(bytes, n, parts, nullptr); }

/// m and v: float, or bfloat16 or uint8, of `moment_bytes`; `remainders`: nullptr, or the weights' lower halves.
Int adamw(float* w, float* g, void* m, void* v, void* compute, double lr, double beta1, double beta2, double eps,
          double weight_decay, Int step, Int n, Int moment_bytes, void* remainders) {
  const double correction1 = 1 - std::pow(beta1, step), correction2 = 1 - std::pow(beta2, step);
  const auto launch = [&]<class M>(M*) {
    const AdamWArgs<float, M, M> args{w,
                                      g,
                                      static_cast<M*>(m),
                                      static_cast<M*>(v),
                                      static_cast<bfloat16*>(compute),
                                      lr,
                                      beta1,
                                      beta2,
                                      eps,
                                      weight_decay,
                                      correction1,
                                      correction2,
                                      1.0,
                                      step,
                                      0,
                                      static_cast<std::int16_t*>(remainders)};
    return adamw_launch(args, n, nullptr);
  };
  if (moment_bytes == 1) return launch(static_cast<std::uint8_t*>(nullptr));
  return moment_bytes == 2 ? launch(static_cast<bfloat16*>(nullptr)) : launch(static_cast<float*>(nullptr));
}

}  // extern "C"
