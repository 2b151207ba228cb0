#include <pybind11/stl.h>

#include "batching/dynamic_batching.h"
#include "batching/packing.h"
#include "bindings/module.h"

namespace nemo_rl::bindings {
namespace {

using Lengths = std::vector<std::int64_t>;

batching::DynamicBatchingPlan plan_dynamic_batching(const Lengths& lengths, std::int64_t batch_size,
                                                    std::int64_t shards, std::int64_t max_tokens,
                                                    std::int64_t sequence_length_round, std::int64_t width) {
  return batching::plan_dynamic_batching(lengths, {batch_size, shards, max_tokens, sequence_length_round, width});
}

}  // namespace

void bind_batching(py::module_& m) {
  using namespace py::literals;
  m.def(
      "pack_concatenative",
      [](const Lengths& lengths, std::int64_t capacity, std::int64_t max_sequences_per_bin) {
        return batching::pack_concatenative(lengths, capacity, max_sequences_per_bin);
      },
      "lengths"_a, "capacity"_a, "max_sequences_per_bin"_a = -1, release_gil());
  m.def(
      "pack_first_fit",
      [](const Lengths& lengths, const Lengths& order, std::int64_t capacity) {
        return batching::pack_first_fit(lengths, order, capacity);
      },
      "lengths"_a, "order"_a, "capacity"_a, release_gil());
  m.def(
      "pack_first_fit_decreasing",
      [](const Lengths& lengths, std::int64_t capacity) {
        return batching::pack_first_fit_decreasing(lengths, capacity);
      },
      "lengths"_a, "capacity"_a, release_gil());
  m.def(
      "pack_modified_first_fit_decreasing",
      [](const Lengths& lengths, std::int64_t capacity) {
        return batching::pack_modified_first_fit_decreasing(lengths, capacity);
      },
      "lengths"_a, "capacity"_a, release_gil());

  py::class_<batching::DynamicBatchingPlan>(m, "DynamicBatchingPlan")
      .def_readonly("order", &batching::DynamicBatchingPlan::order)
      .def_readonly("micro_batch_indices", &batching::DynamicBatchingPlan::micro_batch_indices)
      .def_readonly("micro_batch_lengths", &batching::DynamicBatchingPlan::micro_batch_lengths);
  m.def("plan_dynamic_batching", &plan_dynamic_batching, "lengths"_a, "batch_size"_a, "shards"_a, "max_tokens"_a,
        "sequence_length_round"_a, "width"_a, release_gil());
}

}  // namespace nemo_rl::bindings
