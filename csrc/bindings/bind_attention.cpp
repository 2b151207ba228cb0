// Attention for tests and benchmarks: the decoder calls the C++ ops directly.
#include <pybind11/stl.h>

#include <optional>
#include <tuple>
#include <vector>

#include "bindings/module.h"
#include "ops/attention.h"
#include "runtime/tensor.h"

namespace nemo_rl::bindings {
namespace {

using SequenceTuple = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>;
using SliceTuple = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::vector<std::int32_t>>;

std::vector<ops::AttentionSequence> sequences_of(const std::vector<SequenceTuple>& tuples) {
  std::vector<ops::AttentionSequence> result;
  for (const auto& [start, length, prefix_start, prefix_length] : tuples)
    result.push_back({start, length, prefix_start, prefix_length});
  return result;
}

std::vector<ops::PagedSlice> slices_of(const std::vector<SliceTuple>& tuples) {
  std::vector<ops::PagedSlice> result;
  for (const auto& [start, length, context, table] : tuples)
    result.push_back({start, length, context, table.data(), static_cast<std::int64_t>(table.size())});
  return result;
}

}  // namespace

void bind_attention(py::module_& m) {
  m.attr("KEY_TILE") = ops::kKeyTile;
  py::class_<ops::AttentionHeads>(
      m, "AttentionHeads",
      "N query heads on K key/value heads of size H, scores times `scale`; `window`: keys that a query sees at most")
      .def(py::init([](std::int64_t num_heads, std::int64_t num_kv_heads, std::int64_t head_dim, double scale,
                       std::int64_t window, double softcap, const std::optional<at::Tensor>& sinks) {
             return ops::AttentionHeads{
                 num_heads, num_kv_heads, head_dim, scale, window, softcap, sinks.value_or(at::Tensor())};
           }),
           py::arg("num_heads"), py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("scale"), py::arg("window") = 0,
           py::arg("softcap") = 0.0, py::arg("sinks") = py::none());
  m.def(
      "attention_forward",
      [](const at::Tensor& qkv, const std::vector<SequenceTuple>& sequences, const ops::AttentionHeads& heads) {
        at::Tensor out = at::empty({qkv.size(0), heads.num_heads * heads.head_dim}, qkv.options());
        at::Tensor lse = at::empty({qkv.size(0), heads.num_heads},
                                   qkv.options().dtype(qkv.scalar_type() == at::kDouble ? at::kDouble : at::kFloat));
        ops::attention_forward(qkv, sequences_of(sequences), heads, out, lse);
        return std::make_pair(out, lse);
      },
      py::arg("qkv"), py::arg("sequences"), py::arg("heads"), release_gil(),
      "(out [T, N*H], lse [T, N]) of packed qkv [T, (N+2K)*H]; sequences are (start, length, prefix_start, "
      "prefix_length)");
  m.def(
      "attention_backward",
      [](const at::Tensor& qkv, const at::Tensor& out, const at::Tensor& d_out, const at::Tensor& lse,
         const std::vector<SequenceTuple>& sequences, const ops::AttentionHeads& heads) {
        at::Tensor d_qkv = at::empty(qkv.sizes(), d_out.options());
        ops::attention_backward(qkv, out, d_out, lse, sequences_of(sequences), heads, d_qkv);
        return d_qkv;
      },
      py::arg("qkv"), py::arg("out"), py::arg("d_out"), py::arg("lse"), py::arg("sequences"), py::arg("heads"),
      release_gil(), "d_qkv [T, (N+2K)*H] in d_out's dtype (qkv's, or float32 under bfloat16)");
  m.def(
      "attention_sinks_backward",
      [](const at::Tensor& out, const at::Tensor& d_out, const at::Tensor& lse, const ops::AttentionHeads& heads) {
        const at::Tensor d_sinks = at::zeros({heads.num_heads}, lse.options());
        ops::attention_sinks_backward(out, d_out, lse, heads, d_sinks);
        return d_sinks;
      },
      py::arg("out"), py::arg("d_out"), py::arg("lse"), py::arg("heads"), release_gil(), "d_sinks [N] in lse's dtype");
  m.def(
      "attention_paged",
      [](const at::Tensor& qkv, const std::vector<SliceTuple>& slices, const ops::AttentionHeads& heads,
         at::Tensor cache) {
        at::Tensor out = at::empty({qkv.size(0), heads.num_heads * heads.head_dim}, qkv.options());
        ops::attention_paged(qkv, slices_of(slices), heads, cache, out);
        return out;
      },
      py::arg("qkv"), py::arg("slices"), py::arg("heads"), py::arg("cache"), release_gil(),
      "Stores the new tokens' keys and values in the cache; out [T, N*H] of the new tokens over it. Slices are "
      "(query_start, "
      "query_length, context_length, block_table)");
  m.def(
      "kv_cache_copy",
      [](at::Tensor cache, std::int64_t from, std::int64_t to, std::int64_t length) {
        ops::kv_cache_copy(cache, from, to, length);
      },
      py::arg("cache"), py::arg("src"), py::arg("dst"), py::arg("length"), release_gil());
}

}  // namespace nemo_rl::bindings
