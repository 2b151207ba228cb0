"""Reward scaling, shaping and sequence errors against plain Python over a thousand random and hostile cases each."""

import random

import pytest
import torch
from nemo_rl_cpp.algorithms.reward_functions import (
    RewardScalingConfig,
    RewardShapingConfig,
    apply_reward_shaping,
    scale_rewards,
)
from nemo_rl_cpp.algorithms.step import compute_and_apply_seq_logprob_error_masking
from reference import rewards as reference

CASES = 1000
DTYPES = [(torch.float64, 1e-12), (torch.float32, 1e-5)]
HOSTILE = (0.0, -0.0, 1.0, -1.0, 1e6, -1e6, 1e-30, 0.5)


def rewards_of(rng, size):
    """Equal rewards, extremes, and ordinary ones."""
    if rng.random() < 0.2:
        return [rng.choice(HOSTILE)] * size
    return [rng.choice(HOSTILE) if rng.random() < 0.2 else rng.uniform(-2, 2) for _ in range(size)]


def close(ours, expected, bound):
    wanted = torch.tensor(expected, dtype=torch.float64)
    return torch.allclose(ours.double(), wanted, rtol=bound, atol=bound * max(1.0, float(wanted.abs().max())))


@pytest.mark.parametrize("dtype,bound", DTYPES, ids=["float64", "float32"])
def test_scaling_matches_reference(dtype, bound, capsys):
    for seed in range(CASES):
        rng = random.Random(seed)
        low, target_low = rng.uniform(-3, 1), rng.uniform(-3, 3)
        bounds = {"source_min": low, "source_max": low + rng.choice([0.01, 1.0, 5.0]), "target_min": target_low,
                  "target_max": target_low + rng.choice([-1.0, 0.0, 2.0])}  # fmt: skip
        raw = rewards_of(rng, rng.choice([1, 2, 7, 40]))
        out = scale_rewards(
            {"total_reward": torch.tensor(raw, dtype=dtype)}, RewardScalingConfig(enabled=True, **bounds)
        )
        expected = [reference.scaled(r, **bounds) for r in torch.tensor(raw, dtype=dtype).tolist()]
        # float32 rounds the bounds themselves: by the slope times their size
        slope = abs(bounds["target_max"] - bounds["target_min"]) / (bounds["source_max"] - low)
        assert close(out["total_reward"], expected, bound * max(1.0, slope * abs(low))), seed
    capsys.readouterr()


@pytest.mark.parametrize("dtype,bound", DTYPES, ids=["float64", "float32"])
def test_shaping_matches_reference(dtype, bound, capsys):
    for seed in range(CASES):
        rng = random.Random(seed)
        size, longest = rng.choice([1, 2, 7, 40]), rng.choice([1, 8, 100, 16384])
        raw = rewards_of(rng, size)
        lengths = [
            rng.choice([0, 1, longest, longest + 1, 3 * longest, rng.randint(0, 2 * longest)]) for _ in range(size)
        ]
        truncated = [rng.random() < 0.4 for _ in range(size)]
        coef = rng.choice([None, 0.0, 1.0, rng.random()])
        compose = coef is not None and rng.random() < 0.5
        settings = {"overlong_buffer_length": rng.choice([1, 4, longest, 2 * longest]), "overlong_buffer_penalty": rng.choice([0.0, 1.0, 2.5]),
                    "max_response_length": longest}  # fmt: skip
        batch = {
            "total_reward": torch.tensor(raw, dtype=dtype),
            "truncated": truncated,
            "response_token_lengths": lengths,
        }
        out = apply_reward_shaping(
            batch, RewardShapingConfig(enabled=True, stop_properly_penalty_coef=coef, compose=compose, **settings)
        )
        given = torch.tensor(raw, dtype=dtype).tolist()
        expected = [
            reference.shaped(r, n, t, buffer=settings["overlong_buffer_length"], penalty=settings["overlong_buffer_penalty"], longest=longest,
                             coef=coef, compose=compose)
            for r, n, t in zip(given, lengths, truncated, strict=True)
        ]  # fmt: skip
        assert close(out["total_reward"], expected, bound), seed
        assert out["unshaped_total_reward"].tolist() == given
    capsys.readouterr()


def test_sequence_errors_match_reference():
    for seed in range(CASES):
        rng = random.Random(seed)
        rows, width, threshold = rng.choice([1, 2, 6]), rng.choice([2, 3, 17]), rng.choice([None, 1.0, 1.5, 1e9])
        gap = rng.choice([0.0, 1e-3, 1.0, 20.0])
        table = lambda scale: [[rng.gauss(0, scale) for _ in range(width)] for _ in range(rows)]  # noqa: E731
        prev = table(3.0)
        generation = [[p + rng.gauss(0, 1) * gap for p in row] for row in prev]
        mask = [[float(rng.random() < 0.7) for _ in range(width)] for _ in range(rows)]
        sample_mask = [float(rng.random() < 0.8) for _ in range(rows)]
        tensor = lambda value: torch.tensor(value, dtype=torch.float64)  # noqa: E731
        data = {
            "prev_logprobs": tensor(prev),
            "generation_logprobs": tensor(generation),
            "token_mask": tensor(mask),
            "sample_mask": tensor(sample_mask),
        }
        metrics = compute_and_apply_seq_logprob_error_masking(data, torch.ones(rows), threshold)
        errors = [reference.sequence_error(p[1:], g[1:], m[1:]) for p, g, m in zip(prev, generation, mask, strict=True)]
        kept = [s and (threshold is None or e <= threshold) for s, e in zip(sample_mask, errors, strict=True)]
        assert [bool(v) for v in data["sample_mask"].tolist()] == [bool(v) for v in kept], seed
        counted = [e for s, e, m in zip(sample_mask, errors, mask, strict=True) if s and any(m[1:])]
        if len(counted) == sum(map(bool, sample_mask)) and counted:  # every row that counts has a trained token
            assert metrics["max_seq_mult_prob_error"] == pytest.approx(max(counted), rel=1e-9), seed
