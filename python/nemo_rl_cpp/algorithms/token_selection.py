"""The stage of a training step that selects the tokens on which the policy trains."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from nemo_rl_cpp.config.loss import ClippedPGLossConfig
from nemo_rl_cpp.rollouts.batches import TrainBatch


def select_tokens(batch: TrainBatch, loss: ClippedPGLossConfig, seed: int, step: int) -> dict[str, float]:
    """Set the advantages of the tokens that the loss excludes to 0, and for the loss kl_cov add `kl_cov_penalty` [T].

    Tokens are compared over the whole step, before it is split into global batches, micro-batches and ranks. Return the
    metric `selected_tokens_share`: the share of trained tokens that keep their advantage (for kl_cov: that are
    penalised). Return {} if the loss selects no tokens.
    """
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
    """Return float64 [T]: (A - mean A) (log p - mean log p) for each trained token, 0 elsewhere. p is the policy before
    the step, and means are over the trained tokens. The mean of this product is the covariance that sets how fast the
    entropy falls (arXiv:2505.22617, eq. 7).
    """
    covariance = torch.zeros(batch.num_tokens, dtype=torch.float64)
    advantages, logprobs = batch.advantages[valid].double(), batch.old_logprobs[valid].double()
    covariance[valid] = (advantages - advantages.mean()) * (logprobs - logprobs.mean())
    return covariance


def _count(valid: Tensor, share: float) -> int:
    return min(max(int(share * int(valid.sum())), 1), int(valid.sum()))


def _largest(covariance: Tensor, valid: Tensor, share: float) -> Tensor:
    """Return bool [T], the tokens that KL-Cov penalises: the `share` of the trained tokens with the largest covariance,
    at least one token.
    """
    chosen, places = torch.zeros_like(valid), valid.nonzero().flatten()
    order = covariance[places].argsort(descending=True, stable=True)
    chosen[places[order[: _count(valid, share)]]] = True
    return chosen


def _drawn(
    covariance: Tensor, valid: Tensor, within: tuple[float, float], share: float, seed: tuple[int, int]
) -> Tensor:
    """Return bool [T], the tokens that Clip-Cov excludes: a random `share` of the trained tokens, at least one, drawn
    from those whose covariance is within the bounds. The draw depends only on `seed`.
    """
    generator = random.Random((seed[0] << 32) + seed[1])
    chosen = torch.zeros_like(valid)
    places = (valid & (covariance > within[0]) & (covariance < within[1])).nonzero().flatten().tolist()
    chosen[generator.sample(places, min(_count(valid, share), len(places)))] = True
    return chosen


def _most_uncertain(entropies: Tensor, valid: Tensor, share: float) -> Tensor:
    """Return bool [T]: the trained tokens whose entropy is at least the quantile 1 - share of all trained tokens'
    entropies (arXiv:2506.01939). The quantile is interpolated, as in TRL.
    """
    ordered = entropies[valid].double().sort().values
    if not len(ordered):
        return valid
    at = (1 - share) * (len(ordered) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    threshold = ordered[below] + (at - below) * (ordered[above] - ordered[below])
    return valid & (entropies.double() >= threshold)
