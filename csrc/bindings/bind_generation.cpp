// The generation engine: flat arrays in, flat tensors out.
#include <pybind11/stl.h>

#include "bindings/interruptible.h"
#include "bindings/module.h"
#include "common/check.h"
#include "common/random.h"
#include "generation/engine.h"
#include "generation/native_model_runner.h"
#include "ops/sampling.h"
#include "runtime/tensor.h"

namespace nemo_rl::bindings {
namespace {

using namespace nemo_rl::generation;

/// Lets a Python class be the model behind an engine. Its layers see all tokens: it has one pool of cache blocks.
class PyModelRunner : public ModelRunner {
 public:
  using ModelRunner::ModelRunner;
  std::int64_t vocab_size() const override { PYBIND11_OVERRIDE_PURE(std::int64_t, ModelRunner, vocab_size, ); }
  std::int64_t block_size() const override { PYBIND11_OVERRIDE_PURE(std::int64_t, ModelRunner, block_size, ); }
  std::int64_t bytes_per_block() const { PYBIND11_OVERRIDE_PURE(std::int64_t, ModelRunner, bytes_per_block, ); }
  std::vector<CachePool> cache_pools() const override { return {{0, bytes_per_block()}}; }
  void allocate_cache(const std::vector<std::int64_t>& num_blocks) override {
    PYBIND11_OVERRIDE_PURE(void, ModelRunner, allocate_cache, num_blocks.front());
  }
  void release_cache() override { PYBIND11_OVERRIDE_PURE(void, ModelRunner, release_cache, ); }
  at::Tensor forward(const ForwardBatch& batch) override {
    PYBIND11_OVERRIDE_PURE(at::Tensor, ModelRunner, forward, batch);
  }
};

std::vector<std::int64_t> integers(const at::Tensor& t, const char* name, std::int64_t expected = -1) {
  NRL_CHECK_ARG(t.dim() == 1 && t.scalar_type() == at::kLong && (expected < 0 || t.size(0) == expected), name,
                ": expected int64 [", expected < 0 ? "n" : std::to_string(expected), "], given ", t.scalar_type(), " ",
                t.sizes());
  const at::Tensor flat = t.cpu().contiguous();
  return {flat.const_data_ptr<std::int64_t>(), flat.const_data_ptr<std::int64_t>() + flat.numel()};
}

std::vector<std::vector<std::int64_t>> split(const at::Tensor& ids, const at::Tensor& offsets) {
  const auto flat = integers(ids, "prompt_ids"), bounds = integers(offsets, "prompt_offsets");
  std::vector<std::vector<std::int64_t>> prompts;
  NRL_CHECK_ARG(!bounds.empty() && bounds.front() == 0 && bounds.back() == static_cast<std::int64_t>(flat.size()),
                "prompt_offsets: expected [0, ..., ", flat.size(), "]");
  for (std::size_t p = 0; p + 1 < bounds.size(); ++p) {
    NRL_CHECK_ARG(bounds[p] <= bounds[p + 1] && bounds[p + 1] <= static_cast<std::int64_t>(flat.size()),
                  "prompt_offsets decrease at ", p);
    prompts.emplace_back(flat.begin() + bounds[p], flat.begin() + bounds[p + 1]);
  }
  return prompts;
}

/// What generate() takes beside the prompts: one entry a request in every tensor.
struct RequestArrays {
  at::Tensor prompt_index, draw_ids, sample_index, streams, max_new_tokens, stop_set;
  std::uint32_t seed = 0;
  kernels::SamplingRule rule;
  std::vector<std::int64_t> stop_token_ids;
  std::vector<std::vector<std::string>> stop_sets;  ///< a request names one by its index in stop_set, or none by -1
};

std::vector<Request> requests_from(const RequestArrays& a) {
  const std::int64_t B = a.prompt_index.numel();
  const auto prompt = integers(a.prompt_index, "prompt_index", B), draw = integers(a.draw_ids, "draw_ids", B);
  const auto sample = integers(a.sample_index, "sample_index", B), stream = integers(a.streams, "streams", B);
  const auto limit = integers(a.max_new_tokens, "max_new_tokens", B), stop = integers(a.stop_set, "stop_set", B);
  std::vector<std::shared_ptr<const StopStrings>> sets;
  for (const auto& strings : a.stop_sets)
    sets.push_back(strings.empty() ? nullptr : std::make_shared<StopStrings>(strings));
  std::vector<Request> out(B);
  for (std::int64_t i = 0; i < B; ++i) {
    NRL_CHECK_ARG(draw[i] >= 0, "draw_ids[", i, "] = ", draw[i], ": expected a count");
    NRL_CHECK_ARG(sample[i] >= 0 && sample[i] <= 0xFFFFFFFFll, "sample_index[", i, "] = ", sample[i],
                  ": expected a count");
    NRL_CHECK_ARG(stop[i] >= -1 && stop[i] < static_cast<std::int64_t>(sets.size()), "stop_set[", i, "] = ", stop[i],
                  " of ", sets.size());
    Request& r = out[i];
    r.prompt = prompt[i];
    r.params = {a.rule, limit[i], a.stop_token_ids, stop[i] < 0 ? nullptr : sets[stop[i]]};
    r.key = {a.seed, static_cast<RandomStream>(stream[i]), static_cast<std::uint64_t>(draw[i]),
             static_cast<std::uint32_t>(sample[i]), 0};
  }
  return out;
}

struct GenerationArrays {
  at::Tensor token_ids, offsets, logprobs, entropies, finish_reasons;
};

GenerationArrays arrays_from(const std::vector<Generation>& generations) {
  const auto B = static_cast<std::int64_t>(generations.size());
  GenerationArrays out;
  out.offsets = at::zeros({B + 1}, at::kLong);
  out.finish_reasons = at::empty({B}, at::kByte);
  auto* offsets = out.offsets.data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < B; ++i) {
    offsets[i + 1] = offsets[i] + static_cast<std::int64_t>(generations[i].token_ids.size());
    out.finish_reasons.data_ptr<std::uint8_t>()[i] = static_cast<std::uint8_t>(generations[i].finish_reason);
  }
  out.token_ids = at::empty({offsets[B]}, at::kLong);
  out.logprobs = at::empty({offsets[B]}, at::kFloat);
  out.entropies = at::empty({offsets[B]}, at::kFloat);
  for (std::int64_t i = 0; i < B; ++i) {
    const Generation& g = generations[i];
    std::copy(g.token_ids.begin(), g.token_ids.end(), out.token_ids.data_ptr<std::int64_t>() + offsets[i]);
    std::copy(g.logprobs.begin(), g.logprobs.end(), out.logprobs.data_ptr<float>() + offsets[i]);
    std::copy(g.entropies.begin(), g.entropies.end(), out.entropies.data_ptr<float>() + offsets[i]);
  }
  return out;
}

/// Engine's callback that calls `on_finished(requests, token_ids)`, with the GIL; none for None.
Finished finished_callback(const py::object& on_finished) {
  if (on_finished.is_none()) return {};
  return [&on_finished](const std::vector<std::int64_t>& requests,
                        const std::vector<const std::vector<std::int64_t>*>& token_ids) {
    py::gil_scoped_acquire gil;
    py::list ids;
    for (const auto* tokens : token_ids) ids.append(py::cast(*tokens));
    on_finished(requests, ids);
  };
}

/// Runs without the GIL and takes it once a step to let Python see signals, and for `on_finished(requests, token_ids)`
/// where it is given; a KeyboardInterrupt, or what that raises, reaches the caller. None: the call has paused.
std::optional<GenerationArrays> generate(Engine& engine, const at::Tensor& prompt_ids, const at::Tensor& prompt_offsets,
                                         const RequestArrays& arrays, const py::object& on_finished,
                                         std::int64_t pause_after, bool keep_cache) {
  const Finished finished = finished_callback(on_finished);
  return interruptible([&](const auto& interrupted) -> std::optional<GenerationArrays> {
    const auto generations = engine.generate(split(prompt_ids, prompt_offsets), requests_from(arrays), interrupted,
                                             finished, {}, Pause{pause_after, keep_cache});
    if (engine.paused()) return std::nullopt;
    return arrays_from(generations);
  });
}

GenerationArrays resume(Engine& engine, const py::object& on_finished) {
  const Finished finished = finished_callback(on_finished);
  return interruptible([&](const auto& interrupted) { return arrays_from(engine.resume(interrupted, finished)); });
}

py::dict metrics_dict(const EngineMetrics& m) {
  using namespace py::literals;
  return py::dict("steps"_a = m.steps, "generated_tokens"_a = m.generated_tokens, "prefill_tokens"_a = m.prefill_tokens,
                  "decode_tokens"_a = m.decode_tokens, "draft_tokens"_a = m.draft_tokens,
                  "accepted_draft_tokens"_a = m.accepted_draft_tokens,
                  "shared_prompt_tokens"_a = m.shared_prompt_tokens, "sequence_steps"_a = m.sequence_steps,
                  "peak_blocks"_a = m.peak_blocks, "preemptions"_a = m.preemptions,
                  "forward_seconds"_a = m.forward_seconds, "sampling_seconds"_a = m.sampling_seconds);
}

py::tuple scored_tensors(const std::vector<ops::SampledToken>& rows) {
  const auto R = static_cast<std::int64_t>(rows.size());
  const at::Tensor tokens = at::empty({R}, at::kLong), logprobs = at::empty({R}, at::kFloat),
                   entropies = at::empty({R}, at::kFloat);
  for (std::int64_t r = 0; r < R; ++r) {
    tokens.data_ptr<std::int64_t>()[r] = rows[r].token;
    logprobs.data_ptr<float>()[r] = rows[r].logprob;
    entropies.data_ptr<float>()[r] = rows[r].entropy;
  }
  return py::make_tuple(tokens, logprobs, entropies);
}

void bind_sampling(py::module_& m) {
  py::class_<kernels::SamplingRule>(m, "SamplingRule", "See csrc/kernels/sampling.h")
      .def(py::init([](float temperature, float top_p, std::int64_t top_k, bool greedy) {
             const kernels::SamplingRule rule{temperature, top_p, top_k, greedy};
             ops::check_rule(rule);
             return rule;
           }),
           py::arg("temperature") = 1.0f, py::arg("top_p") = 1.0f, py::arg("top_k") = 0, py::arg("greedy") = false);
  m.def(
      "sample_rows",
      [](const at::Tensor& logits, const at::Tensor& uniform, const kernels::SamplingRule& rule) {
        NRL_CHECK_ARG(uniform.dim() == 1 && uniform.size(0) == logits.size(0) && uniform.scalar_type() == at::kDouble,
                      "uniform: expected float64 [", logits.size(0), "]");
        const at::Tensor u = uniform.contiguous();
        std::vector<ops::RowDraw> draws;
        for (std::int64_t r = 0; r < u.size(0); ++r) draws.push_back({r, rule, u.const_data_ptr<double>()[r]});
        std::vector<ops::SampledToken> sampled;
        {
          py::gil_scoped_release no_gil;
          sampled = ops::sample_rows(logits, draws, true);
        }
        return scored_tensors(sampled);
      },
      py::arg("logits"), py::arg("uniform"), py::arg("rule"),
      "(token_ids, logprobs, entropies), each [R]; token -1: not finite");
  m.def(
      "score_rows",
      [](const at::Tensor& logits, const at::Tensor& token_ids, const kernels::SamplingRule& rule) {
        std::vector<ops::SampledToken> scored;
        {
          py::gil_scoped_release no_gil;
          scored = ops::score_rows(logits, token_ids, rule, true);
        }
        return scored_tensors(scored);
      },
      py::arg("logits"), py::arg("token_ids"), py::arg("rule"),
      "(token_ids, logprobs, entropies), as sample_rows reports them");
  m.def(
      "random_uniform",
      [](std::uint32_t seed, std::uint32_t stream, std::uint64_t draw_id, std::uint32_t sample,
         std::uint32_t position) {
        return random_uniform({seed, static_cast<RandomStream>(stream), draw_id, sample, position});
      },
      py::arg("seed"), py::arg("stream"), py::arg("draw_id"), py::arg("sample"), py::arg("position"),
      "The draw of csrc/common/random.h");
}

/// Steps of few rows before the weights are packed for such steps: policy.generation.packed_weights.
std::int64_t pack_after(const std::string& packed_weights) {
  if (packed_weights == "off") return NativeModelRunner::kNeverPack;
  if (packed_weights == "on") return 0;
  NRL_CHECK_ARG(packed_weights == "auto", "packed_weights is one of off, on and auto, not '", packed_weights, "'");
  return NativeModelRunner::kPackAfter;
}

void bind_model_runner(py::module_& m) {
  py::class_<SequenceSlice>(m, "SequenceSlice")
      .def_readonly("query_start", &SequenceSlice::query_start)
      .def_readonly("query_length", &SequenceSlice::query_length)
      .def_readonly("context_length", &SequenceSlice::context_length)
      .def_property_readonly("block_table", [](const SequenceSlice& s) { return s.block_tables.front(); });
  py::class_<BlockCopy>(m, "BlockCopy")
      .def_readonly("source", &BlockCopy::from)
      .def_readonly("target", &BlockCopy::to)
      .def_readonly("length", &BlockCopy::length);
  py::class_<ForwardBatch>(m, "ForwardBatch")
      .def_readonly("token_ids", &ForwardBatch::token_ids)
      .def_readonly("slices", &ForwardBatch::slices)
      .def_readonly("copies", &ForwardBatch::copies)
      .def_readonly("logits_rows", &ForwardBatch::logits_rows);
  py::class_<ModelRunner, PyModelRunner, std::shared_ptr<ModelRunner>>(m, "ModelRunner",
                                                                       "See csrc/generation/model_runner.h")
      .def(py::init<>())
      .def("vocab_size", &ModelRunner::vocab_size)
      .def("block_size", &ModelRunner::block_size)
      .def("longest_sequence", &longest_sequence, py::arg("prefill_chunk_tokens"), py::arg("max_cache_bytes"),
           "See csrc/generation/cache_size.h")
      .def("release_cache", &ModelRunner::release_cache, release_gil())
      .def("keep_activations", &ModelRunner::keep_activations, py::arg("keep"))
      .def("forward", &ModelRunner::forward, py::arg("batch"), release_gil());
  py::class_<NativeModelRunner, ModelRunner, std::shared_ptr<NativeModelRunner>>(
      m, "NativeModelRunner", "Reads a DecoderModel's weights in place")
      .def(py::init([](std::shared_ptr<model::DecoderModel> model, bool enforce_eager,
                       const std::string& packed_weights) {
             auto recorder = enforce_eager ? RecordedSteps::Recorder() : RecordedSteps::recorder_for(model->compute());
             return std::make_shared<NativeModelRunner>(std::move(model), std::move(recorder),
                                                        pack_after(packed_weights));
           }),
           py::arg("model"), py::arg("enforce_eager") = false, py::arg("packed_weights") = "auto")
      .def_property("draft_rows", &NativeModelRunner::draft_rows, &NativeModelRunner::set_draft_rows)
      .def_property_readonly("device", [](const NativeModelRunner& self) { return self.device().str(); });
}

void bind_engine(py::module_& m) {
  py::class_<RequestArrays>(m, "GenerationRequests", "One entry a request; see csrc/bindings/bind_generation.cpp")
      .def(py::init([](at::Tensor prompt_index, at::Tensor draw_ids, at::Tensor sample_index, at::Tensor streams,
                       at::Tensor max_new_tokens, at::Tensor stop_set, std::uint32_t seed,
                       const kernels::SamplingRule& rule, std::vector<std::int64_t> stop_token_ids,
                       std::vector<std::vector<std::string>> stop_sets) {
             return RequestArrays{prompt_index,
                                  draw_ids,
                                  sample_index,
                                  streams,
                                  max_new_tokens,
                                  stop_set,
                                  seed,
                                  rule,
                                  std::move(stop_token_ids),
                                  std::move(stop_sets)};
           }),
           py::arg("prompt_index"), py::arg("draw_ids"), py::arg("sample_index"), py::arg("streams"),
           py::arg("max_new_tokens"), py::arg("stop_set"), py::arg("seed"), py::arg("rule"), py::arg("stop_token_ids"),
           py::arg("stop_sets"));
  py::class_<GenerationArrays>(m, "GenerationArrays",
                               "Request i holds [offsets[i], offsets[i + 1]) of the flat tensors")
      .def_readonly("token_ids", &GenerationArrays::token_ids)
      .def_readonly("offsets", &GenerationArrays::offsets)
      .def_readonly("logprobs", &GenerationArrays::logprobs)
      .def_readonly("entropies", &GenerationArrays::entropies)
      .def_readonly("finish_reasons", &GenerationArrays::finish_reasons);
  py::enum_<FinishReason>(m, "FinishReason")
      .value("stop_token", FinishReason::stop_token)
      .value("stop_string", FinishReason::stop_string)
      .value("length", FinishReason::length);
  py::class_<Engine>(m, "Engine", "See csrc/generation/engine.h")
      .def(py::init([](std::shared_ptr<ModelRunner> runner, std::int64_t max_batch_size,
                       std::int64_t prefill_chunk_tokens, std::int64_t max_model_len, std::int64_t max_cache_bytes,
                       bool with_entropy) {
             const EngineConfig config{
                 {max_batch_size, prefill_chunk_tokens}, max_model_len, max_cache_bytes, with_entropy};
             return std::make_unique<Engine>(std::move(runner), config, nullptr);
           }),
           py::arg("model_runner"), py::kw_only(), py::arg("max_batch_size"), py::arg("prefill_chunk_tokens"),
           py::arg("max_model_len") = 0, py::arg("max_cache_bytes") = std::int64_t{4} << 30,
           py::arg("with_entropy") = false, py::keep_alive<1, 2>())  // a Python model runner must outlive the engine
      .def(
          "set_token_bytes",
          [](Engine& self, const std::vector<std::string>& table) {
            self.set_token_bytes(std::make_shared<const TokenBytes>(table));
          },
          py::arg("token_bytes"))
      .def("set_max_cache_bytes", &Engine::set_max_cache_bytes, py::arg("max_cache_bytes"))
      .def("generate", &generate, py::arg("prompt_ids"), py::arg("prompt_offsets"), py::arg("requests"),
           py::arg("on_finished") = py::none(), py::arg("pause_after") = 0, py::arg("keep_cache") = false)
      .def("resume", &resume, py::arg("on_finished") = py::none())
      .def_property_readonly("paused", &Engine::paused)
      .def("release_cache", &Engine::release_cache, release_gil())
      .def_property_readonly("cache_blocks", &Engine::cache_blocks)
      .def_property_readonly("metrics", [](const Engine& self) { return metrics_dict(self.metrics()); })
      .def("reset_metrics", &Engine::reset_metrics);
}

}  // namespace

void bind_generation(py::module_& m) {
  bind_sampling(m);
  bind_model_runner(m);
  bind_engine(m);
}

}  // namespace nemo_rl::bindings
