#include "bindings/module.h"
#include "ops/clipped_pg_loss.h"
#include "ops/value_loss.h"
#include "trainer/token_loss.h"

namespace nemo_rl::bindings {

namespace {

using OptTensor = std::optional<at::Tensor>;

at::Tensor or_undefined(const OptTensor& t) { return t ? *t : at::Tensor(); }

ops::ClippedPGInputs clipped_pg_inputs(const at::Tensor& advantages, const OptTensor& prev,
                                       const at::Tensor& generation, const OptTensor& reference,
                                       const at::Tensor& token_mask, const at::Tensor& sample_mask,
                                       const OptTensor& penalty, const OptTensor& rewards, const OptTensor& toks,
                                       const OptTensor& seqs, const OptTensor& positive_toks) {
  ops::ClippedPGInputs in;
  in.advantages = advantages;
  in.prev_logprobs = or_undefined(prev);
  in.generation_logprobs = generation;
  in.reference_policy_logprobs = or_undefined(reference);
  in.token_mask = token_mask;
  in.sample_mask = sample_mask;
  in.kl_cov_penalty = or_undefined(penalty);
  in.rewards = or_undefined(rewards);
  in.global_valid_toks = or_undefined(toks);
  in.global_valid_seqs = or_undefined(seqs);
  in.global_valid_positive_toks = or_undefined(positive_toks);
  return in;
}

void bind_token_loss(py::module_& m) {
  using trainer::TokenLoss;
  py::class_<TokenLoss>(m, "TokenLoss", "See csrc/trainer/token_loss.h")
      .def(py::init([](const at::Tensor& advantages, const OptTensor& prev, const at::Tensor& generation,
                       const OptTensor& reference, const at::Tensor& token_mask, const at::Tensor& sample_mask,
                       const OptTensor& penalty, const OptTensor& rewards, const OptTensor& toks, const OptTensor& seqs,
                       const OptTensor& positive_toks, const ops::ClippedPGConfig& config) {
             return TokenLoss{clipped_pg_inputs(advantages, prev, generation, reference, token_mask, sample_mask,
                                                penalty, rewards, toks, seqs, positive_toks),
                              config};
           }),
           py::arg("advantages"), py::arg("prev_logprobs"), py::arg("generation_logprobs"),
           py::arg("reference_policy_logprobs"), py::arg("token_mask"), py::arg("sample_mask"),
           py::arg("kl_cov_penalty"), py::arg("rewards"), py::arg("global_valid_toks"), py::arg("global_valid_seqs"),
           py::arg("global_valid_positive_toks"), py::arg("config"))
      .def_static("separable", &TokenLoss::separable, py::arg("config"));
}

void bind_clipped_pg_loss(py::module_& m) {
  using C = ops::ClippedPGConfig;
  py::class_<C>(m, "ClippedPGConfig", "Settings of clipped_pg_loss; see nemo_rl_cpp.ops.ClippedPGConfig")
      .def(py::init<>())
      .def_property(
          "ratio_mode", [](const C& c) { return static_cast<int>(c.ratio_mode); },
          [](C& c, const std::string& v) { c.ratio_mode = ops::parse_ratio_mode(v); })
      .def_property(
          "importance_sampling", [](const C& c) { return static_cast<int>(c.importance_sampling); },
          [](C& c, const std::string& v) { c.importance_sampling = ops::parse_importance_sampling(v); })
      .def_property(
          "importance_level", [](const C& c) { return static_cast<int>(c.importance_level); },
          [](C& c, const std::string& v) { c.importance_level = ops::parse_importance_level(v); })
      .def_property(
          "kl_type", [](const C& c) { return static_cast<int>(c.kl_type); },
          [](C& c, const std::string& v) { c.kl_type = ops::parse_kl_estimator(v); })
      .def_readwrite("token_level_loss", &C::token_level_loss)
      .def_readwrite("fixed_length", &C::fixed_length)
      .def_readwrite("sequence_level_ratios", &C::sequence_level_ratios)
      .def_readwrite("ratio_clip_min", &C::ratio_clip_min)
      .def_readwrite("ratio_clip_max", &C::ratio_clip_max)
      .def_readwrite("dual_clip", &C::dual_clip)
      .def_readwrite("ratio_clip_c", &C::ratio_clip_c)
      .def_readwrite("kl_penalty", &C::kl_penalty)
      .def_readwrite("kl_input_clamp", &C::kl_input_clamp)
      .def_readwrite("kl_output_clamp", &C::kl_output_clamp)
      .def_readwrite("use_on_policy_kl_approximation", &C::use_on_policy_kl_approximation)
      .def_readwrite("importance_min", &C::importance_min)
      .def_readwrite("importance_max", &C::importance_max)
      .def_readwrite("positive_nll_weight", &C::positive_nll_weight)
      .def_readwrite("sapo_temperature_pos", &C::sapo_temperature_pos)
      .def_readwrite("sapo_temperature_neg", &C::sapo_temperature_neg)
      .def_readwrite("dro_beta", &C::dro_beta)
      .def_readwrite("vespo_k_pos", &C::vespo_k_pos)
      .def_readwrite("vespo_lambda_pos", &C::vespo_lambda_pos)
      .def_readwrite("vespo_k_neg", &C::vespo_k_neg)
      .def_readwrite("vespo_lambda_neg", &C::vespo_lambda_neg);

  m.def(
      "clipped_pg_loss",
      [](const at::Tensor& curr, const at::Tensor& advantages, const OptTensor& prev, const at::Tensor& generation,
         const OptTensor& reference, const at::Tensor& token_mask, const at::Tensor& sample_mask,
         const OptTensor& penalty, const OptTensor& unfiltered, const OptTensor& rewards, const OptTensor& toks,
         const OptTensor& seqs, const OptTensor& positive_toks, const C& config) {
        auto in = clipped_pg_inputs(advantages, prev, generation, reference, token_mask, sample_mask, penalty, rewards,
                                    toks, seqs, positive_toks);
        in.curr_logprobs = curr;
        in.curr_logprobs_unfiltered = or_undefined(unfiltered);
        ops::ClippedPGResult r;
        {
          py::gil_scoped_release release;
          r = ops::clipped_pg_loss(in, config);
        }
        OptTensor grad_unfiltered;
        if (r.grad_unfiltered.defined()) grad_unfiltered = r.grad_unfiltered;
        return std::make_tuple(r.loss, r.grad_logprobs, grad_unfiltered, r.metrics);
      },
      py::arg("curr_logprobs"), py::arg("advantages"), py::arg("prev_logprobs"), py::arg("generation_logprobs"),
      py::arg("reference_policy_logprobs"), py::arg("token_mask"), py::arg("sample_mask"), py::arg("kl_cov_penalty"),
      py::arg("curr_logprobs_unfiltered"), py::arg("rewards"), py::arg("global_valid_toks"),
      py::arg("global_valid_seqs"), py::arg("global_valid_positive_toks"), py::arg("config"));
  m.def("clipped_pg_metric_names", &ops::clipped_pg_metric_names);
}

void bind_value_loss(py::module_& m) {
  m.def(
      "mse_value_loss",
      [](const at::Tensor& values, const at::Tensor& returns, const OptTensor& old_values, const at::Tensor& token_mask,
         const at::Tensor& sample_mask, const OptTensor& toks, double scale, double cliprange) {
        const auto r = ops::mse_value_loss(values, returns, or_undefined(old_values), token_mask, sample_mask,
                                           or_undefined(toks), {scale, cliprange});
        return std::make_tuple(r.loss, r.grad_values, r.metrics);
      },
      py::arg("values"), py::arg("returns"), py::arg("old_values"), py::arg("token_mask"), py::arg("sample_mask"),
      py::arg("global_valid_toks"), py::arg("scale"), py::arg("cliprange"), release_gil());
  m.def("value_loss_metric_names", &ops::value_loss_metric_names);
}

}  // namespace

void bind_losses(py::module_& m) {
  bind_clipped_pg_loss(m);
  bind_token_loss(m);
  bind_value_loss(m);
}

}  // namespace nemo_rl::bindings
