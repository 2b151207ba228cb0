"""The interface of losses, and losses computed with the native ops: for policies (PPO, GRPO, DAPO, GSPO, CISPO,
REINFORCE and on-policy losses with KL), for critics, and for distillation."""

from __future__ import annotations

import enum
from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from nemo_rl_cpp import ops
from nemo_rl_cpp._native import C
from nemo_rl_cpp.config.base import Settings, as_model
from nemo_rl_cpp.config.distillation import DistillationLossConfig
from nemo_rl_cpp.config.errors import ConfigError, Report
from nemo_rl_cpp.config.loss import OWN_TERMS, TRUNCATIONS, ClippedPGLossConfig, MseValueLossConfig, check_policy_loss
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch

Count = Tensor | float | None  # of samples or tokens in the global batch; None: in the data


class LossType(enum.Enum):
    """The number by which the sum of a loss is divided: that of the valid tokens, or of the valid sequences, in the
    global batch."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossInputType(enum.Enum):
    """The model output that a loss takes: `logits`, or `next_token_logprobs` [B, S-1]."""

    LOGIT = "logit"
    LOGPROB = "logprob"


class LossFunction(Protocol):
    """The base class of losses; derive custom losses from it. A loss is called with four keyword arguments:
    `next_token_logprobs` (the model's output), `data` (the micro-batch), `global_valid_seqs` and `global_valid_toks`
    (the numbers of valid samples and tokens in the global batch of all ranks). It returns (scalar, metrics).

    The results of micro-batches and ranks are added, never averaged, so a loss must divide by these numbers."""

    loss_type: LossType = LossType.TOKEN_LEVEL
    input_type: LossInputType = LossInputType.LOGPROB

    @abstractmethod
    def __call__(
        self, data: Mapping[str, Tensor], global_valid_seqs: Tensor, global_valid_toks: Tensor, **kwargs: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """Return (loss, metrics) of the samples of one micro-batch, padded to the longest sample.

        `next_token_logprobs` [b, S-1] requires grad; entry t is the log-probability of token t+1. `data` has
        `token_mask` and `advantages` [b, S], `sample_mask` [b], `prev_logprobs` and `generation_logprobs` [b, S], and
        with a KL weight `reference_policy_logprobs` [b, S]. The counts are those of the whole global batch."""


class NativeGradient(torch.autograd.Function):
    """An autograd function that inserts a loss with precomputed gradients into the graph."""

    @staticmethod
    def forward(ctx, loss, *inputs_and_grads):
        half = len(inputs_and_grads) // 2
        ctx.grads = inputs_and_grads[half:]
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        scaled = [None if g is None else g * grad.to(g.dtype) for g in ctx.grads]
        return (None, *scaled, *(None for _ in ctx.grads))


_UNCHANGED = (
    "ratio_clip_min", "ratio_clip_max", "ratio_clip_c", "use_on_policy_kl_approximation", "sapo_temperature_pos",
    "sapo_temperature_neg", "dro_beta", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg",
)  # fmt: skip
"""The keys of `loss_fn` that the native op takes under the same names."""


class ClippedPGLossFn:
    """Clipped policy-gradient loss with KL regularisation (NeMo RL's class of this name).

        L = reduce(max(-A R, -A clip(R))) + beta reduce(KL) + mu NLL(correct samples)

    A is the advantage, R the probability ratio of new to old policy, beta the KL weight, mu
    `positive_example_nll_weight`, and reduce the mean over tokens or sequences. A call returns (loss, metrics). The
    loss has a gradient with respect to `next_token_logprobs` if they require grad. `native` returns loss, gradient and
    metrics without autograd. The constructor raises ConfigError if settings contradict each other."""

    input_type = LossInputType.LOGPROB

    def __init__(self, cfg: ClippedPGLossConfig):
        self.cfg = cfg = as_model(cfg, ClippedPGLossConfig)
        report = Report({})
        check_policy_loss(cfg, report)
        if report.problems:
            raise ConfigError(report.problems)
        self.reference_policy_kl_penalty = 0 if cfg.use_kl_in_reward else cfg.reference_policy_kl_penalty
        self.loss_type = LossType.TOKEN_LEVEL if cfg.token_level_loss else LossType.SEQUENCE_LEVEL
        self.takes_candidates = cfg.score_centering_k is not None
        """Whether the loss needs `curr_candidates` and `candidate_old_logprobs` in the data."""
        self.takes_entropies = cfg.entropy_coef > 0
        """Whether the loss needs `curr_entropies`, the entropies of the current policy, in the data."""
        self._old_logprobs = "generation_logprobs" if cfg.bypass_mode else "prev_logprobs"

    def __getattr__(self, name: str) -> object:
        """Return the setting `name` of `cfg`, so that `loss.name` works as in NeMo RL."""
        if name == "cfg":  # a copy or unpickled object has no cfg yet
            raise AttributeError(name)
        return getattr(self.cfg, name)

    def __getstate__(self) -> dict[str, object]:
        """Return the attributes to pickle: all but `op_config`, which the unpickled loss computes again."""
        return {name: value for name, value in self.__dict__.items() if name != "op_config"}

    @cached_property
    def op_config(self) -> ops.ClippedPGConfig:
        """The settings of the loss in the form that the native op takes."""
        default = "full" if self.use_importance_sampling_correction else "none"
        kind, level = TRUNCATIONS.get(self.truncated_importance_sampling_type, (default, "token"))
        if self.name in OWN_TERMS:
            mode = self.name
        elif self.force_on_policy_ratio:
            mode = "on_policy"
        elif self.disable_ppo_ratio:
            mode = "reinforce"
        else:
            mode = "cispo" if self.use_cispo else "ppo"
        return ops.ClippedPGConfig(
            ratio_mode=mode,
            token_level_loss=self.loss_type is LossType.TOKEN_LEVEL,
            fixed_length=self._fixed_length(),
            sequence_level_ratios=self.sequence_level_importance_ratios,
            kl_penalty=float(self.reference_policy_kl_penalty),
            kl_type=self.reference_policy_kl_type,
            kl_input_clamp=self.kl_input_clamp_value,
            kl_output_clamp=self.kl_output_clamp_value,
            importance_sampling=kind,
            importance_level=level,
            importance_min=self.truncated_importance_sampling_ratio_min or 0.0,
            importance_max=self.truncated_importance_sampling_ratio or 0.0,
            positive_nll_weight=self.positive_example_nll_weight,
            **{name: getattr(self.cfg, name) for name in _UNCHANGED},
        )

    def _fixed_length(self) -> float:
        """Return the number by which the sum of a sequence's token losses is divided, according to `loss_agg_mode`; 0
        stands for the number of the sequence's trained tokens."""
        if self.loss_agg_mode == "seq-mean-token-sum":
            return 1.0
        if self.loss_agg_mode != "seq-mean-token-sum-norm":
            return 0.0
        if self.loss_scale_factor is None:
            raise ValueError("loss_fn.loss_agg_mode seq-mean-token-sum-norm needs loss_fn.loss_scale_factor")
        return self.loss_scale_factor

    def native(
        self, curr_logprobs: Tensor, data: Mapping[str, Tensor], global_valid_seqs: Count, global_valid_toks: Count,
        global_valid_positive_toks: Count = None,
    ) -> ops.PolicyLossResult:  # fmt: skip
        """Return the loss, its gradient with respect to `curr_logprobs` [B, S-1], metrics, and the first (sample,
        token) whose loss is not finite. The NLL term is divided by the number of valid tokens in samples with positive
        reward over the global batch: `global_valid_positive_toks`, or if None the entry of this name in `data`, or if
        there is none, the number of such tokens in `data`."""
        positive = global_valid_positive_toks
        if positive is None:
            positive = data.get("global_valid_positive_toks")
        prev = None if self.op_config.ratio_mode == "on_policy" else data[self._old_logprobs]
        counts = ops.LossCounts(global_valid_toks, global_valid_seqs, positive)
        result = ops.clipped_pg_loss(curr_logprobs.detach(), self._op_inputs(data, prev), counts, self.op_config)
        if self.takes_candidates:
            result = self._with_centered_scores(result, data, counts)
        return self._with_entropy_bonus(result, data, counts) if self.takes_entropies else result

    def _token_weights(self, data: Mapping[str, Tensor], counts: ops.LossCounts) -> Tensor:
        """Return [B, S-1]: the factor with which the loss of each token but a sample's first enters the total loss."""
        config, mask, samples = self.op_config, data["token_mask"][:, 1:].double(), data["sample_mask"].double()
        weights = mask * samples[:, None]
        if config.token_level_loss:
            toks = weights.sum() if counts.valid_toks is None else counts.valid_toks
            return weights / (float(toks) + 1e-8)
        seqs = samples.sum() if counts.valid_seqs is None else counts.valid_seqs
        length = config.fixed_length or mask.sum(1, keepdim=True) + 1e-8
        return weights / length / (float(seqs) + 1e-8)

    def _with_centered_scores(
        self, result: ops.PolicyLossResult, data: Mapping[str, Tensor], counts: ops.LossCounts
    ) -> ops.PolicyLossResult:
        """Return `result` with score centering (arXiv:2609.20807). The loss of a token is -A sg(w) log p, where w is 1
        (gpg) or the clipped p / q (cispo), and sg stops the gradient. Add A sum_v sg(q_v w_v) log p_v to this loss,
        where v runs over the vocabulary, so that the score has mean 0 under the old policy q.

        The sum takes the k most likely tokens of q. All other tokens together are assumed to have p's distribution,
        scaled to q's mass by a = (1 - sum q) / (1 - sum p), so their p / q is 1 / a. Let u be the value of w at this
        ratio. As sum_v p_v d(log p_v) = 0, the other tokens add -a u p_v to the coefficient of each of the k tokens."""
        x, q = data["curr_candidates"].double(), data["candidate_old_logprobs"][:, 1:].double().exp()
        p, weights = x.exp(), self._token_weights(data, counts)
        rest = 1 - p.sum(-1, keepdim=True)
        scale = torch.where(rest > 1e-6, (1 - q.sum(-1, keepdim=True)).clamp(min=0.0) / rest.clamp(min=1e-6), 0.0)
        if self.use_cispo:
            low, high = 1 - self.ratio_clip_min, 1 + self.ratio_clip_max
            own, others = q * (p / q).clamp(low, high), scale * scale.clamp(min=1e-12).reciprocal().clamp(low, high)
        else:
            own, others = q, scale
        grad = (weights * data["advantages"][:, 1:].double())[..., None] * (own - others * p)
        valid = (weights != 0)[..., None]
        grad = torch.where(valid, grad, 0.0)
        term = float(torch.where(valid, grad * x, 0.0).sum())
        metrics = {**result.metrics, "loss": result.metrics["loss"] + term}
        loss = (result.loss + term).to(result.loss.dtype)
        return result._replace(loss=loss, metrics=metrics, grad_candidates=grad.to(data["curr_candidates"].dtype))

    def _with_entropy_bonus(
        self, result: ops.PolicyLossResult, data: Mapping[str, Tensor], counts: ops.LossCounts
    ) -> ops.PolicyLossResult:
        """Return `result` with an entropy bonus: subtract `entropy_coef` times the mean of `data["curr_entropies"]` [B,
        S-1] from the loss. Tokens have the same weights in this mean as in the loss."""
        entropies, weights = data["curr_entropies"], self._token_weights(data, counts)
        bonus = torch.where(weights != 0, weights * entropies, 0.0).sum()
        metrics = {**result.metrics, "entropy": float(bonus)}
        metrics["loss"] -= self.entropy_coef * float(bonus)
        loss = (result.loss - self.entropy_coef * bonus).to(result.loss.dtype)
        grad = (-self.entropy_coef * weights).to(entropies.dtype)
        return result._replace(loss=loss, metrics=metrics, grad_entropy=grad)

    def _op_inputs(self, data: Mapping[str, Tensor], prev_logprobs: Tensor | None) -> ops.ClippedPGInputs:
        config = self.op_config
        with_kl = config.kl_penalty != 0
        advantages, generation = data["advantages"], data.get("generation_logprobs", prev_logprobs)
        if self.name == "nll":
            advantages = torch.ones_like(advantages)
        return ops.ClippedPGInputs(
            advantages=advantages,
            prev_logprobs=prev_logprobs,
            # supervised fine-tuning has no generation; its gradient does not depend on these log-probabilities
            generation_logprobs=torch.zeros_like(advantages) if generation is None else generation,
            reference_policy_logprobs=data["reference_policy_logprobs"] if with_kl else None,
            token_mask=data["token_mask"],
            sample_mask=data["sample_mask"],
            kl_cov_penalty=data["kl_cov_penalty"] if config.ratio_mode == "kl_cov" else None,
            rewards=data.get("rewards") if config.positive_nll_weight > 0 else None,
            curr_logprobs_unfiltered=data.get("curr_logprobs_unfiltered") if with_kl else None,
        )

    def token_loss(self, data: RaggedBatch, counts: ops.LossCounts) -> C.TokenLoss | None:
        """Return an object that computes the loss of `native` token by token, or None if the settings do not allow
        this. If `data` has no `prev_logprobs`, the current log-probabilities replace them."""
        if type(self).native is not ClippedPGLossFn.native or self.takes_entropies or self.takes_candidates:
            return None
        prev = None if self.op_config.ratio_mode == "on_policy" else data.tokens.get(self._old_logprobs)
        return ops.token_loss(self._op_inputs({**data.samples, **data.tokens}, prev), counts, self.op_config)

    def zero_gradient_rows(self, data: RaggedBatch) -> Tensor | None:
        """Return bool [B]: whether the gradient of a sample is 0 because its advantages are 0; None if other terms of
        the loss may have a gradient."""
        config, advantages = self.op_config, data.tokens.get("advantages")
        other_terms = config.kl_penalty != 0 or config.positive_nll_weight > 0 or self.takes_entropies
        if other_terms or config.ratio_mode == "dro" or advantages is None:
            return None
        learns = advantages != 0
        if config.ratio_mode == "kl_cov":
            learns = learns | (data.tokens["kl_cov_penalty"] != 0)
        return data.by_sample((learns & (data.tokens["token_mask"] != 0)).int()) == 0

    def __call__(
        self, next_token_logprobs: Tensor, data: Mapping[str, Tensor], global_valid_seqs: Tensor, global_valid_toks: Tensor,
        global_valid_positive_toks: Count = None,
    ) -> tuple[Tensor, dict[str, float]]:  # fmt: skip
        """Return (loss, metrics), differentiable in `next_token_logprobs` [B, S-1] and
        `data["curr_logprobs_unfiltered"]`."""
        x = ops.floating(next_token_logprobs)
        result = self.native(x, data, global_valid_seqs, global_valid_toks, global_valid_positive_toks)
        inputs, grads = [x], [result.grad_logprobs]
        if result.grad_unfiltered is not None:
            inputs.append(data["curr_logprobs_unfiltered"])
            grads.append(result.grad_unfiltered)
        return NativeGradient.apply(result.loss, *inputs, *grads), result.metrics


class MseValueLossFn:
    """Squared error of the critic's values, clipped around the old values (PPO) if `cliprange` is set. `data` has
    token_mask, returns and, with a cliprange, values [B, S], unshifted, and sample_mask [B]."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGIT

    def __init__(self, cfg: MseValueLossConfig):
        self.cfg = as_model(cfg, MseValueLossConfig)
        self.scale, self.cliprange = self.cfg.scale, self.cfg.cliprange

    def native(
        self, values: Tensor, data: Mapping[str, Tensor], global_valid_seqs: Count, global_valid_toks: Count
    ) -> ops.ValueLossResult:
        """Return the loss of one micro-batch, its gradient with respect to `values` [B, S], metrics, and the first
        (sample, token) whose loss is not finite."""
        inputs = {name: data[name] for name in ("returns", "token_mask", "sample_mask")}
        result = ops.mse_value_loss(
            values.detach(), **inputs, old_values=data["values"] if self.cliprange else None,
            global_valid_toks=global_valid_toks, scale=self.scale, cliprange=self.cliprange,
        )  # fmt: skip
        result.metrics["num_valid_samples"] = int(values.shape[0])
        return result

    def __call__(
        self, logits: Tensor, data: Mapping[str, Tensor], global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        values = ops.floating(logits.squeeze(-1) if logits.ndim > 2 and logits.shape[-1] == 1 else logits)
        result = self.native(values, data, global_valid_seqs, global_valid_toks)
        return NativeGradient.apply(result.loss, values, result.grad_values), result.metrics


# ---- distillation over the k most likely tokens of the teacher or of the student, the candidates

LOG_OF_ZERO = -100.0
"""NeMo RL's log-probability for the teacher's tokens outside its top k if `zero_outside_topk` is set."""


def divergence(student: Tensor, teacher: Tensor, entropies: Tensor | None, cfg: DistillationLossConfig) -> Tensor:
    """Return [...], the divergence between student and teacher at each token, from their log-probabilities [..., k] of
    k candidates.

    P and Q are the student's and the teacher's distribution over the candidates. `kl_type` reverse gives sum P log(P /
    Q), forward gives sum Q log(Q / P), and mixed the weighted sum of both; `mixed_kl_weight` is the weight of the
    forward KL. Q is renormalised over the candidates, and without `zero_outside_topk` so is P.

    With `zero_outside_topk`, P keeps its mass r outside the candidates, where Q is e^LOG_OF_ZERO. This adds s - r
    LOG_OF_ZERO to the reverse KL, where s is the sum of P log P over all other tokens. It is computed as -H - (sum of P
    log P over the candidates), where H is the student's entropy over the vocabulary, `entropies` [...]."""
    teacher = torch.log_softmax(teacher, -1)
    if not cfg.zero_outside_topk:
        student = torch.log_softmax(student, -1)
    p, q = student.exp(), teacher.exp()
    forward, reverse = (q * (teacher - student)).sum(-1), (p * (student - teacher)).sum(-1)
    if entropies is not None:
        reverse = reverse - entropies - (p * student).sum(-1) - LOG_OF_ZERO * (1 - p.sum(-1))
    weight = {"forward": 1.0, "reverse": 0.0}.get(cfg.kl_type, cfg.mixed_kl_weight)
    return weight * forward + (1 - weight) * reverse


class TopKDistillationLossFn:
    """The mean of `divergence` over the trained tokens (NeMo RL's DistillationLossFn), computed in float64.

    The data has `candidate_teacher_logprobs` [b, S, k]. The trainer adds the student's log-probabilities of the
    candidates, `curr_candidates` [b, S-1, k], and with `zero_outside_topk` also `curr_entropies` [b, S-1]."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB
    takes_candidates = True

    def __init__(self, cfg: Settings) -> None:
        self.cfg = as_model(cfg, DistillationLossConfig)
        self.takes_entropies = self.cfg.zero_outside_topk and self.cfg.kl_type != "forward"

    def native(
        self, curr_logprobs: Tensor, data: Mapping[str, Tensor], global_valid_seqs: Count, global_valid_toks: Count,
        global_valid_positive_toks: Count = None,
    ) -> ops.PolicyLossResult:  # fmt: skip
        """Return the loss of one micro-batch, metrics and gradients, computed without autograd and divided by
        `global_valid_toks`. Tokens with mask 0 have no effect. The gradient for `curr_logprobs` is 0."""
        mask = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).double()
        valid = mask != 0
        student = data["curr_candidates"][valid].double().requires_grad_()
        entropies = data["curr_entropies"][valid].double().requires_grad_() if self.takes_entropies else None
        with torch.enable_grad():
            teacher = data["candidate_teacher_logprobs"][:, 1:][valid].double()
            values = divergence(student, teacher, entropies, self.cfg)
            loss = (values * mask[valid]).sum() / (float(global_valid_toks) + 1e-8)
        grads = torch.autograd.grad(loss, [student] if entropies is None else [student, entropies])
        wholes = [torch.zeros_like(data[name]) for name in ("curr_candidates", "curr_entropies")[: len(grads)]]
        for whole, grad in zip(wholes, grads):
            whole[valid] = grad.to(whole.dtype)
        metrics = {"loss": float(loss.detach()), "num_valid_samples": float(data["sample_mask"].sum())}
        return ops.PolicyLossResult(
            loss.detach(),
            torch.zeros_like(curr_logprobs),
            metrics,
            grad_candidates=wholes[0],
            grad_entropy=wholes[1] if len(wholes) > 1 else None,
        )
