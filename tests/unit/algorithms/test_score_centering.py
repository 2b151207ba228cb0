"""Tests of score centering, which gives the score mean 0 under the old policy (arXiv:2609.20807)."""

import math

import pytest
import tiny
import torch
from nemo_rl_cpp.algorithms.loss import ClippedPGLossFn

NAMES = ("gpg", "cispo")
V = 12


def distributions(seed, rows=3, length=5):
    """Return logits of the current policy and log-probabilities of the old one, float64 [rows, length, V]."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, length, V, generator=random, dtype=torch.float64)
    return logits, (logits + 0.7 * torch.randn(logits.shape, generator=random, dtype=torch.float64)).log_softmax(-1)


def batch_of(old, tokens, k, advantages, mask=None):
    """Return (the data of a loss for sampled tokens [rows, length], each row after an unused first token; the
    candidates' ids)."""
    top = old.topk(k, dim=-1)
    first = lambda v: torch.cat([torch.zeros_like(v[:, :1]), v], 1)  # noqa: E731
    prev = first(old.gather(-1, tokens[..., None])[..., 0])
    mask = first(torch.ones(tokens.shape, dtype=torch.float64) if mask is None else mask)
    return {
        "advantages": first(advantages), "prev_logprobs": prev, "generation_logprobs": prev, "token_mask": mask,
        "sample_mask": torch.ones(len(tokens), dtype=torch.float64), "candidate_old_logprobs": first(top.values),
    }, top.indices  # fmt: skip


def gradient(name, logits, data, ids, tokens, k):
    """Return (the loss result, its gradient for `logits` through the sampled tokens and the candidates)."""
    leaf = logits.clone().requires_grad_()
    logp = leaf.log_softmax(-1)
    chosen, candidates = logp.gather(-1, tokens[..., None])[..., 0], logp.gather(-1, ids)
    settings = {"name": name, "score_centering_k": k, "reference_policy_kl_penalty": 0.0, "ratio_clip_max": 0.5}
    count = float(data["token_mask"][:, 1:].sum())
    given = data | {"curr_candidates": candidates.detach()}
    result = ClippedPGLossFn(settings).native(chosen.detach(), given, float(len(tokens)), count)
    total = (result.grad_logprobs * chosen).sum() + (result.grad_candidates * candidates).sum()
    return result, torch.autograd.grad(total, leaf)[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("k", [V, 4])
def test_score_centering_gives_a_zero_mean_gradient_for_equal_advantages(name, k):
    """The gradient is summed over every possible token, weighted by the token's old probability. With k < V the mean is
    over the reconstructed distribution: the old one at the k tokens, the scaled current one elsewhere."""
    logits, old = distributions(1)
    p = logits.softmax(-1)
    q, top = old.exp(), old.topk(k, dim=-1).indices
    if k < V:
        inside = torch.zeros_like(q).scatter_(-1, top, 1.0)
        scale = (1 - (q * inside).sum(-1, keepdim=True)) / (1 - (p * inside).sum(-1, keepdim=True))
        q = torch.where(inside != 0, q, scale * p)
    mean = torch.zeros_like(logits)
    for v in range(V):
        tokens = torch.full(logits.shape[:2], v)
        data, ids = batch_of(old, tokens, k, torch.full(tokens.shape, 1.3, dtype=torch.float64))
        data["prev_logprobs"][:, 1:] = q[..., v].log()
        mean += q[..., v : v + 1] * gradient(name, logits, data, ids, tokens, k)[1]
    assert mean.abs().max() < 1e-7


def slow_term(name, p, q, advantage, low, high):
    """Return A (sum_v q w log p - a w(1/a) sum_v p log p) of one token, from the probabilities of its k candidates."""
    scale = (1 - sum(q)) / (1 - sum(p)) if 1 - sum(p) > 1e-6 else 0.0
    weight = lambda ratio: 1.0 if name == "gpg" else min(max(ratio, low), high)  # noqa: E731
    others = scale * weight(1 / scale) if scale else 0.0
    return advantage * sum((b * weight(a / b) - others * a) * math.log(a) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_score_centering_loss_term_matches_a_reference_implementation(name):
    logits, old = distributions(2)
    random = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, V, logits.shape[:2], generator=random)
    advantages = torch.randn(tokens.shape, generator=random, dtype=torch.float64)
    mask = (torch.rand(tokens.shape, generator=random) < 0.7).double()
    data, ids = batch_of(old, tokens, 4, advantages, mask)
    result, _ = gradient(name, logits, data, ids, tokens, 4)
    plain = ClippedPGLossFn({"name": name, "reference_policy_kl_penalty": 0.0, "ratio_clip_max": 0.5})
    chosen = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    without = plain.native(chosen, data, 3.0, float(mask.sum()))
    expected = sum(
        slow_term(name, logits[b, t].softmax(-1)[ids[b, t]].tolist(), old[b, t][ids[b, t]].exp().tolist(), float(advantages[b, t]), 0.8, 1.5)
        for b, t in mask.nonzero().tolist()
    ) / float(mask.sum())  # fmt: skip
    assert result.metrics["loss"] - without.metrics["loss"] == pytest.approx(expected, rel=1e-6)
    assert not result.grad_candidates[mask == 0].any()
    assert torch.equal(result.grad_logprobs, without.grad_logprobs)


def test_score_centering_changes_the_weights_of_a_step_with_several_updates(tmp_path):
    def digest(folder, *more):
        keys = ("loss_fn.name=cispo", "policy.train_global_batch_size=8", "grpo.max_num_steps=1", *more)
        with tiny.make(tmp_path / folder, *tiny.SMALL, *keys) as run:
            run.train()
            return run.policy.weight_digest()

    assert digest("1", "loss_fn.score_centering_k=6") != digest("2")
