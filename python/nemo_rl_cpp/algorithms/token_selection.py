"""The stage of a step that chooses which tokens learn from their advantages."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from nemo_rl_cpp.config.loss import ClippedPGLossConfig
from nemo_rl_cpp.rollouts.batches import TrainBatch


def select_tokens(batch: TrainBatch, loss: ClippedPGLossConfig, seed: int, step: int) -> dict[str, float]:
    """Set the advantages of the tokens that `loss` leaves out to 0, and add `kl_cov_penalty` [T] for the loss kl_cov.

    The tokens of the whole step are compared, before it is cut into global batches, micro-batches and ranks. Return the
    metric `selected_tokens_share`: the share of trained tokens that keep their advantage (kl_cov: that are penalised);
    {} if the loss takes all tokens alike."""
    valid = batch.is_valid
    if loss.name == "kl_cov":
        chosen = _largest(_covariance(batch, valid), valid, loss.kl_cov_ratio)
        batch.tokens["kl_cov_penalty"] = chosen.float() * loss.ppo_kl_coef
        return _share(chosen, valid)
    kept = valid
    if loss.top_entropy_quantile < 1:
        kept = kept & _most_uncertain(batch.entropies, valid, loss.top_entropy_quantile)
    if loss.name == "clip_cov":
        within = (loss.clip_cov_lb, loss.clip_cov_ub)
        kept = kept & ~_drawn(_covariance(batch, valid), valid, within, loss.clip_cov_ratio, (seed, step))
    if kept is valid:
        return {}
    batch.advantages = torch.where(kept | ~valid, batch.advantages, 0.0)
    return _share(kept, valid)


def _share(chosen: Tensor, valid: Tensor) -> dict[str, float]:
    return {"selected_tokens_share": chosen.sum().item() / max(int(valid.sum()), 1)}


def _covariance(batch: TrainBatch, valid: Tensor) -> Tensor:
    """Return float64 [T], (A - mean A) (log p - mean log p) with the policy before the step and means over the trained
    tokens; 0 elsewhere. Its mean is the covariance whose size says how fast the entropy falls (arXiv:2505.22617, eq.
    7)."""
    covariance = torch.zeros(batch.num_tokens, dtype=torch.float64)
    advantages, logprobs = batch.advantages[valid].double(), batch.old_logprobs[valid].double()
    covariance[valid] = (advantages - advantages.mean()) * (logprobs - logprobs.mean())
    return covariance


def _count(valid: Tensor, share: float) -> int:
    return min(max(int(share * int(valid.sum())), 1), int(valid.sum()))


def _largest(covariance: Tensor, valid: Tensor, share: float) -> Tensor:
    """Return bool [T], KL-Cov's tokens: the `share` of the trained tokens, at least one, with the largest covariance."""
    chosen, places = torch.zeros_like(valid), valid.nonzero().flatten()
    order = covariance[places].argsort(descending=True, stable=True)
    chosen[places[order[: _count(valid, share)]]] = True
    return chosen


def _drawn(
    covariance: Tensor, valid: Tensor, within: tuple[float, float], share: float, seed: tuple[int, int]
) -> Tensor:
    """Return bool [T], Clip-Cov's tokens: the `share` of the trained tokens, at least one, drawn among those with a
    covariance within the bounds. A step of a run always draws the same."""
    generator = random.Random((seed[0] << 32) + seed[1])
    chosen = torch.zeros_like(valid)
    places = (valid & (covariance > within[0]) & (covariance < within[1])).nonzero().flatten().tolist()
    chosen[generator.sample(places, min(_count(valid, share), len(places)))] = True
    return chosen


def _most_uncertain(entropies: Tensor, valid: Tensor, share: float) -> Tensor:
    """Return bool [T], the trained tokens whose entropy is at least the quantile 1 - share of all of them
    (arXiv:2506.01939; the quantile is interpolated, as in TRL)."""
    ordered = entropies[valid].double().sort().values
    if not len(ordered):
        return valid
    at = (1 - share) * (len(ordered) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    threshold = ordered[below] + (at - below) * (ordered[above] - ordered[below])
    return valid & (entropies.double() >= threshold)
