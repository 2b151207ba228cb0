// The resident engine: requests join its batch between two steps. All calls come from one thread.
#include <pybind11/stl.h>

#include "bindings/module.h"
#include "common/check.h"
#include "common/random.h"
#include "generation/resident_engine.h"
#include "model/decoder_model.h"

namespace nemo_rl::bindings {
namespace {

using namespace nemo_rl::generation;

/// Lists over the drawn tokens: sequence, token id, log-probability, finish reason (0: it goes on), and the likeliest
/// tokens as pairs of id and log-probability.
py::tuple lists_of(const std::vector<DrawnToken>& drawn) {
  py::list sequences, tokens, logprobs, reasons, likeliest;
  for (const DrawnToken& d : drawn) {
    sequences.append(d.sequence);
    tokens.append(d.token_id);
    logprobs.append(d.logprob);
    reasons.append(static_cast<int>(d.finish_reason));
    py::tuple beside(d.likeliest.size());
    for (std::size_t i = 0; i < d.likeliest.size(); ++i)
      beside[i] = py::make_tuple(d.likeliest[i].token, d.likeliest[i].logprob);
    likeliest.append(beside);
  }
  return py::make_tuple(sequences, tokens, logprobs, reasons, likeliest);
}

/// The keys of samples 0, 1, ... of one draw.
std::vector<RandomKey> keys_of(std::uint32_t seed, std::uint32_t stream, std::uint64_t draw_id, std::uint32_t samples,
                               std::uint32_t first_sample) {
  std::vector<RandomKey> keys;
  for (std::uint32_t s = 0; s < samples; ++s)
    keys.push_back({seed, static_cast<RandomStream>(stream), draw_id, first_sample + s, 0});
  return keys;
}

}  // namespace

void bind_resident(py::module_& m) {
  py::class_<ResidentEngine>(m, "ResidentEngine", "See csrc/generation/resident_engine.h")
      .def(py::init([](std::shared_ptr<ModelRunner> runner, std::int64_t max_batch_size,
                       std::int64_t prefill_chunk_tokens, std::int64_t max_model_len, std::int64_t max_cache_bytes,
                       const std::vector<std::string>& token_bytes) {
             NRL_CHECK_ARG(runner != nullptr, "an engine needs a model runner");
             return std::make_unique<ResidentEngine>(
                 std::move(runner),
                 ResidentConfig{{max_batch_size, prefill_chunk_tokens}, max_model_len, max_cache_bytes},
                 std::make_shared<const TokenBytes>(token_bytes));
           }),
           py::arg("model_runner"), py::kw_only(), py::arg("max_batch_size"), py::arg("prefill_chunk_tokens"),
           py::arg("max_model_len"), py::arg("max_cache_bytes"), py::arg("token_bytes"),
           py::keep_alive<1, 2>())  // a Python model runner must outlive the engine
      .def(
          "submit",
          [](ResidentEngine& self, std::vector<std::int64_t> prompt, const kernels::SamplingRule& rule,
             std::int64_t max_new_tokens, std::vector<std::int64_t> stop_token_ids,
             const std::vector<std::string>& stop_strings, std::uint32_t samples, std::uint32_t seed,
             std::uint32_t stream, std::uint64_t draw_id, std::uint32_t first_sample, std::int64_t num_likeliest,
             std::shared_ptr<model::DecoderModel> adapted) {
            const auto stops = stop_strings.empty() ? nullptr : std::make_shared<const StopStrings>(stop_strings);
            return self.submit(std::move(prompt),
                               {rule, max_new_tokens, std::move(stop_token_ids), stops, num_likeliest},
                               keys_of(seed, stream, draw_id, samples, first_sample), std::move(adapted));
          },
          py::arg("prompt_ids"), py::kw_only(), py::arg("rule"), py::arg("max_new_tokens"), py::arg("stop_token_ids"),
          py::arg("stop_strings"), py::arg("samples"), py::arg("seed"), py::arg("stream"), py::arg("draw_id"),
          py::arg("first_sample"), py::arg("num_likeliest") = 0, py::arg("adapted") = nullptr,
          "The number of the first of `samples` sequences; the others follow. `adapted`: a DecoderModel made by base() "
          "and adapt(..., merge=False), whose adapters compute this request")
      .def("cancel", &ResidentEngine::cancel, py::arg("sequence"))
      .def(
          "step",
          [](ResidentEngine& self) {
            std::vector<DrawnToken> drawn;
            {
              py::gil_scoped_release no_gil;
              drawn = self.step();
            }
            return lists_of(drawn);
          },
          "(sequences, token_ids, logprobs, finish_reasons, likeliest): one entry a drawn token, reason 0 where it "
          "goes on; likeliest: (token id, log-probability) of the `num_likeliest` likeliest tokens there")
      .def("release_cache", &ResidentEngine::release_cache, release_gil())
      .def_property_readonly("has_work", &ResidentEngine::has_work)
      .def_property_readonly("num_sequences", &ResidentEngine::num_sequences)
      .def_property_readonly("num_blocks", &ResidentEngine::num_blocks)
      .def_property_readonly("used_blocks", &ResidentEngine::used_blocks)
      .def_property_readonly("generated_tokens", [](const ResidentEngine& e) { return e.metrics().generated_tokens; })
      .def_property_readonly("steps", [](const ResidentEngine& e) { return e.metrics().steps; })
      .def_property_readonly("preemptions", [](const ResidentEngine& e) { return e.metrics().preemptions; });
}

}  // namespace nemo_rl::bindings
