from types import SimpleNamespace

import pytest
import torch
from nemo_rl_cpp.algorithms.advantage_estimator import make_estimator
from nemo_rl_cpp.algorithms.algorithm import GroupAdvantages
from nemo_rl_cpp.config.loop import AdvEstimatorConfig, GRPOConfig
from nemo_rl_cpp.config.loss import ClippedPGLossConfig
from nemo_rl_cpp.rollouts.batches import TrainBatch, add_logprobs


class Policy:
    def __init__(self, exact):
        self.skips_prev_logprobs = exact
        self.calls = []

    def get_logprobs(self, data):
        self.calls.append("policy")
        return {"logprobs": torch.full((2, 3), -1.0)}

    def get_reference_policy_logprobs(self, data):
        self.calls.append("reference")
        return {"reference_logprobs": torch.full((2, 3), -2.0)}

    def get_sum_pi_squared(self, data):
        return {"sum_pi_squared": torch.full((2, 3), 0.5)}


def batch(versions=(5, 5)):
    return TrainBatch.of({
        "input_ids": torch.zeros(2, 3, dtype=torch.int64), "input_lengths": torch.tensor([3, 3]), "token_mask": torch.ones(2, 3),
        "generation_logprobs": torch.full((2, 3), -3.0), "sample_mask": torch.ones(2), "rewards": torch.zeros(2),
        "weight_version": torch.tensor(versions), "group_id": torch.zeros(2),
    })  # fmt: skip


def add(policy, data, kl=0.0, threshold=None, age=0, estimator="grpo", first_step=0, **loss):
    """Add the log-probabilities that a run with these settings needs, at version 5 of the weights."""
    loop = SimpleNamespace(
        seq_logprob_error_threshold=threshold, trajectory_age=age, adv_estimator=SimpleNamespace(name=estimator),
        first_policy_step=first_step,
    )  # fmt: skip
    section = ClippedPGLossConfig(reference_policy_kl_penalty=kl, **loss)
    return add_logprobs(policy, data, section, loop, 5)


@pytest.mark.parametrize(
    "versions, first_step", [((5, 5), 0), ((3, 5), 5), ((3, 4), 6)]
)  # the last two: in the warm-up of the critic
def test_old_logprobs_are_not_computed_if_generation_logprobs_equal_training_logprobs(versions, first_step):
    policy, data = Policy(exact=True), batch(versions)
    assert add(policy, data, use_kl_in_reward=True, first_step=first_step) == {"stale_samples": 0}
    assert policy.calls == [] and "prev_logprobs" not in data and "reference_policy_logprobs" not in data


@pytest.mark.parametrize("exact, threshold", [(False, None), (True, 2.0)])
def test_old_logprobs_are_computed_if_generation_logprobs_may_differ_or_the_loss_requires_it(exact, threshold):
    policy, data = Policy(exact), batch()
    add(policy, data, kl=0.01, threshold=threshold)
    assert policy.calls == ["policy", "reference"]
    assert (data["prev_logprobs"] == -1).all() and (data["reference_policy_logprobs"] == -2).all()


@pytest.mark.parametrize("age, first", [(0, -3.0), (1, -1.0)])  # with age 1 the loss corrects staleness
def test_stale_samples_use_generation_logprobs_as_old_logprobs_if_staleness_is_not_corrected(age, first):
    policy, data = Policy(exact=True), batch(versions=(4, 5))
    assert add(policy, data, age=age) == {"stale_samples": 1}
    assert data["prev_logprobs"].tolist() == [[first] * 3, [-1.0] * 3]


@pytest.mark.parametrize("versions, age, loss", [((4, 5), 0, {}), ((4, 5), 1, {"bypass_mode": True}), ((5, 5), 0, {})])
def test_optimal_token_baseline_reads_probabilities_and_their_squares_of_the_same_policy(versions, age, loss):
    name, data, read = "optimal_token_baseline", batch(versions), {}
    add(Policy(exact=True), data, age=age, estimator=name, **loss)
    stage = GroupAdvantages(make_estimator("grpo", AdvEstimatorConfig(name=name), ClippedPGLossConfig()), GRPOConfig())
    stage.estimator.compute_advantage = lambda **inputs: read.update(inputs) or torch.zeros(6)
    stage.add(data)
    assert read["logprobs_policy"].tolist() == [-3.0 if versions == (5, 5) else -1.0] * 6


def test_tokens_of_stale_samples_that_were_not_generated_get_recomputed_old_logprobs():
    policy, data = Policy(exact=True), batch(versions=(4, 5))
    data.lacks_generation_logprobs = True
    data.tokens["generation_logprobs"][:2] = 0
    add(policy, data)
    assert data["prev_logprobs"].tolist() == [[-1.0, -1.0, -3.0], [-1.0] * 3]


@pytest.mark.parametrize("settings, reads", [
    ({"kl": 0.01}, False), ({"kl": 0.01, "use_kl_in_reward": True}, True), ({"estimator": "mine.Estimator"}, True),
    ({"estimator": "opd"}, True), ({"name": "clip_cov"}, True), ({"name": "kl_cov"}, True),
])  # fmt: skip
def test_old_logprobs_are_computed_for_missing_generation_logprobs_if_they_are_needed(settings, reads):
    for lacks in (False, True):
        policy, data = Policy(exact=True), batch()
        data.lacks_generation_logprobs = lacks
        add(policy, data, **settings)
        assert ("policy" in policy.calls) == (reads and lacks)
        assert data.old_logprobs.tolist() == [-1.0 if reads and lacks else -3.0] * 6
