"""Which log-probabilities are computed before training, and which are left out."""

from types import SimpleNamespace

import pytest
import torch
from nemo_rl_cpp.config.loss import ClippedPGLossConfig
from nemo_rl_cpp.rollouts.batches import LogprobNeeds, TrainBatch, add_logprobs


class Policy:
    def __init__(self, exact):
        self.skips_prev_logprobs = exact
        self.calls = []

    def prepare_for_lp_inference(self):
        self.calls.append("prepare")

    def get_logprobs(self, data):
        self.calls.append("policy")
        return {"logprobs": torch.full((2, 3), -1.0)}

    def get_reference_policy_logprobs(self, data):
        self.calls.append("reference")
        return {"reference_logprobs": torch.full((2, 3), -2.0)}


def batch(versions=(5, 5)):
    return TrainBatch.of({
        "input_ids": torch.zeros(2, 3, dtype=torch.int64), "input_lengths": torch.tensor([3, 3]), "token_mask": torch.ones(2, 3),
        "generation_logprobs": torch.full((2, 3), -3.0), "sample_mask": torch.ones(2), "rewards": torch.zeros(2),
        "weight_version": torch.tensor(versions),
    })  # fmt: skip


def test_no_logprobs_are_computed_if_generation_is_exact():
    policy, data = Policy(exact=True), batch()
    assert add_logprobs(policy, data, LogprobNeeds(False, False), 5) == {"stale_samples": 0}
    assert policy.calls == ["prepare"] and "prev_logprobs" not in data and "reference_policy_logprobs" not in data


@pytest.mark.parametrize("exact, previous", [(False, False), (True, True)])
def test_batch_is_scored_if_generation_is_inexact_or_old_logprobs_are_needed(exact, previous):
    policy, data = Policy(exact), batch()
    add_logprobs(policy, data, LogprobNeeds(reference=True, previous=previous), 5)
    assert policy.calls == ["prepare", "policy", "reference"]
    assert (data["prev_logprobs"] == -1).all() and (data["reference_policy_logprobs"] == -2).all()


def test_stale_samples_keep_the_logprobs_of_the_policy_that_sampled_them():
    policy, data = Policy(exact=True), batch(versions=(4, 5))
    assert add_logprobs(policy, data, LogprobNeeds(False, False), 5) == {"stale_samples": 1}
    assert data["prev_logprobs"].tolist() == [[-3.0] * 3, [-1.0] * 3]


def test_current_policy_scores_all_samples_if_the_loss_corrects_staleness():
    policy, data = Policy(exact=True), batch(versions=(4, 5))
    assert add_logprobs(policy, data, LogprobNeeds(False, False, corrected=True), 5) == {"stale_samples": 1}
    assert data["prev_logprobs"].tolist() == [[-1.0] * 3, [-1.0] * 3]


@pytest.mark.parametrize("estimator, lacks", [(True, False), (False, True), (True, True)])
def test_messages_without_generation_logprobs_are_scored_if_the_estimator_needs_them(estimator, lacks):
    policy, data = Policy(exact=True), batch()
    data.lacks_generation_logprobs = lacks
    add_logprobs(policy, data, LogprobNeeds(False, False, estimator=estimator), 5)
    scored = estimator and lacks
    assert policy.calls == ["prepare", "policy"][: 1 + scored]
    assert data.old_logprobs.tolist() == [-1.0 if scored else -3.0] * 6


@pytest.mark.parametrize(
    "kl, threshold, age, in_reward, name, expected",
    [
        (0.0, None, 0, True, "gae", (False, False, False, False)),
        (0.01, None, 0, False, "gae", (True, False, False, False)),
        (0.01, None, 0, True, "gae", (True, False, False, True)),
        (0, None, 0, False, "mine.Estimator", (False, False, False, True)),
        (0, 2.0, 0, False, "gae", (False, True, False, False)),
        (0, None, 1, False, "gae", (False, False, True, False)),
    ],
)
def test_required_logprobs_follow_the_configuration(kl, threshold, age, in_reward, name, expected):
    loop = SimpleNamespace(
        seq_logprob_error_threshold=threshold, trajectory_age=age, adv_estimator=SimpleNamespace(name=name)
    )
    loss = ClippedPGLossConfig(reference_policy_kl_penalty=kl, use_kl_in_reward=in_reward)
    needs = LogprobNeeds.of(loss, loop)
    assert (needs.reference, needs.previous, needs.corrected, needs.estimator) == expected
    assert not (needs.bypassed or needs.entropies or needs.sum_pi_squared or needs.candidates)
