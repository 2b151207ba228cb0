#include <algorithm>
#include <cmath>

#include "common/check.h"
#include "ops/attention.h"
#include "ops/attention_checks.h"
#include "ops/kernel_types.h"
#include "runtime/parallel_items.h"
#include "runtime/tensor.h"

namespace nemo_rl::ops {

decltype(attention_backward_cuda) attention_backward_cuda("attention_backward");
decltype(attention_sinks_backward_cuda) attention_sinks_backward_cuda("attention_sinks_backward");

namespace {

using kernels::AttentionBackwardJob;

constexpr std::int64_t kJobCost = 1 << 23;  // multiply-adds, of all kv heads together
constexpr std::int64_t kReduceKeys = 64;

struct Plan {
  std::vector<std::int32_t> sharers;       ///< sequences with a prefix, by owner
  std::vector<AttentionBackwardJob> jobs;  ///< by owner
  std::vector<std::pair<std::int32_t, std::int32_t>>
      groups;                     ///< [first, last) jobs of one owner, where there are several
  std::int64_t partial_size = 0;  ///< values of the arithmetic's type
  std::int64_t owner_keys = 0, sharer_keys = 0;
  std::int64_t cost = 0;
};

std::int64_t sequence_pairs(const AttentionSequence& s) { return attention_pairs(s.prefix_length, 0, s.length); }

/// The jobs of one owner and its sharers. A split depends on the batch alone, never on the number of threads.
void add_group(Plan& plan, std::span<const AttentionSequence> sequences, std::int32_t owner, std::int32_t sharer_begin,
               std::int32_t sharer_end, std::int64_t pairs_a_job) {
  const AttentionSequence& own = sequences[owner];
  std::int64_t total = sequence_pairs(own);
  for (auto i = sharer_begin; i < sharer_end; ++i) total += sequence_pairs(sequences[plan.sharers[i]]);
  const auto first_job = static_cast<std::int32_t>(plan.jobs.size());
  const std::int64_t parts = std::max<std::int64_t>(1, (total + pairs_a_job / 2) / pairs_a_job);
  AttentionBackwardJob job{owner, 0, 0, sharer_begin, sharer_begin, 0, -1};
  std::int64_t done = 0;
  const auto close_if_full = [&] {
    const auto closed = static_cast<std::int64_t>(plan.jobs.size()) - first_job;
    if (done * parts < total * (closed + 1) || done == total) return;
    plan.jobs.push_back(job);
    job = {owner, job.token_end, job.token_end, job.sharer_end, job.sharer_end, 0, -1};
  };
  while (job.token_end < own.length) {
    const std::int64_t next = std::min(own.length, job.token_end + kKeyTile);
    done += attention_pairs(0, job.token_end, next);
    job.token_end = job.key_end = next;
    close_if_full();
  }
  while (job.sharer_end < sharer_end) {
    const AttentionSequence& s = sequences[plan.sharers[job.sharer_end++]];
    done += sequence_pairs(s);
    job.key_end = std::max(job.key_end, s.prefix_length);
    plan.sharer_keys = std::max(plan.sharer_keys, s.prefix_length % kKeyTile + s.length);
    close_if_full();
  }
  plan.jobs.push_back(job);
  const auto last_job = static_cast<std::int32_t>(plan.jobs.size());
  if (last_job - first_job == 1) plan.jobs.back().key_end = own.length;
  else plan.groups.emplace_back(first_job, last_job);
  for (auto j = first_job; j < last_job; ++j) plan.owner_keys = std::max(plan.owner_keys, plan.jobs[j].key_end);
}

Plan make_plan(std::span<const AttentionSequence> sequences, const std::vector<std::int32_t>& owner,
               const kernels::AttentionShape& shape) {
  Plan plan;
  std::int64_t pairs = 0;
  std::vector<std::int32_t> owners;
  for (std::int32_t i = 0; i < static_cast<std::int32_t>(sequences.size()); ++i) {
    if (sequences[i].length == 0) continue;
    pairs += sequence_pairs(sequences[i]);
    (owner[i] == i ? owners : plan.sharers).push_back(i);
  }
  plan.cost = pairs * shape.num_heads * shape.head_dim * 5;
  std::stable_sort(plan.sharers.begin(), plan.sharers.end(), [&](auto a, auto b) { return owner[a] < owner[b]; });
  const std::int64_t pairs_a_job = std::max(kJobCost * shape.num_kv_heads / (5 * shape.num_heads * shape.head_dim) + 1,
                                            pairs * shape.num_kv_heads / 16 + 1);
  std::size_t next = 0;
  for (const std::int32_t i : owners) {
    const auto begin = static_cast<std::int32_t>(next);
    while (next < plan.sharers.size() && owner[plan.sharers[next]] == i) ++next;
    add_group(plan, sequences, i, begin, static_cast<std::int32_t>(next), pairs_a_job);
  }
  for (const auto& [first, last] : plan.groups)
    for (auto j = first; j < last; ++j) {
      plan.jobs[j].partial = plan.partial_size;
      plan.partial_size += 2 * plan.jobs[j].key_end * shape.head_dim * shape.num_kv_heads;
    }
  return plan;
}

/// One head's term of attention_sinks_backward, over all rows.
template <class Elem, class Grad, class Real>
Real sink_gradient(const Elem* out, const Grad* d_out, const Real* lse, Real sink, const AttentionHeads& heads,
                   std::int64_t tokens) {
  Real sum = 0;
  for (std::int64_t t = 0; t < tokens; ++t) {
    const Elem* o = out + t * heads.num_heads * heads.head_dim;
    const Grad* d = d_out + t * heads.num_heads * heads.head_dim;
    Real dot = 0;
    for (std::int64_t h = 0; h < heads.head_dim; ++h)
      dot += static_cast<Real>(static_cast<accumulate_t<Grad>>(d[h])) * static_cast<Real>(o[h]);
    sum -= std::exp(sink - lse[t * heads.num_heads]) * dot;
  }
  return sum;
}

}  // namespace

void attention_sinks_backward(const at::Tensor& out, const at::Tensor& d_out, const at::Tensor& lse,
                              const AttentionHeads& heads, const at::Tensor& d_sinks) {
  const std::int64_t N = heads.num_heads, tokens = out.size(0);
  check_matrix("out", out, tokens, N * heads.head_dim, heads.sinks.scalar_type(), heads.sinks.device());
  check_matrix("lse", lse, tokens, N, d_sinks.scalar_type(), out.device());
  check_matrix("d_sinks", d_sinks.view({1, -1}), 1, N, lse.scalar_type(), out.device());
  if (out.is_cuda()) return attention_sinks_backward_cuda.get(out)(out, d_out, lse, heads, d_sinks);
  dispatch_floating(out.scalar_type(), "attention_sinks_backward", [&](auto out_tag) {
    dispatch_floating(d_out.scalar_type(), "attention_sinks_backward", [&](auto grad_tag) {
      using Elem = decltype(out_tag);
      using Grad = decltype(grad_tag);
      using Real = accumulate_t<Elem>;
      runtime::parallel_items(N, tokens * N * heads.head_dim > kAttentionSerialCost, [&](std::int64_t n) {
        mutable_ptr<Real>(d_sinks)[n] +=
            sink_gradient(ptr<Elem>(out) + n * heads.head_dim, ptr<Grad>(d_out) + n * heads.head_dim,
                          ptr<Real>(lse) + n, static_cast<Real>(ptr<Elem>(heads.sinks)[n]), heads, tokens);
      });
    });
  });
}

void attention_backward(const at::Tensor& qkv, const at::Tensor& out, const at::Tensor& d_out, const at::Tensor& lse,
                        std::span<const AttentionSequence> sequences, const AttentionHeads& heads, at::Tensor& d_qkv) {
  const kernels::AttentionShape shape = attention_shape(qkv, heads);
  const std::int64_t tokens = qkv.size(0), columns = heads.num_heads * heads.head_dim;
  const at::ScalarType dtype = qkv.scalar_type(), grad_dtype = d_out.scalar_type();
  NRL_CHECK_ARG(grad_dtype == dtype || (dtype == at::kBFloat16 && grad_dtype == at::kFloat),
                "attention_backward: d_out is ", at::toString(grad_dtype), "; expected qkv's ", at::toString(dtype),
                dtype == at::kBFloat16 ? " or Float" : "");
  check_matrix("out", out, tokens, columns, dtype, qkv.device());
  check_matrix("d_out", d_out, tokens, columns, grad_dtype, qkv.device());
  check_matrix("lse", lse, tokens, heads.num_heads, dtype == at::kDouble ? at::kDouble : at::kFloat, qkv.device());
  check_matrix("d_qkv", d_qkv, tokens, qkv.size(1), grad_dtype, qkv.device());
  const auto owner = check_sequences(sequences, tokens);

  std::int64_t covered = 0;
  for (const AttentionSequence& s : sequences) covered += s.length;
  if (covered < tokens) d_qkv.zero_();
  if (qkv.is_cuda()) return attention_backward_cuda.get(qkv)(qkv, out, d_out, lse, sequences, owner, shape, d_qkv);
  const Plan plan = make_plan(sequences, owner, shape);
  const at::Tensor partials = at::empty({plan.partial_size}, lse.options());
  kernels::AttentionBackwardArgs args{shape,
                                      grad_dtype == at::kBFloat16 ? kernels::ElementType::bfloat16
                                      : grad_dtype == at::kDouble ? kernels::ElementType::float64
                                                                  : kernels::ElementType::float32,
                                      qkv.const_data_ptr(),
                                      out.const_data_ptr(),
                                      d_out.const_data_ptr(),
                                      lse.const_data_ptr(),
                                      sequences.data(),
                                      plan.sharers.data(),
                                      d_qkv.mutable_data_ptr(),
                                      partials.mutable_data_ptr()};
  const std::int64_t kv_heads = shape.num_kv_heads;
  const bool parallel = plan.cost > kAttentionSerialCost;
  const std::size_t bytes = kernels::attention_backward_workspace(shape, plan.owner_keys, plan.sharer_keys);
  runtime::parallel_items(static_cast<std::int64_t>(plan.jobs.size()) * kv_heads, parallel, [&](std::int64_t i) {
    kernels::attention_backward_job(args, plan.jobs[i / kv_heads], i % kv_heads, runtime::thread_workspace(bytes));
  });

  struct Reduction {
    std::int32_t first, last;
    std::int64_t kv_head, key_begin, key_end;
  };
  std::vector<Reduction> reductions;
  for (const auto& [first, last] : plan.groups) {
    const std::int64_t length = sequences[plan.jobs[first].owner].length;
    for (std::int64_t head = 0; head < kv_heads; ++head)
      for (std::int64_t key = 0; key < length; key += kReduceKeys)
        reductions.push_back({first, last, head, key, std::min(length, key + kReduceKeys)});
  }
  runtime::parallel_items(static_cast<std::int64_t>(reductions.size()), parallel, [&](std::int64_t i) {
    const Reduction& r = reductions[i];
    kernels::attention_backward_reduce(args, &plan.jobs[r.first], r.last - r.first, r.kv_head, r.key_begin, r.key_end);
  });
}

}  // namespace nemo_rl::ops
