"""The CUDA kernels of losses and estimators, run on the CPU (tests/cuda_emulation) in float64, against the CPU's ops: the same terms,
summed in another order."""

import math

import pytest
import torch
from nemo_rl_cpp import ops
from nemo_rl_cpp._native import C

F64 = torch.float64
SHAPES = [(1, 1), (3, 40), (5, 1100)]  # the last: more tokens than a block takes at once


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def mask_of(B, S):
    return (torch.rand(B, S, generator=torch.Generator().manual_seed(9)) < 0.8).to(F64)


def near(got, expected):
    assert torch.allclose(got, expected, rtol=1e-10, atol=1e-10), float((got - expected).abs().max())


def logprobs(B, S):
    """(present, previous, generation, reference), which differ a little."""
    x = -randn(B, S, seed=1).abs()
    return x, x + 0.2 * randn(B, S, seed=2), x + 0.2 * randn(B, S, seed=3), x + 0.3 * randn(B, S, seed=4)


@pytest.mark.parametrize("B, S", SHAPES)
@pytest.mark.parametrize("lambda_value, alpha, kl_coef", [(None, 0.0, 0.0), (1.0, 0.05, 0.1)])
def test_emulated_cuda_gae_matches_the_cpu_kernel(kernels, B, S, lambda_value, alpha, kl_coef):
    rewards, values, mask, (x, _, _, reference) = randn(B), randn(B, S, seed=5), mask_of(B, S), logprobs(B, S)
    config = ops.GAEConfig(
        gamma=0.99, gae_lambda=0.95, gae_lambda_value=lambda_value, length_adaptive_alpha=alpha, kl_coef=kl_coef
    )
    cpu = ops.gae(rewards, values, mask.bool(), config, logprobs=x, reference_logprobs=reference)
    advantages, returns = torch.full((2, B, S), math.nan, dtype=F64)
    kernels.gae(
        B, S, rewards, values, mask, x, reference, advantages, returns, 0.99, 0.95, lambda_value or 0.95,
        lambda_value is not None, alpha, kl_coef,
    )  # fmt: skip
    near(advantages, cpu.advantages)
    near(returns, cpu.returns)


@pytest.mark.parametrize("B, S", SHAPES[1:])
def test_emulated_cuda_whitening_of_advantages_matches_the_formula(kernels, B, S):
    values, mask = randn(B, S, seed=1) + 100, mask_of(B, S)
    kept = values[mask.bool()]
    got = values.clone()
    kernels.whiten(B, S, got, mask, 0, 1)
    near(got, (values - kept.mean()) / kept.std(correction=0) * mask)


@pytest.mark.parametrize("B, S", SHAPES)
def test_emulated_cuda_token_advantages_match_the_formula(kernels, B, S):
    advantages, mask, (x, _, _, reference) = randn(B), mask_of(B, S), logprobs(B, S)
    out = torch.full((B, S), math.nan, dtype=F64)
    kernels.token_advantages(B, S, advantages, mask, x, reference, 0.1, out)
    r = reference - x
    near(out, advantages[:, None] - 0.1 * mask * (r.exp() - 1 - r).clamp(max=10))


@pytest.mark.parametrize("B, S", SHAPES)
@pytest.mark.parametrize("cliprange", [0.0, 0.3])
def test_emulated_cuda_value_loss_matches_the_cpu_kernel(kernels, B, S, cliprange):
    values, returns, old, mask, sample = (
        randn(B, S), randn(B, S, seed=1), randn(B, S, seed=2), mask_of(B, S), torch.ones(B, dtype=F64),
    )  # fmt: skip
    sample[0] = 0.0 if B > 1 else 1.0
    valid = torch.tensor([float((mask * sample[:, None]).sum())], dtype=F64)
    _, grad, metrics = C.mse_value_loss(values, returns, old, mask, sample, valid, 1.0, cliprange)
    got_grad, got_metrics = torch.full_like(grad, math.nan), torch.zeros(len(C.value_loss_metric_names()), dtype=F64)
    kernels.value_loss(B, S, values, returns, old, mask, sample, valid, cliprange, got_grad, got_metrics)
    near(got_grad, grad)
    near(got_metrics, metrics.to(F64))


@pytest.mark.parametrize("B, S", SHAPES)
@pytest.mark.parametrize("mode, sequence_level, kl_penalty", [
    ("ppo", False, 0.0), ("ppo", False, 0.05), ("ppo", True, 0.05), ("sapo", False, 0.05), ("dppo_tv", False, 0.0),
    ("dppo_kl", False, 0.0), ("dro", False, 0.05), ("gmpo", True, 0.0), ("vespo", False, 0.05),
])  # fmt: skip
def test_emulated_cuda_clipped_pg_loss_matches_the_cpu_kernel(kernels, B, S, mode, sequence_level, kl_penalty):
    (x, prev, generation, reference), advantages, mask, sample = (
        logprobs(B, S), randn(B, S, seed=6), mask_of(B, S), torch.ones(B, dtype=F64),
    )  # fmt: skip
    valid = float((mask * sample[:, None]).sum())
    counts = torch.tensor([valid, float(sample.sum()), 0.0], dtype=F64)
    config = C.ClippedPGConfig()
    config.ratio_mode = mode
    config.token_level_loss, config.sequence_level_ratios = not sequence_level, sequence_level
    config.kl_penalty = kl_penalty
    # the op takes arrays with the first token, which has no prediction
    whole = [torch.cat([torch.zeros(B, 1, dtype=F64), t], 1) for t in (advantages, prev, generation, reference, mask)]
    _, grad, _, metrics = C.clipped_pg_loss(x, *whole, sample, None, None, None, counts[0:1], counts[1:2], None, config)
    got_grad, got_metrics = torch.full_like(grad, math.nan), torch.zeros(len(C.clipped_pg_metric_names()), dtype=F64)
    kernels.clipped_pg_loss(
        B, S, x, advantages, prev, generation, reference, mask, sample, counts, config.ratio_mode, sequence_level,
        kl_penalty, got_grad, got_metrics,
    )  # fmt: skip
    near(got_grad, grad)
    near(got_metrics, metrics.to(F64))
