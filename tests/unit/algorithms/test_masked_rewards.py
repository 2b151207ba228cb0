import pytest
import torch
from nemo_rl_cpp.algorithms.advantage_estimator import GDPOAdvantageEstimator, GRPOAdvantageEstimator
from nemo_rl_cpp.algorithms.algorithm import GroupAdvantages
from nemo_rl_cpp.algorithms.dynamic_sampling import GroupSampler
from nemo_rl_cpp.config.loop import AdvEstimatorConfig, GRPOConfig
from nemo_rl_cpp.distributed.ragged_batch import BatchedDataDict
from nemo_rl_cpp.rollouts.batches import TrainBatch


def advantages(batch, **grpo):
    """Return each sample's GRPO advantage, relative to the mean of its group."""
    settings = AdvEstimatorConfig(use_leave_one_out_baseline=False, normalize_rewards=False)
    GroupAdvantages(GRPOAdvantageEstimator(settings, None), GRPOConfig(**grpo)).add(batch)
    return batch["advantages"][:, 0].tolist()


def train_batch(rewards, masks):
    size = len(rewards)
    fields = {
        "input_ids": torch.zeros(size, 2, dtype=torch.long), "group_id": torch.zeros(size, dtype=torch.long), "rewards": torch.tensor(rewards),
        "token_mask": torch.ones(size, 2), "sample_mask": torch.tensor(masks), "generation_logprobs": torch.zeros(size, 2),
    }  # fmt: skip
    return TrainBatch.of({"input_lengths": torch.full((size,), 2), **fields})


def test_grpo_baseline_ignores_masked_samples_if_masked_rewards_are_excluded():
    batch = train_batch([0.0, 1.0, 0.0, 1.0], [0.0, 1.0, 1.0, 1.0])  # the first was cut off
    included = advantages(batch)
    excluded = advantages(batch, masked_reward_policy="exclude")
    assert included == [-0.5, 0.5, -0.5, 0.5]
    assert excluded[1:] == pytest.approx([1 / 3, -2 / 3, 1 / 3])


@pytest.mark.parametrize("reward", [0.0, 100.0])
def test_gdpo_advantages_ignore_masked_samples_if_masked_rewards_are_excluded(reward):
    batch, without = train_batch([0.0] * 4, [0.0, 1.0, 1.0, 1.0]), train_batch([0.0] * 3, [1.0] * 3)
    for name, values in (("reward/a", [1.0, 0.0, 1.0]), ("reward/b", [0.5, 0.0, 0.2])):
        batch[name], without[name] = torch.tensor([reward, *values]), torch.tensor(values)
    stage = GroupAdvantages(GDPOAdvantageEstimator({"name": "gdpo"}, None), GRPOConfig(masked_reward_policy="exclude"))
    stage.add(batch)
    stage.add(without)
    assert torch.equal(batch["advantages"][1:], without["advantages"])


def rollouts(rewards, truncated, masked=None):
    batch = BatchedDataDict(
        total_reward=torch.tensor(rewards), group_id=torch.arange(len(rewards)) // 4, truncated=torch.tensor(truncated),
        loss_multiplier=torch.ones(len(rewards)), weight_version=torch.zeros(len(rewards)),
    )  # fmt: skip
    if masked is not None:
        batch["mask_sample"] = torch.tensor(masked)
    return batch


def mixed_groups(rewards, truncated, masked=None, **section):
    settings = dict(num_generations_per_prompt=4, use_dynamic_sampling=True, dynamic_sampling_max_gen_batches=9)
    sampler = GroupSampler.from_config(GRPOConfig(num_prompts_per_step=9, **settings, **section))
    sampler.add(rollouts(rewards, truncated, masked))
    return sampler.cached_groups


CUT = ([0.0, 1.0, 1.0, 1.0], [True, False, False, False])


@pytest.mark.parametrize("section, kept", [
    ({}, 1),
    ({"overlong_filtering": True}, 1),
    ({"overlong_filtering": True, "masked_reward_policy": "include"}, 1),
    ({"overlong_filtering": True, "masked_reward_policy": "exclude"}, 0),  # all that vote are right
    ({"masked_reward_policy": "exclude"}, 1),  # without filtering the truncated one has its gradient, and votes
])  # fmt: skip
def test_dynamic_sampling_ignores_truncated_samples_if_masked_rewards_are_excluded(section, kept):
    assert mixed_groups(*CUT, **section) == kept


@pytest.mark.parametrize(
    "masked, kept", [([True, False, False, False], 0), ([True] * 3 + [False], 0), ([True] * 4, 0), ([False] * 4, 1)]
)
def test_dynamic_sampling_ignores_samples_masked_by_an_environment(masked, kept):
    assert mixed_groups([0.0, 1.0, 1.0, 1.0], [False] * 4, masked, masked_reward_policy="exclude") == kept


def test_dynamic_sampling_keeps_masked_samples_of_selected_groups():
    sampler = GroupSampler.from_config(
        GRPOConfig(
            num_prompts_per_step=1, num_generations_per_prompt=4, use_dynamic_sampling=True, dynamic_sampling_max_gen_batches=1,
            overlong_filtering=True, masked_reward_policy="exclude",
        )
    )  # fmt: skip
    sampler.add(rollouts([0.0, 1.0, 0.0, 1.0], [True, False, False, False]))
    assert sampler.take().size == 4
