"""The distillation loss over the k most likely tokens of the teacher or of the student, the candidates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_rl_cpp.algorithms.loss import LossInputType, LossType
from nemo_rl_cpp.config.base import Settings, as_model
from nemo_rl_cpp.config.distillation import DistillationLossConfig

LOG_OF_ZERO = -100.0
"""NeMo RL's log-probability for the teacher's tokens outside its top k if `zero_outside_topk` is set."""


class DistillationResult(NamedTuple):
    """The scalar loss, its metrics, and its gradients with respect to three inputs: the student's log-probabilities of
    the sampled tokens [b, S-1] (always zero), those of the k candidate tokens [b, S-1, k], and the entropies [b, S-1]
    (None if unused).
    """

    loss: Tensor
    metrics: dict[str, float]
    grad_logprobs: Tensor
    grad_candidates: Tensor
    grad_entropy: Tensor | None
    nonfinite: None = None


def divergence(student: Tensor, teacher: Tensor, entropies: Tensor | None, cfg: DistillationLossConfig) -> Tensor:
    """Return [...], the divergence between student and teacher at each token, from their log-probabilities [..., k] of
    k candidates.

    P and Q are the student's and the teacher's distribution over the candidates. `kl_type` reverse gives sum P log(P /
    Q), forward gives sum Q log(Q / P), and mixed the weighted sum of both; `mixed_kl_weight` is the weight of the
    forward KL. Q is renormalised over the candidates, and without `zero_outside_topk` so is P.

    With `zero_outside_topk`, P keeps its mass r outside the candidates, where Q is e^LOG_OF_ZERO. This adds (sum of P
    log P over all other tokens) - r LOG_OF_ZERO to the reverse KL. The sum is the candidates' part of the student's
    entropy minus the whole entropy, which is `entropies` [...]; nothing else reads them.
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
    """The mean of `divergence` over the trained tokens (NeMo RL's DistillationLossFn), computed in float64.

    The data has `candidate_teacher_logprobs` [b, S, k]. The trainer adds the student's log-probabilities of the
    candidates, `curr_candidates` [b, S-1, k], and with `zero_outside_topk` also `curr_entropies` [b, S-1].
    """

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
        """Return loss, metrics and gradients. Positions with mask 0 have no effect."""
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
