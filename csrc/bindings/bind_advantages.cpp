#include "bindings/module.h"
#include "ops/advantages.h"
#include "ops/clipped_pg_loss.h"

namespace nemo_rl::bindings {

namespace {

using OptTensor = std::optional<at::Tensor>;

at::Tensor or_undefined(const OptTensor& t) { return t ? *t : at::Tensor(); }

void bind_groups(py::module_& m) {
  m.def("group_ids_from_prompts", &ops::group_ids_from_prompts, py::arg("prompts"), release_gil());
  m.def(
      "group_baseline",
      [](const at::Tensor& rewards, const at::Tensor& group_ids, const OptTensor& valid_mask, bool leave_one_out,
         const OptTensor& std_rewards) {
        const auto r =
            ops::group_baseline(rewards, group_ids, or_undefined(valid_mask), leave_one_out, or_undefined(std_rewards));
        return std::make_tuple(r.baseline, r.std);
      },
      py::arg("rewards"), py::arg("group_ids"), py::arg("valid_mask"), py::arg("leave_one_out"), py::arg("std_rewards"),
      release_gil());
  m.def("grpo_advantages", &ops::grpo_advantages, py::arg("rewards"), py::arg("baseline"), py::arg("std"),
        py::arg("normalize"), release_gil());
  m.def("gdpo_advantages", &ops::gdpo_advantages, py::arg("components"), py::arg("weights"), release_gil());
}

void bind_token_advantages(py::module_& m) {
  m.def(
      "reinforce_plus_plus",
      [](const at::Tensor& advantages, const at::Tensor& mask, const OptTensor& logprobs, const OptTensor& reference,
         double kl_coef, const std::string& kl_type, const OptTensor& offsets) {
        const auto r = ops::reinforce_plus_plus(advantages, mask, or_undefined(logprobs), or_undefined(reference),
                                                kl_coef, ops::parse_kl_estimator(kl_type), or_undefined(offsets));
        return std::make_tuple(r.advantages, r.degenerate);
      },
      py::arg("advantages"), py::arg("mask"), py::arg("logprobs"), py::arg("reference"), py::arg("kl_coef"),
      py::arg("kl_type"), py::arg("offsets") = py::none(), release_gil());
  m.def(
      "raw_reward",
      [](const at::Tensor& rewards, const at::Tensor& mask, bool normalize, const OptTensor& offsets) {
        const auto r = ops::raw_reward(rewards, mask, normalize, or_undefined(offsets));
        return std::make_tuple(r.advantages, r.degenerate);
      },
      py::arg("rewards"), py::arg("mask"), py::arg("normalize"), py::arg("offsets") = py::none(), release_gil());
  m.def(
      "gae",
      [](const at::Tensor& rewards, const at::Tensor& values, const at::Tensor& mask, const OptTensor& logprobs,
         const OptTensor& reference, double gamma, double lambda, double lambda_value, bool decoupled, double alpha,
         double kl_coef, const std::string& kl_type, bool normalize, const OptTensor& offsets) {
        ops::GaeConfig c;
        c.gamma = gamma;
        c.lambda = lambda;
        c.lambda_value = lambda_value;
        c.decoupled = decoupled;
        c.length_adaptive_alpha = alpha;
        c.kl_coef = kl_coef;
        c.kl_type = ops::parse_kl_estimator(kl_type);
        const auto r = ops::gae(rewards, values, mask, or_undefined(logprobs), or_undefined(reference), c, normalize,
                                or_undefined(offsets));
        return std::make_tuple(r.advantages, r.returns, r.degenerate);
      },
      py::arg("rewards"), py::arg("values"), py::arg("mask"), py::arg("logprobs"), py::arg("reference"),
      py::arg("gamma"), py::arg("lambda_"), py::arg("lambda_value"), py::arg("decoupled"),
      py::arg("length_adaptive_alpha"), py::arg("kl_coef"), py::arg("kl_type"), py::arg("normalize"),
      py::arg("offsets") = py::none(), release_gil());
}

}  // namespace

void bind_advantages(py::module_& m) {
  bind_groups(m);
  bind_token_advantages(m);
}

}  // namespace nemo_rl::bindings
