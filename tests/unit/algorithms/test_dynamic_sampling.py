import io

import pytest
import torch
from nemo_rl_cpp.algorithms.dynamic_sampling import DynamicSamplingExhausted, GroupSampler
from nemo_rl_cpp.config.loop import GRPOConfig
from nemo_rl_cpp.distributed.ragged_batch import BatchedDataDict


def rollouts(*groups, start=0, version=0):
    """Return rollouts with one row per reward; `name` is "<group>.<row in the group>"."""
    ids = [i for i, group in enumerate(groups) for _ in group]
    return BatchedDataDict(
        total_reward=torch.tensor([r for group in groups for r in group], dtype=torch.float32),
        group_id=torch.tensor(ids),
        weight_version=torch.full((len(ids),), version),
        name=[f"{start + i}.{k}" for i, group in enumerate(groups) for k in range(len(group))],
    )


RIGHT, WRONG, MIXED = (1.0, 1.0), (0.0, 0.0), (0.0, 1.0)


def test_all_groups_are_kept_if_dynamic_sampling_is_disabled():
    sampler = GroupSampler(num_groups=3)
    assert not sampler.full
    sampler.add(rollouts(RIGHT, WRONG, MIXED))
    assert sampler.full
    batch = sampler.take()
    assert batch["name"] == ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1"] and sampler.metrics == {}
    assert not sampler.full and sampler.cached_groups == 0


def test_dynamic_sampling_collects_unequal_reward_groups_over_batches_and_drops_the_surplus():
    sampler = GroupSampler(num_groups=2, enabled=True)
    sampler.add(rollouts(RIGHT, MIXED, WRONG))
    assert not sampler.full
    sampler.add(rollouts(MIXED, WRONG, MIXED, start=10))
    batch = sampler.take()
    assert batch["name"] == ["1.0", "1.1", "10.0", "10.1"] and batch["group_id"].tolist() == [0, 0, 1, 1]
    assert sampler.metrics == {
        "dynamic_sampling_num_gen_batches": 2,
        "dynamic_sampling_num_discarded_valid_samples": 2,
        "dynamic_sampling_num_kept_surplus_samples": 0,
        "dynamic_sampling_kept_groups": 2,
        "dynamic_sampling_discarded_groups": 3,
        "dynamic_sampling_all_right_groups": 1,
        "dynamic_sampling_all_wrong_groups": 2,
        "dynamic_sampling_mixed_groups": 3,
        "reward": pytest.approx(5 / 12),
        "filtered_reward": 0.5,
    }
    assert sampler.cached_groups == 0


def test_dynamic_sampling_selects_groups_by_their_rewards_before_reward_shaping():
    """Shaping by length can make equal rewards differ, and different rewards equal."""
    batch = rollouts((1.0, 0.5), (0.0, 0.0))
    batch["unshaped_total_reward"] = torch.tensor([1.0, 1.0, 0.0, 1.0])
    sampler = GroupSampler(num_groups=1, enabled=True)
    sampler.add(batch)
    assert sampler.take()["name"] == ["1.0", "1.1"]


def test_dynamic_sampling_keeps_a_group_if_any_two_of_its_rewards_differ():
    sampler = GroupSampler(num_groups=1, enabled=True)
    sampler.add(rollouts((0.1, 0.1, 0.1), (0.3, 0.3, 0.30000004)))  # the first has std 1e-4 by cancellation, say
    assert sampler.take()["name"] == ["1.0", "1.1", "1.2"]


def test_dynamic_sampling_joins_rounds_whose_environments_return_other_columns():
    first, second = rollouts(MIXED), rollouts(MIXED, start=1)
    first["reward/format"], second["reward/length"] = torch.tensor([0.0, 1.0]), torch.tensor([2.0, 0.0])
    second["mask_sample"] = torch.tensor([True, False])
    sampler = GroupSampler(num_groups=2, enabled=True)
    sampler.add(first), sampler.add(second)
    batch = sampler.take()
    assert batch["reward/format"].tolist() == [0, 1, 0, 0] and batch["reward/length"].tolist() == [0, 0, 2, 0]
    assert batch["mask_sample"].tolist() == [False, False, True, False]


def test_surplus_groups_of_dynamic_sampling_are_used_in_the_next_step():
    sampler = GroupSampler(num_groups=2, enabled=True, keep_surplus=True)
    sampler.add(rollouts(MIXED, MIXED, MIXED))
    assert sampler.take()["group_id"].tolist() == [0, 0, 1, 1]
    assert sampler.metrics["dynamic_sampling_num_kept_surplus_samples"] == 2
    assert sampler.cached_groups == 1 and not sampler.full
    sampler.add(rollouts(WRONG, MIXED, start=10, version=1))
    batch = sampler.take()
    assert batch["name"] == ["2.0", "2.1", "11.0", "11.1"] and batch["weight_version"].tolist() == [0, 0, 1, 1]
    assert sampler.metrics["dynamic_sampling_num_gen_batches"] == 1
    sampler.add(rollouts(MIXED, MIXED, MIXED, MIXED, start=20))
    sampler.take()
    assert sampler.full and sampler.take()["name"] == ["22.0", "22.1", "23.0", "23.1"]  # without generation
    assert sampler.metrics["dynamic_sampling_num_gen_batches"] == 0 and sampler.metrics["reward"] == 0.5


@pytest.mark.parametrize("limit", [1, 3, 10])
def test_dynamic_sampling_raises_if_max_gen_batches_give_too_few_groups_with_unequal_rewards(limit):
    sampler = GroupSampler(num_groups=4, enabled=True, max_gen_batches=limit)
    for _ in range(limit - 1):
        sampler.add(rollouts(WRONG, RIGHT, WRONG))
        assert not sampler.full
    with pytest.raises(DynamicSamplingExhausted) as error:
        sampler.add(rollouts(WRONG, RIGHT, MIXED))
    message = str(error.value)
    assert f"1 of the 4 groups that a step needs in {limit} generation batches" in message
    assert f"of {3 * limit} groups {limit} were all right, {2 * limit - 1} all wrong and 1 mixed" in message
    assert "batch_multiplier" in message and isinstance(error.value, ValueError)


def test_max_gen_batches_limits_dynamic_sampling_in_each_step_separately():
    sampler = GroupSampler(num_groups=1, enabled=True, max_gen_batches=2)
    for _ in range(5):
        sampler.add(rollouts(WRONG))
        sampler.add(rollouts(MIXED))
        sampler.take()


def test_dynamic_sampling_gives_the_same_batches_after_a_resume():
    torch.manual_seed(0)
    batches = [rollouts(*torch.randint(0, 2, (5, 2)).tolist(), start=10 * i) for i in range(40)]

    def run(resume_after):
        sampler = GroupSampler(num_groups=3, enabled=True, max_gen_batches=20, keep_surplus=True)
        steps = []
        for i, batch in enumerate(batches):
            batch["weight_version"] = torch.full((10,), len(steps))
            sampler.add(batch)
            if i == resume_after:
                saved = io.BytesIO()
                torch.save(sampler.state_dict(), saved)
                saved.seek(0)
                sampler = GroupSampler(num_groups=3, enabled=True, max_gen_batches=20, keep_surplus=True)
                sampler.load_state_dict(torch.load(saved, weights_only=True))
            while sampler.full:
                batch = sampler.take()
                steps.append((batch["name"], batch["weight_version"].tolist(), sampler.metrics))
        return steps

    unbroken = run(None)
    assert len(unbroken) > 10
    for cut in range(0, 40, 3):
        assert run(cut) == unbroken


def test_dynamic_sampling_rejects_nan_rewards():
    with pytest.raises(ValueError, match="sample 1 is nan"):
        GroupSampler(1).add(rollouts((1.0, float("nan"))))
    sampler = GroupSampler.from_config(GRPOConfig(num_prompts_per_step=2, use_dynamic_sampling=True))
    assert sampler.enabled and sampler.max_gen_batches == 10 and not sampler.keep_surplus
