// The engine: requests in, token ids and log-probabilities out.
#include "bindings/module.h"

#include <map>

#include "common/check.h"
#include "generation/engine.h"
#include "generation/native_model_runner.h"

namespace nemo_rl::bindings {
namespace {

using namespace generation;

/// Lets tests stand in for a model: a Python subclass of ModelRunner.
class PyModelRunner : public ModelRunner {
 public:
  using ModelRunner::ModelRunner;
  std::int64_t vocab_size() const override { PYBIND11_OVERRIDE_PURE(std::int64_t, ModelRunner, vocab_size); }
  std::int64_t block_size() const override { PYBIND11_OVERRIDE_PURE(std::int64_t, ModelRunner, block_size); }
  std::int64_t bytes_per_block() const override { PYBIND11_OVERRIDE_PURE(std::int64_t, ModelRunner, bytes_per_block); }
  void allocate_cache(std::int64_t num_blocks) override { PYBIND11_OVERRIDE_PURE(void, ModelRunner, allocate_cache, num_blocks); }
  void release_cache() override { PYBIND11_OVERRIDE_PURE(void, ModelRunner, release_cache); }
  at::Tensor forward(const ForwardBatch& batch) override { PYBIND11_OVERRIDE_PURE(at::Tensor, ModelRunner, forward, batch); }
};

void bind_runner(py::module_& m) {
  py::class_<SequenceSlice>(m, "SequenceSlice")
      .def_readonly("query_start", &SequenceSlice::query_start)
      .def_readonly("query_length", &SequenceSlice::query_length)
      .def_readonly("context_length", &SequenceSlice::context_length)
      .def_readonly("block_table", &SequenceSlice::block_table);
  py::class_<BlockCopy>(m, "BlockCopy")
      .def_readonly("source", &BlockCopy::from)
      .def_readonly("target", &BlockCopy::to)
      .def_readonly("length", &BlockCopy::length);
  py::class_<ForwardBatch>(m, "ForwardBatch")
      .def_readonly("token_ids", &ForwardBatch::token_ids)
      .def_readonly("slices", &ForwardBatch::slices)
      .def_readonly("copies", &ForwardBatch::copies)
      .def_readonly("logits_rows", &ForwardBatch::logits_rows);
  py::class_<ModelRunner, PyModelRunner, std::shared_ptr<ModelRunner>>(m, "ModelRunner", "See csrc/generation/model_runner.h")
      .def(py::init<>());
  py::class_<NativeModelRunner, ModelRunner, std::shared_ptr<NativeModelRunner>>(m, "NativeModelRunner", "A DecoderModel behind an engine")
      .def(py::init<std::shared_ptr<model::DecoderModel>>(), py::arg("model"))
      .def("vocab_size", &NativeModelRunner::vocab_size);
}

SamplingParams params_from(const py::dict& d) {
  SamplingParams p;
  p.rule.temperature = d["temperature"].cast<float>();
  p.rule.top_p = d["top_p"].cast<float>();
  p.rule.top_k = d["top_k"].cast<std::int64_t>();
  p.rule.greedy = d["greedy"].cast<bool>();
  p.max_new_tokens = d["max_new_tokens"].cast<std::int64_t>();
  p.stop_token_ids = d["stop_token_ids"].cast<std::vector<std::int64_t>>();
  return p;
}

/// Rows that stop at the same strings share one matcher.
std::shared_ptr<const StopStrings> matcher_for(const std::vector<std::string>& strings,
                                               std::map<std::vector<std::string>, std::shared_ptr<const StopStrings>>& made) {
  if (strings.empty()) return nullptr;
  auto& matcher = made[strings];
  if (!matcher) matcher = std::make_shared<const StopStrings>(strings);
  return matcher;
}

std::vector<Request> requests_from(const std::vector<std::int64_t>& prompt_of, const py::dict& params,
                                   const std::vector<std::vector<std::string>>& stop_strings, std::uint32_t seed,
                                   const std::vector<std::uint32_t>& streams, const std::vector<std::uint64_t>& draw_ids,
                                   const std::vector<std::uint32_t>& sample_index) {
  const std::size_t n = prompt_of.size();
  NRL_CHECK_ARG(stop_strings.size() == n && streams.size() == n && draw_ids.size() == n && sample_index.size() == n,
                "generate: ", n, " requests but ", stop_strings.size(), " stop strings, ", draw_ids.size(), " draw ids, ", sample_index.size(), " samples");
  const SamplingParams shared = params_from(params);
  std::map<std::vector<std::string>, std::shared_ptr<const StopStrings>> matchers;
  std::vector<Request> requests;
  for (std::size_t i = 0; i < n; ++i) {
    Request r{prompt_of[i], shared, {seed, static_cast<RandomStream>(streams[i]), draw_ids[i], sample_index[i], 0}};
    r.params.stop_strings = matcher_for(stop_strings[i], matchers);
    requests.push_back(std::move(r));
  }
  return requests;
}

void bind_engine(py::module_& m) {
  py::class_<Generation>(m, "Generation")
      .def_readonly("token_ids", &Generation::token_ids)
      .def_readonly("logprobs", &Generation::logprobs)
      .def_readonly("entropies", &Generation::entropies)
      .def_property_readonly("finish_reason", [](const Generation& g) { return finish_reason_name(g.finish_reason); });
  py::class_<EngineMetrics>(m, "EngineMetrics")
      .def_readonly("steps", &EngineMetrics::steps)
      .def_readonly("generated_tokens", &EngineMetrics::generated_tokens)
      .def_readonly("prefill_tokens", &EngineMetrics::prefill_tokens)
      .def_readonly("decode_tokens", &EngineMetrics::decode_tokens)
      .def_readonly("shared_prompt_tokens", &EngineMetrics::shared_prompt_tokens)
      .def_readonly("sequence_steps", &EngineMetrics::sequence_steps)
      .def_readonly("peak_blocks", &EngineMetrics::peak_blocks)
      .def_readonly("preemptions", &EngineMetrics::preemptions)
      .def_readonly("forward_seconds", &EngineMetrics::forward_seconds)
      .def_readonly("sampling_seconds", &EngineMetrics::sampling_seconds);
  py::register_exception<GenerationInterrupted>(m, "GenerationInterrupted");
  py::class_<Engine>(m, "Engine", "See csrc/generation/engine.h")
      .def(py::init([](std::shared_ptr<ModelRunner> runner, std::int64_t max_batch_size, std::int64_t prefill_chunk_tokens, std::int64_t max_model_len,
                       std::int64_t max_cache_bytes, const std::vector<py::bytes>& token_bytes) {
             auto table = std::make_shared<TokenBytes>();
             for (const auto& bytes : token_bytes) table->push_back(bytes);
             return std::make_unique<Engine>(std::move(runner), EngineConfig{{max_batch_size, prefill_chunk_tokens}, max_model_len, max_cache_bytes, false},
                                             std::move(table));
           }),
           py::arg("runner"), py::arg("max_batch_size"), py::arg("prefill_chunk_tokens"), py::arg("max_model_len"), py::arg("max_cache_bytes"),
           py::arg("token_bytes"), py::keep_alive<1, 2>())
      .def("generate",
           [](Engine& self, const std::vector<std::vector<std::int64_t>>& prompts, const std::vector<std::int64_t>& prompt_of, const py::dict& params,
              const std::vector<std::vector<std::string>>& stop_strings, std::uint32_t seed, const std::vector<std::uint32_t>& streams,
              const std::vector<std::uint64_t>& draw_ids, const std::vector<std::uint32_t>& sample_index) {
             const auto requests = requests_from(prompt_of, params, stop_strings, seed, streams, draw_ids, sample_index);
             const auto poll = [] {
               py::gil_scoped_acquire gil;
               if (PyErr_CheckSignals() != 0) throw py::error_already_set();
               return false;
             };
             py::gil_scoped_release release;
             return self.generate(prompts, requests, poll);
           },
           py::arg("prompts"), py::arg("prompt_of"), py::arg("params"), py::arg("stop_strings"), py::arg("seed"), py::arg("streams"),
           py::arg("draw_ids"), py::arg("sample_index"))
      .def("release_cache", &Engine::release_cache, release_gil())
      .def_property_readonly("cache_blocks", &Engine::cache_blocks)
      .def_property_readonly("metrics", [](const Engine& self) { return self.metrics(); })
      .def("reset_metrics", &Engine::reset_metrics);
}

}  // namespace

void bind_generation(py::module_& m) {
  bind_runner(m);
  bind_engine(m);
}

}  // namespace nemo_rl::bindings
