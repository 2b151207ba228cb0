import pytest
import torch
from nemo_rl_cpp.algorithms.step import select_tokens
from nemo_rl_cpp.config.loss import ClippedPGLossConfig
from nemo_rl_cpp.distributed.ragged_batch import offsets_of
from nemo_rl_cpp.rollouts.batches import TrainBatch


def batch_of(advantages, logprobs, entropies=None, mask=None):
    """Return two samples of equal length. All tokens are trained unless `mask` [T] is given."""
    tokens = {"input_ids": torch.zeros(len(advantages), dtype=torch.int64), "token_mask": torch.ones(len(advantages))}
    tokens |= {"advantages": torch.tensor(advantages), "generation_logprobs": torch.tensor(logprobs)}
    if entropies is not None:
        tokens["entropies"] = torch.tensor(entropies)
    if mask is not None:
        tokens["token_mask"] = torch.tensor(mask)
    half = len(advantages) // 2
    return TrainBatch(offsets_of(torch.tensor([half, half])), tokens, {"sample_mask": torch.ones(2)})


def test_advantages_are_unchanged_if_no_token_selection_is_configured():
    batch = batch_of([1.0, -1.0, 2.0, 0.5], [-1.0, -2.0, -3.0, -4.0])
    assert select_tokens(batch, ClippedPGLossConfig(), 1, 2) == {}
    assert batch.advantages.tolist() == [1.0, -1.0, 2.0, 0.5]


def test_kl_cov_penalises_only_the_tokens_with_the_largest_covariances():
    """The means of A and log p are 0 and -2.5, so the covariances are 3, -1.5, -1.5 and 3. A quarter of four tokens is
    one: of equal ones the first."""
    batch = batch_of([2.0, -3.0, 3.0, -2.0], [-1.0, -2.0, -3.0, -4.0])
    metrics = select_tokens(batch, ClippedPGLossConfig(name="kl_cov", kl_cov_ratio=0.25, ppo_kl_coef=0.7), 1, 2)
    assert batch.tokens["kl_cov_penalty"].tolist() == pytest.approx([0.7, 0.0, 0.0, 0.0])
    assert metrics == {"selected_tokens_share": 0.25}


def test_clip_cov_zeroes_the_advantages_of_tokens_whose_covariance_is_within_the_bounds():
    batch = batch_of([2.0, -3.0, 3.0, -2.0], [-1.0, -2.0, -3.0, -4.0])
    settings = ClippedPGLossConfig(name="clip_cov", clip_cov_ratio=0.5, clip_cov_lb=2.0, clip_cov_ub=4.0)
    metrics = select_tokens(batch, settings, 1, 2)
    assert batch.advantages.tolist() == [0.0, -3.0, 3.0, 0.0] and metrics == {"selected_tokens_share": 0.5}


def test_random_token_selection_of_clip_cov_depends_only_on_seed_and_step():
    random = torch.Generator().manual_seed(0)
    advantages, logprobs = torch.randn(400, generator=random).tolist(), torch.randn(400, generator=random).tolist()
    settings = ClippedPGLossConfig(name="clip_cov", clip_cov_ratio=0.05, clip_cov_lb=0.1, clip_cov_ub=9.0)

    def left_out(seed, step):
        batch = batch_of(advantages, logprobs)
        select_tokens(batch, settings, seed, step)
        return (batch.advantages == 0).nonzero().flatten().tolist()

    assert len(left_out(1, 2)) == 20 and left_out(1, 2) == left_out(1, 2)
    assert left_out(1, 2) != left_out(1, 3) and left_out(1, 2) != left_out(2, 2)


def test_top_entropy_quantile_zeroes_the_advantages_of_all_lower_entropy_tokens():
    entropies, mask = [0.1, 9.0, 0.3, 0.2, 0.5, 0.4], [1.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    batch = batch_of([1.0] * 6, [-1.0] * 6, entropies, mask)
    metrics = select_tokens(batch, ClippedPGLossConfig(top_entropy_quantile=0.4), 1, 2)
    # the quantile 0.6 of 0.1 .. 0.5 is 0.34, between the third and the fourth
    assert batch.advantages.tolist() == [0.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    assert metrics == {"selected_tokens_share": pytest.approx(0.4)}


def test_kl_cov_penalises_the_tokens_that_a_brute_force_search_selects():
    random = torch.Generator().manual_seed(3)
    advantages, logprobs = torch.randn(60, generator=random).tolist(), torch.randn(60, generator=random).tolist()
    mask = (torch.rand(60, generator=random) < 0.7).float().tolist()
    batch = batch_of(advantages, logprobs, mask=mask)
    select_tokens(batch, ClippedPGLossConfig(name="kl_cov", kl_cov_ratio=0.1), 0, 0)
    valid = [i for i in range(60) if mask[i]]
    mean_a, mean_p = (sum(v[i] for i in valid) / len(valid) for v in (advantages, logprobs))
    ranked = sorted(valid, key=lambda i: -(advantages[i] - mean_a) * (logprobs[i] - mean_p))
    expected = set(ranked[: max(1, int(0.1 * len(valid)))])
    assert set(batch.tokens["kl_cov_penalty"].nonzero().flatten().tolist()) == expected
