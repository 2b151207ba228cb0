// Decoder, trainer and the model runner: handles that Python orchestrates.
#include <algorithm>
#include <numeric>

#include "bindings/model_config.h"
#include "bindings/module.h"
#include "common/check.h"
#include "runtime/tensor.h"
#include "trainer/trainer.h"

namespace nemo_rl::bindings {
namespace {

void bind_decoder_model(py::module_& m) {
  using model::DecoderModel;
  py::class_<DecoderModel, std::shared_ptr<DecoderModel>>(m, "DecoderModel",
                                                          "Weights of one model; see csrc/model/decoder_model.h")
      .def(py::init([](const py::dict& config, at::ScalarType dtype, bool trainable, const std::string& device,
                       std::shared_ptr<distributed::Communicator> peers) {
             return std::make_shared<DecoderModel>(config_from(config), dtype, trainable, at::Device(device),
                                                   std::move(peers));
           }),
           py::arg("config"), py::arg("dtype"), py::arg("trainable"), py::arg("device") = "cpu",
           py::arg("peers") = nullptr)
      .def_property_readonly("device", [](const DecoderModel& self) { return self.device().str(); })
      .def_property_readonly("layout",
                             [](const DecoderModel& self) {
                               py::list specs;
                               for (const auto& s : self.layout().specs)
                                 specs.append(py::make_tuple(s.name, s.shape, s.offset));
                               return specs;
                             })
      .def_property_readonly(
          "blocks", [](const DecoderModel& self) { return self.layout().blocks; },
          "Every tensor outside the flat buffer: quantised matrices (csrc/ops/weight_blocks.h) and buffers")
      .def("blocks_of", &DecoderModel::blocks, py::arg("spec"))
      .def_property_readonly(
          "routers",
          [](DecoderModel& self) {
            std::vector<std::pair<at::Tensor, at::Tensor>> all;
            for (const auto& layer : self.decoder().parameters().layers)
              if (layer.choice_bias.defined()) all.emplace_back(layer.choice_bias, layer.load);
            return all;
          },
          "(bias, load) of each sigmoid router; the load counts the tokens of each expert in backward passes")
      .def_property_readonly("specs", [](const DecoderModel& self) { return self.layout().specs; })
      .def(
          "adapt",
          [](DecoderModel& self, std::int64_t dim, double alpha, std::vector<std::string> targets, bool merge,
             bool use_rslora) { self.adapt({dim, alpha, std::move(targets), merge, use_rslora}); },
          py::arg("dim"), py::arg("alpha"), py::arg("targets"), py::arg("merge") = true, py::arg("use_rslora") = false,
          release_gil())
      .def("freeze_routers", &DecoderModel::freeze_routers)
      .def("base", &DecoderModel::base)
      .def("merged", &DecoderModel::merged, release_gil())
      .def_property_readonly("trained_layout", [](const DecoderModel& self) { return self.trained_layout(); })
      .def_property_readonly("masters", [](const DecoderModel& self) { return self.masters(); })
      .def_property_readonly("remainders", [](const DecoderModel& self) { return self.remainders(); })
      .def_property_readonly("masters_begin", &DecoderModel::masters_begin)
      .def_property_readonly("compute", [](const DecoderModel& self) { return self.compute(); })
      .def("masters_changed", &DecoderModel::masters_changed, release_gil())
      .def("digest", &DecoderModel::digest, release_gil())
      .def("workspace_bytes", [](DecoderModel& self) { return self.workspace().bytes(); })
      .def("release_workspace", [](DecoderModel& self) { self.workspace().clear(); })
      .def_property_readonly("packed_bytes", &DecoderModel::packed_bytes)
      .def(
          "keep_activations",
          [](DecoderModel& self, std::int64_t max_bytes) {
            NRL_CHECK_ARG(self.device().is_cpu() || max_bytes == 0,
                          "activations are kept for training on the CPU only, not on ", self.device().str());
            self.kept().set_max_bytes(max_bytes);
          },
          py::arg("max_bytes"),
          "Memory for what generation computes, so that the first update needs no forward; 0: none")
      .def_property_readonly("kept_bytes_per_token", [](DecoderModel& self) { return self.kept().bytes_per_token(); })
      .def_property_readonly("max_kept_bytes", [](DecoderModel& self) { return self.kept().max_bytes(); })
      .def_property_readonly("kept_tokens", [](DecoderModel& self) { return self.kept().tokens(); })
      .def_property_readonly("kept_bytes", [](DecoderModel& self) { return self.kept().bytes(); });
}

void bind_trainer(py::module_& m) {
  using namespace trainer;
  py::class_<RowBatch>(m, "RowBatch", "See csrc/trainer/packed_batch.h")
      .def(py::init([](at::Tensor token_ids, at::Tensor starts, at::Tensor lengths, at::Tensor token_mask,
                       at::Tensor group_ids, std::optional<at::Tensor> targets) {
             return RowBatch{std::move(token_ids),  std::move(starts),    std::move(lengths),
                             std::move(token_mask), std::move(group_ids), targets.value_or(at::Tensor())};
           }),
           py::arg("token_ids"), py::arg("starts"), py::arg("lengths"), py::arg("token_mask"), py::arg("group_ids"),
           py::arg("targets") = py::none());
  m.def(
      "prompt_units",
      [](const RowBatch& batch, const std::vector<std::int64_t>& samples, std::int64_t max_tokens, bool share_prefix) {
        auto units = prompt_units(batch, samples, max_tokens, share_prefix);
        return std::pair{std::move(units.rows), std::move(units.tokens)};
      },
      py::arg("batch"), py::arg("samples"), py::arg("max_tokens"), py::arg("share_prefix"),
      "(rows of each unit, tokens that it computes): see csrc/trainer/packed_batch.h");
  m.def("packed_tokens", &packed_tokens, py::arg("batch"), py::arg("samples"), py::arg("share_prefix"));
  py::class_<OptimizerStep>(m, "OptimizerStep")
      .def_readonly("grad_norm", &OptimizerStep::grad_norm)
      .def_readonly("finite", &OptimizerStep::finite);
  py::class_<Trainer>(m, "Trainer", "See csrc/trainer/trainer.h")
      .def(py::init([](std::shared_ptr<model::DecoderModel> model, std::shared_ptr<distributed::Communicator> ranks,
                       std::shared_ptr<distributed::Communicator> beside, bool shard_gradients,
                       std::optional<at::ScalarType> exp_avg, std::optional<at::ScalarType> exp_avg_sq,
                       bool store_param_remainders) {
             return std::make_unique<Trainer>(std::move(model),
                                              TrainedTogether{std::move(ranks), std::move(beside), shard_gradients},
                                              StateTypes{exp_avg, exp_avg_sq, store_param_remainders});
           }),
           py::arg("model"), py::arg("ranks") = nullptr, py::arg("beside") = nullptr,
           py::arg("shard_gradients") = false, py::arg("exp_avg_dtype") = py::none(),
           py::arg("exp_avg_sq_dtype") = py::none(), py::arg("store_param_remainders") = false)
      .def("begin_sum", &Trainer::begin_sum)
      .def("abandon_sum", &Trainer::abandon_sum, release_gil())
      .def("end_block", &Trainer::end_block, release_gil())
      .def_property_readonly("shard",
                             [](const Trainer& self) { return py::make_tuple(self.shard().begin, self.shard().end); })
      .def(
          "forward",
          [](Trainer& self, const RowBatch& batch, const std::vector<std::int64_t>& samples, double temperature,
             bool share_prefix, bool keep, bool checkpoint, const at::Tensor& out, float top_p, std::int64_t top_k,
             const std::optional<at::Tensor>& unfiltered, const std::optional<at::Tensor>& entropy) {
            self.forward(batch, samples, {temperature, top_p, top_k}, {share_prefix, keep, checkpoint},
                         {out, unfiltered.value_or(at::Tensor()), entropy.value_or(at::Tensor())});
          },
          py::arg("batch"), py::arg("samples"), py::arg("temperature"), py::arg("share_prefix"), py::arg("keep"),
          py::arg("checkpoint"), py::arg("out"), py::arg("top_p") = 1.0f, py::arg("top_k") = 0,
          py::arg("unfiltered") = py::none(), py::arg("entropy") = py::none(), release_gil())
      .def(
          "forward_with_loss",
          [](Trainer& self, const RowBatch& batch, const std::vector<std::int64_t>& samples, double temperature,
             bool share_prefix, bool checkpoint, const at::Tensor& out, const TokenLoss& loss) {
            self.forward(batch, samples, {temperature, 1.0f, 0}, {share_prefix, true, checkpoint}, out, loss);
          },
          py::arg("batch"), py::arg("samples"), py::arg("temperature"), py::arg("share_prefix"), py::arg("checkpoint"),
          py::arg("out"), py::arg("loss"), release_gil())
      .def(
          "takes_token_loss",
          [](const Trainer& self, double temperature, float top_p, std::int64_t top_k) {
            return self.takes_token_loss({temperature, top_p, top_k});
          },
          py::arg("temperature"), py::arg("top_p"), py::arg("top_k"))
      .def(
          "likeliest",
          [](Trainer& self, const RowBatch& batch, const std::vector<std::int64_t>& samples, double temperature,
             bool share_prefix, const at::Tensor& ids,
             const at::Tensor& logprobs) { self.likeliest(batch, samples, temperature, share_prefix, ids, logprobs); },
          py::arg("batch"), py::arg("samples"), py::arg("temperature"), py::arg("share_prefix"), py::arg("ids"),
          py::arg("logprobs"), release_gil())
      .def("logits", &Trainer::logits, py::arg("token_ids"), release_gil())
      .def(
          "backward",
          [](Trainer& self, const at::Tensor& d_out, const std::optional<at::Tensor>& d_unfiltered,
             const std::optional<at::Tensor>& d_entropy) {
            self.backward({d_out, d_unfiltered.value_or(at::Tensor()), d_entropy.value_or(at::Tensor())});
          },
          py::arg("d_out"), py::arg("d_unfiltered") = py::none(), py::arg("d_entropy") = py::none(), release_gil())
      .def("finish_backward", py::overload_cast<>(&Trainer::backward), release_gil())
      .def(
          "move_kept",
          [](Trainer& self, const RowBatch& batch,
             const std::vector<std::tuple<std::vector<std::int64_t>, int, int>>& moves) {
            std::vector<trainer::KeptMove> all;
            for (const auto& [rows, from, to] : moves) all.push_back({rows, from, to});
            self.move_kept(batch, all);
          },
          py::arg("batch"), py::arg("moves"), release_gil())
      .def("balance_experts", &Trainer::balance_experts, py::arg("coefficient"))
      .def("take_balance_loss", &Trainer::take_balance_loss)
      .def("zero_grad", &Trainer::zero_grad, release_gil())
      .def(
          "step",
          [](Trainer& self, double lr, double beta1, double beta2, double eps, double weight_decay,
             double max_grad_norm) { return self.step({lr, beta1, beta2, eps, weight_decay}, max_grad_norm); },
          py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"),
          py::arg("max_grad_norm"), release_gil())
      .def("grads_are_finite", &Trainer::grads_are_finite, release_gil())
      .def("grad_norm", &Trainer::grad_norm, release_gil())
      .def_property_readonly("reused_tokens", &Trainer::reused_tokens)
      .def_property_readonly("out_dtype", [](Trainer& self) { return self.model().decoder().accumulate_dtype(); })
      .def_property_readonly("grads", [](Trainer& self) { return self.grads(); })
      .def_property_readonly("exp_avg", [](Trainer& self) { return self.exp_avg(); })
      .def_property_readonly("exp_avg_sq", [](Trainer& self) { return self.exp_avg_sq(); })
      .def_property("optimizer_steps", &Trainer::optimizer_steps, &Trainer::set_optimizer_steps);
}

/// How a slice of a model lies in its flat buffer.
void bind_layout(py::module_& m) {
  using model::ParameterSpec;
  py::class_<ParameterSpec>(m, "ParameterSpec", "See csrc/model/parameters.h")
      .def_readonly("name", &ParameterSpec::name)
      .def_readonly("shape", &ParameterSpec::shape)
      .def_readonly("offset", &ParameterSpec::offset)
      .def_readonly("whole", &ParameterSpec::whole)
      .def_readonly("split", &ParameterSpec::split)
      .def_readonly("begin", &ParameterSpec::begin);
  py::class_<model::BlockSpec>(m, "BlockSpec", "See csrc/model/parameters.h")
      .def_readonly("name", &model::BlockSpec::name)
      .def_readonly("shape", &model::BlockSpec::shape)
      .def_readonly("begin", &model::BlockSpec::begin)
      .def_readonly("before", &model::BlockSpec::before);
  py::class_<model::ParameterLayout>(m, "ParameterLayout")
      .def(py::init([](const py::dict& config, int rank, int size) {
             return model::ParameterLayout(config_from(config).sliced({rank, size}));
           }),
           py::arg("config"), py::arg("rank") = 0, py::arg("size") = 1)
      .def(py::init([](const py::dict& config, std::int64_t dim, std::vector<std::string> targets, int rank, int size) {
             return model::ParameterLayout(config_from(config).sliced({rank, size}), {dim, 0.0, std::move(targets)});
           }),
           py::arg("config"), py::arg("dim"), py::arg("targets"), py::arg("rank") = 0, py::arg("size") = 1)
      .def_readonly("specs", &model::ParameterLayout::specs)
      .def_readonly("total", &model::ParameterLayout::total);
}

/// Rows scored one by one: for tests of csrc/model/filtered_row.h.
template <class A>
void score_filtered(const at::Tensor& logits, const at::Tensor& token_ids, const at::Tensor& g,
                    const model::TokenScoring& scoring, const at::Tensor& logprobs, const at::Tensor& d_logits) {
  const std::int64_t V = logits.size(1);
  for (std::int64_t r = 0; r < logits.size(0); ++r) {
    const A* row = logits.const_data_ptr<A>() + r * V;
    const auto kept = model::filtered_row(row, V, scoring);
    const std::int64_t token = token_ids.const_data_ptr<std::int64_t>()[r];
    logprobs.data_ptr<A>()[r] = kept.logprob(token, row[token]);
    kept.add_gradient(&token, g.const_data_ptr<A>() + r, 1, d_logits.data_ptr<A>() + r * V);
  }
}

void bind_filtered_row(py::module_& m) {
  m.def(
      "filtered_logprobs",
      [](const at::Tensor& logits, const at::Tensor& token_ids, const at::Tensor& g, double temperature, float top_p,
         std::int64_t top_k) {
        NRL_CHECK_ARG(logits.dim() == 2 && logits.is_contiguous() && token_ids.sizes() == g.sizes() &&
                          g.size(0) == logits.size(0) && token_ids.scalar_type() == at::kLong &&
                          g.scalar_type() == logits.scalar_type(),
                      "filtered_logprobs: expected logits [R, V], token_ids [R] int64 and g [R]");
        const auto logprobs = at::empty_like(g), d_logits = at::zeros_like(logits);
        const model::TokenScoring scoring{temperature, top_p, top_k};
        if (logits.scalar_type() == at::kDouble) {
          score_filtered<double>(logits, token_ids, g, scoring, logprobs, d_logits);
        } else {
          score_filtered<float>(logits, token_ids, g, scoring, logprobs, d_logits);
        }
        return py::make_tuple(logprobs, d_logits);
      },
      py::arg("logits"), py::arg("token_ids"), py::arg("g"), py::arg("temperature"), py::arg("top_p"), py::arg("top_k"),
      "(logprobs [R], d sum(g logprobs) / d logits [R, V]) of the tokens under top-k and top-p, as training scores "
      "them");
}

/// The head by itself: one target a row.
class SingleTargets {
 public:
  void forward(const at::Tensor& x, const at::Tensor& w, const at::Tensor& targets, double temperature,
               const at::Tensor& logprobs, const at::Tensor& entropy) {
    sums_.resize(static_cast<std::size_t>(x.size(0)));
    head_.forward(x, w, wanted(x, targets), {temperature, 1.0f, 0}, {logprobs, {}}, sums_.data(), entropy);
  }
  void backward(const at::Tensor& x, const at::Tensor& w, const at::Tensor& targets, const at::Tensor& d_logprobs,
                double temperature, const at::Tensor& d_x, const at::Tensor& d_w,
                const std::optional<at::Tensor>& d_entropy) {
    NRL_CHECK_ARG(static_cast<std::int64_t>(sums_.size()) == x.size(0), "backward without a forward of these rows");
    head_.backward(x, w, wanted(x, targets), {temperature, 1.0f, 0}, {d_logprobs, {}}, sums_.data(), d_x, d_w,
                   d_entropy.value_or(at::Tensor()));
  }
  /// The loss here is one whose gradient is d_logprobs whatever the log-probabilities.
  void forward_backward(const at::Tensor& x, const at::Tensor& w, const at::Tensor& targets,
                        const at::Tensor& d_logprobs, double temperature, const at::Tensor& logprobs,
                        const at::Tensor& d_x, const at::Tensor& d_w) {
    const auto loss = [&](std::int64_t begin, std::int64_t end, const float*, float* g) {
      std::copy_n(d_logprobs.const_data_ptr<float>() + begin, end - begin, g);
    };
    head_.forward_backward(x, w, wanted(x, targets), {temperature, 1.0f, 0}, logprobs, loss, d_x, d_w);
  }

  void likeliest(const at::Tensor& x, const at::Tensor& w, double temperature, const at::Tensor& ids,
                 const at::Tensor& logprobs) {
    head_.likeliest(x, w, temperature, ids, logprobs);
  }

 private:
  model::RowTargets wanted(const at::Tensor& x, const at::Tensor& targets) {
    NRL_CHECK_ARG(targets.is_contiguous() && targets.scalar_type() == at::kLong && targets.numel() == x.size(0),
                  "targets: expected int64 [", x.size(0), "]");
    first_.resize(static_cast<std::size_t>(x.size(0)) + 1);
    std::iota(first_.begin(), first_.end(), 0);
    return {first_.data(), targets.const_data_ptr<std::int64_t>()};
  }
  model::VocabularyHead head_;
  std::vector<model::RowSums> sums_;
  std::vector<std::int64_t> first_;
};

void bind_vocabulary_head(py::module_& m) {
  py::class_<SingleTargets>(m, "VocabularyHead", "See csrc/model/vocabulary_head.h; one target a row")
      .def(py::init())
      .def("forward", &SingleTargets::forward, py::arg("x"), py::arg("w"), py::arg("targets"), py::arg("temperature"),
           py::arg("logprobs"), py::arg("entropy"), release_gil())
      .def("backward", &SingleTargets::backward, py::arg("x"), py::arg("w"), py::arg("targets"), py::arg("d_logprobs"),
           py::arg("temperature"), py::arg("d_x"), py::arg("d_w"), py::arg("d_entropy") = py::none(), release_gil())
      .def("likeliest", &SingleTargets::likeliest, py::arg("x"), py::arg("w"), py::arg("temperature"), py::arg("ids"),
           py::arg("logprobs"), release_gil())
      .def("forward_backward", &SingleTargets::forward_backward, py::arg("x"), py::arg("w"), py::arg("targets"),
           py::arg("d_logprobs"), py::arg("temperature"), py::arg("logprobs"), py::arg("d_x"), py::arg("d_w"),
           release_gil());
}

}  // namespace

void bind_model(py::module_& m) {
  bind_layout(m);
  bind_decoder_model(m);
  bind_trainer(m);
  bind_filtered_row(m);
  bind_vocabulary_head(m);
}

}  // namespace nemo_rl::bindings
