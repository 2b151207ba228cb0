"""The loss of distillation on the k likeliest tokens of the teacher or of the student."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_rl_cpp.algorithms.loss import LossInputType, LossType
from nemo_rl_cpp.config.base import Settings, as_model
from nemo_rl_cpp.config.distillation import DistillationLossConfig

LOG_OF_ZERO = -100.0
"""The log-probability that NeMo RL gives the teacher's tokens outside its top k under `zero_outside_topk`."""


class DistillationResult(NamedTuple):
    """Loss (scalar), metrics, and the gradients with respect to the student's log-probabilities of the sampled tokens
    [b, S-1] (zero), of the candidates [b, S-1, k], and of the entropies [b, S-1] (None if they are not used)."""

    loss: Tensor
    metrics: dict[str, float]
    grad_logprobs: Tensor
    grad_candidates: Tensor
    grad_entropy: Tensor | None
    nonfinite: None = None


def divergence(student: Tensor, teacher: Tensor, entropies: Tensor | None, cfg: DistillationLossConfig) -> Tensor:
    """Return [...], the divergence of each token's distributions over k candidates, from log-probabilities [..., k].

    With P, Q the student's and the teacher's distribution over the candidates: reverse sum P log(P / Q), forward
    sum Q log(Q / P), mixed the sum of both by `mixed_kl_weight` (the forward's). Q is renormalised to the candidates,
    and without `zero_outside_topk` so is P. With it P keeps its mass r outside them, where Q is e^LOG_OF_ZERO: the
    reverse KL gains (sum of P log P over all other tokens) - r LOG_OF_ZERO, the sum being minus the student's entropy
    less its part within the candidates. `entropies` [...] are read by this term alone.
    """
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
    """The mean over the trained tokens of `divergence` (NeMo RL's DistillationLossFn).

    The data has `candidate_teacher_logprobs` [b, S, k]; the trainer adds the student's, `curr_candidates` [b, S-1, k],
    and with `zero_outside_topk` `curr_entropies` [b, S-1]. All is computed in float64."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB
    takes_candidates = True

    def __init__(self, cfg: Settings) -> None:
        self.cfg = as_model(cfg, DistillationLossConfig)
        self.takes_entropies = self.cfg.zero_outside_topk and self.cfg.kl_type != "forward"

    def native(
        self,
        curr_logprobs: Tensor,
        data: Mapping[str, Tensor],
        global_valid_seqs: Tensor | float,
        global_valid_toks: Tensor | float,
        global_valid_positive_toks: Tensor | float | None = None,
    ) -> DistillationResult:
        """Return loss, metrics and gradients; positions with a mask of 0 have no effect."""
        mask = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).double()
        valid = mask != 0
        student = data["curr_candidates"][valid].double().requires_grad_()
        entropies = data["curr_entropies"][valid].double().requires_grad_() if self.takes_entropies else None
        with torch.enable_grad():
            teacher = data["candidate_teacher_logprobs"][:, 1:][valid].double()
            values = divergence(student, teacher, entropies, self.cfg)
            loss = (values * mask[valid]).sum() / (float(global_valid_toks) + 1e-8)
        grads = torch.autograd.grad(loss, [student] if entropies is None else [student, entropies])
        of_candidates = torch.zeros_like(data["curr_candidates"])
        of_candidates[valid] = grads[0].to(of_candidates.dtype)
        of_entropies = None
        if entropies is not None:
            of_entropies = torch.zeros_like(data["curr_entropies"])
            of_entropies[valid] = grads[1].to(of_entropies.dtype)
        metrics = {"loss": float(loss.detach()), "num_valid_samples": float(data["sample_mask"].sum())}
        return DistillationResult(loss.detach(), metrics, torch.zeros_like(curr_logprobs), of_candidates, of_entropies)
