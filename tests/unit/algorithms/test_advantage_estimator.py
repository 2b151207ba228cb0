import math

import numpy as np
import pytest
import torch
from nemo_rl_cpp.algorithms.advantage_estimator import ADVANTAGE_ESTIMATORS, AdvEstimatorConfig
from nemo_rl_cpp.algorithms.algorithm import GroupAdvantages, TokenAdvantages
from nemo_rl_cpp.algorithms.loss import ClippedPGLossConfig
from nemo_rl_cpp.config.loop import GRPOConfig
from nemo_rl_cpp.distributed.ragged_batch import offsets_of
from nemo_rl_cpp.rollouts.batches import TrainBatch
from reference import advantages as slow
from reference import losses as slow_losses

LOSS = ClippedPGLossConfig()
PROMPTS = torch.tensor([[1, 2], [1, 2], [3, 4], [3, 4]])
GAE = dict(gae_lambda=0.9, gae_gamma=1.0, normalize_advantages=False, gae_lambda_value=None, gae_lambda_policy=None,
           length_adaptive_alpha=0.0)  # fmt: skip


def make(name, config, loss=LOSS):
    return ADVANTAGE_ESTIMATORS[name](config, loss)


def test_grpo_advantages_match_hand_computed_values():
    """Groups (1, 0) and (2, 2): leave one out gives +-1 and 0; two samples leave no spread, so nothing is divided."""
    rewards, mask = torch.tensor([1.0, 0.0, 2.0, 2.0]), torch.ones(4, 3)
    a = make("grpo", AdvEstimatorConfig()).compute_advantage(PROMPTS, rewards, mask)
    assert a.shape == (4, 3) and a[:, 0].tolist() == [1.0, -1.0, 0.0, 0.0]
    flat = make("grpo", {"use_leave_one_out_baseline": False, "normalize_rewards": True}).compute_advantage(
        PROMPTS, rewards, mask
    )
    assert flat[:2, 1].tolist() == pytest.approx([0.5 / (math.sqrt(0.5) + 1e-6), -0.5 / (math.sqrt(0.5) + 1e-6)])


def test_grpo_groups_samples_by_group_id_or_by_equal_prompts_if_group_ids_are_missing():
    rewards, mask = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.ones(4, 1)
    same = torch.zeros(4, 2, dtype=torch.long)
    by_prompt = make("grpo", AdvEstimatorConfig(normalize_rewards=False)).compute_advantage(same, rewards, mask)
    by_group = make("grpo", AdvEstimatorConfig(normalize_rewards=False)).compute_advantage(
        same, rewards, mask, group_id=torch.tensor([7, 7, 8, 8])
    )
    assert by_prompt[3].item() == pytest.approx(-1 / 3) and by_group[3].item() == 0.0


def test_gdpo_requires_one_weight_per_reward_component():
    batch = {"reward/b": torch.tensor([1.0, 0.0, 1.0, 0.0]), "reward/a": torch.tensor([0.0, 0.0, 1.0, 0.0]), "other": 1}
    mask = torch.ones(4, 2)
    config = AdvEstimatorConfig(normalize_rewards=False, use_leave_one_out_baseline=False, reward_weights=[2.0, 1.0])
    a = make("gdpo", config).compute_advantage(PROMPTS, batch["reward/a"], mask, batch)
    parts = torch.tensor([0.5, -0.5, 1.5, -1.5])  # 2 * a's (0, 0, .5, -.5) + b's (.5, -.5, .5, -.5)
    assert torch.allclose(a[:, 0], (parts - parts.mean()) / parts.std())
    with pytest.raises(ValueError, match="at least two"):
        make("gdpo", AdvEstimatorConfig()).compute_advantage(PROMPTS, None, mask, {"reward/a": batch["reward/a"]})
    with pytest.raises(ValueError, match="3 entries for 2"):
        make("gdpo", AdvEstimatorConfig(reward_weights=[1, 1, 1])).compute_advantage(PROMPTS, None, mask, batch)


def test_reinforce_plus_plus_subtracts_the_kl_penalty_only_if_use_kl_in_reward_is_set():
    rewards, mask = torch.tensor([1.0, 0.0, 2.0, 2.0]), torch.ones(4, 3)
    lp, ref = -torch.rand(4, 3), -torch.rand(4, 3)
    kw = dict(logprobs_policy=lp, logprobs_reference=ref)
    plain = make("reinforce_plus_plus", AdvEstimatorConfig()).compute_advantage(PROMPTS, rewards, mask)
    off = make("reinforce_plus_plus", AdvEstimatorConfig()).compute_advantage(PROMPTS, rewards, mask, **kw)
    loss = ClippedPGLossConfig(use_kl_in_reward=True, reference_policy_kl_penalty=0.5, reference_policy_kl_type="k2")
    on = make("reinforce_plus_plus", AdvEstimatorConfig(), loss).compute_advantage(PROMPTS, rewards, mask, **kw)
    assert torch.equal(plain, off)
    tokens = (rewards - torch.tensor([0.5, 0.5, 2.0, 2.0]))[:, None] - 0.5 * (ref - lp) ** 2 / 2
    assert torch.allclose(on, (tokens - tokens.mean()) / tokens.var(unbiased=False).sqrt(), atol=1e-6)
    raw = make("reinforce_plus_plus", {"minus_baseline": False}).compute_advantage(PROMPTS, rewards, mask)
    assert torch.allclose(raw[:, 0], (rewards - rewards.mean()) / rewards.std(unbiased=False), atol=1e-6)


def test_max_rl_advantages_match_hand_computed_values():
    """One right answer of two: the mean is 1/2, so right is +1 and wrong -1. No right answer: 0."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    a = make("max_rl", {}).compute_advantage(PROMPTS, rewards, torch.ones(4, 3))
    assert a[:, 1].tolist() == pytest.approx([1.0, -1.0, 0.0, 0.0], abs=1e-5)
    alone = make("max_rl", {}).compute_advantage(
        torch.zeros(4, 2), rewards, torch.ones(4, 1), valid_mask=torch.tensor([1.0, 1.0, 1.0, 0.0])
    )
    assert alone[:3, 0].tolist() == pytest.approx([2.0, -1.0, -1.0], abs=1e-5)


def test_remax_advantages_are_rewards_minus_the_reward_of_the_greedy_response():
    rewards, batch = torch.tensor([1.0, 0.0, 2.0, 2.0]), {"reward_baseline": torch.tensor([0.5, 0.5, 3.0, 3.0])}
    a = make("remax", {}).compute_advantage(PROMPTS, rewards, torch.ones(4, 2), batch)
    assert a[:, 1].tolist() == [0.5, -0.5, -1.0, -1.0]


def test_optimal_token_baseline_advantages_match_the_formula_at_every_token():
    random = np.random.default_rng(4)
    groups, lengths = [0, 0, 1, 1, 1], [3, 5, 4, 4, 1]
    mask = np.array([[0] + [float(t < n) for t in range(5)] for n in lengths])
    logprobs = -random.random(mask.shape)
    squares = np.exp(2 * logprobs) + 0.2 * random.random(mask.shape)  # at least p^2
    rewards = random.normal(size=5)
    valid = [1.0, 1.0, 1.0, 0.0, 1.0]
    expected = np.zeros(mask.shape)
    for i in range(5):
        for t in range(1, 1 + lengths[i]):
            total = weighted = 0.0
            for j in range(5):
                if groups[j] != groups[i] or lengths[j] < t or not valid[j]:
                    continue
                w = sum(1 - 2 * math.exp(logprobs[j, s]) + squares[j, s] for s in range(1, t + 1))
                total, weighted = total + w, weighted + w * rewards[j]
            expected[i, t] = rewards[i] - (weighted / total if total else rewards[i])
    tensors = {"mask": mask, "logprobs_policy": logprobs, "sum_pi_squared": squares}
    tensors = {name: torch.tensor(value) for name, value in tensors.items()}
    given = {"group_id": torch.tensor(groups), "valid_mask": torch.tensor(valid)}
    estimator = make("optimal_token_baseline", {})
    padded = estimator.compute_advantage(None, torch.tensor(rewards), **tensors, **given)
    torch.testing.assert_close(padded, torch.tensor(expected), rtol=1e-12, atol=1e-12)
    assert padded[1, 5] == 0.0  # alone at its fifth token
    inside = torch.arange(6)[None] <= torch.tensor(lengths)[:, None]
    ragged = {name: value[inside] for name, value in tensors.items()}
    offsets = offsets_of(torch.tensor(lengths) + 1)
    flat = estimator.compute_advantage(None, torch.tensor(rewards), **ragged, **given, offsets=offsets)
    torch.testing.assert_close(flat, padded[inside], rtol=0, atol=0)


def test_gae_advantages_with_kl_in_reward_match_hand_computed_values():
    rewards, mask = torch.tensor([1.0, 0.0]), torch.tensor([[0, 1, 1], [0, 1, 0]])
    values = torch.rand(2, 3)
    loss = ClippedPGLossConfig(use_kl_in_reward=True, reference_policy_kl_penalty=0.1)
    lp, ref = -torch.rand(2, 3), -torch.rand(2, 3)
    est = make("gae", GAE, loss)
    a, returns = est.compute_advantage(None, rewards, mask, values, reference_logprobs=ref, logprobs=lp)
    penalty = 0.1 * slow_losses.calculate_kl(lp, ref, "k3", 20.0, 10.0)
    last = 1.0 - penalty[0, 2] - values[0, 2]
    first = -penalty[0, 1] + values[0, 2] - values[0, 1] + 0.9 * last
    assert a[0].tolist() == pytest.approx([0.0, first.item(), last.item()], abs=1e-6)
    assert returns[0, 2].item() == pytest.approx(last.item() + values[0, 2].item(), abs=1e-6)
    with_bool, _ = est.compute_advantage(None, rewards, mask.bool(), values, reference_logprobs=ref, logprobs=lp)
    assert torch.equal(with_bool, a) and est.last_metrics == {"advantage/degenerate_whitening": 0.0}


def test_gae_uses_separate_lambdas_for_advantages_and_returns():
    rewards, mask, values = torch.tensor([1.0]), torch.ones(1, 4), torch.rand(1, 4)
    vapo = make("gae", GAE | {"gae_lambda_value": 1.0, "length_adaptive_alpha": 0.5})
    a, returns = vapo.compute_advantage(None, rewards, mask, values)
    assert torch.allclose(returns, torch.ones(1, 4))  # lambda 1: Monte-Carlo
    half = make("gae", GAE | {"gae_lambda": 0.5}).compute_advantage(None, rewards, mask, values)[0]
    assert torch.allclose(a, half)  # 1 - 1 / (0.5 * 4) = 0.5


@pytest.mark.parametrize("cases", [100, pytest.param(3400, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["opo", "grpo_passk", "pass_at_k"])
def test_opo_and_pass_at_k_advantages_match_a_reference_implementation_on_random_groups(name, cases):
    rng = np.random.default_rng(len(name))
    for _ in range(cases):
        size, k, normalize = int(rng.integers(1, 9)), int(rng.integers(1, 5)), bool(rng.random() < 0.5)
        groups, lengths = rng.integers(0, 3, size), rng.integers(0, 6, size)
        rewards = (
            rng.choice([0.0, 1.0], size) if rng.random() < 0.5 else np.float32(rng.normal(0, 1, size)).astype(float)
        )
        valid = (rng.random(size) < 0.8).astype(float)
        mask = (np.arange(6)[None] < lengths[:, None]).astype(float)
        given = dict(valid_mask=torch.tensor(valid), group_id=torch.tensor(groups))
        estimator = make(name, AdvEstimatorConfig(pass_k=k, normalize_rewards=normalize))
        found = estimator.compute_advantage(None, torch.tensor(rewards), torch.tensor(mask), **given)
        expected = {
            "opo": lambda: slow.opo(groups, rewards, lengths, valid),
            "grpo_passk": lambda: slow.best_of_group(groups, rewards, valid, normalize),
            "pass_at_k": lambda: slow.pass_at_k(groups, rewards, valid, k),
        }[name]()
        shown = valid != 0  # the others are not trained
        np.testing.assert_allclose(found[:, 0].numpy()[shown], expected[shown], rtol=1e-6, atol=1e-9)
        offsets, ones = offsets_of(torch.tensor(lengths)), torch.ones(int(lengths.sum()))
        ragged = estimator.compute_advantage(None, torch.tensor(rewards), ones, offsets=offsets, **given)
        torch.testing.assert_close(ragged, found[:, 0].repeat_interleave(torch.tensor(lengths)), rtol=0, atol=0)


def test_whitening_without_trained_tokens_gives_zero_advantages_and_sets_the_degenerate_metric():
    est = make("reinforce_plus_plus", {})
    a = est.compute_advantage(PROMPTS, torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.zeros(4, 3))
    assert not a.any() and est.last_metrics["advantage/degenerate_whitening"] == 1.0


@pytest.mark.parametrize("name", ["grpo", "gdpo", "reinforce_plus_plus", "gae", "raw_reward"])
def test_built_in_advantage_estimators_give_equal_results_for_ragged_and_padded_batches(name):
    """A wrapper class without a parameter `offsets` gets padded tensors, like a custom estimator."""
    padded = []

    class Padded:
        last_metrics = {}

        def compute_advantage(self, **inputs):
            padded.append(inputs["mask"].dim())
            return estimator.compute_advantage(**inputs)

    lengths = torch.tensor([3, 5, 1, 4])
    of_tokens = {name: -torch.rand(4, 5) for name in ("generation_logprobs", "reference_policy_logprobs")}
    of_tokens["token_mask"] = torch.ones(4, 5)
    of_samples = {"sample_mask": torch.tensor([1.0, 1, 0, 1]), "rewards": torch.tensor([1.0, 0, 2, 5]), "group_id": torch.tensor([0, 0, 1, 1]),
                  "reward/a": torch.tensor([1.0, 0, 1, 0]), "reward/b": torch.tensor([0.0, 3, 1, 1])}  # fmt: skip
    ids = torch.arange(20).view(4, 5)
    with_critic = name in ("gae", "raw_reward")
    loss = ClippedPGLossConfig(use_kl_in_reward=True, reference_policy_kl_penalty=0.1)
    config = GAE | {"normalize_advantages": True} if with_critic else AdvEstimatorConfig()
    estimator = make(name, config, loss)
    results = []
    for given in (estimator, Padded()):
        batch = TrainBatch.of({"input_ids": ids, "input_lengths": lengths, **of_tokens, **of_samples})
        if with_critic:
            batch.values = torch.arange(20.0).view(4, 5)
        (TokenAdvantages(given) if with_critic else GroupAdvantages(given, GRPOConfig())).add(batch)
        results.append((batch.advantages, batch.tokens.get("returns")))
    assert padded == [2]
    (a, a_returns), (b, b_returns) = results
    assert torch.equal(a, b) and a.abs().sum() > 0
    assert a_returns is b_returns is None or torch.equal(a_returns, b_returns)
