"""The typed batches of a step: fields by name, errors by name, and the same as a mapping for losses and estimators."""

import pytest
import torch
from nemo_rl_cpp.experience.batches import MissingField, Rollouts, TrainBatch


def batch():
    return TrainBatch(
        input_ids=torch.tensor([[1, 2, 3], [4, 5, 0]]), input_lengths=torch.tensor([3, 2]), token_mask=torch.tensor([[0, 1, 1], [0, 1, 0]]),
        generation_logprobs=torch.zeros(2, 3), sample_mask=torch.tensor([1.0, 0.0]), rewards=torch.tensor([1.0, 0.0]),
        reward_parts={"right": torch.tensor([1.0, 0.0])},
    )  # fmt: skip


def test_a_field_that_no_stage_has_filled_is_an_error_by_its_name():
    made = batch()
    with pytest.raises(MissingField, match="the batch has no advantages: the stage advantage_calculation adds them"):
        _ = made.advantages
    with pytest.raises(KeyError, match="values: a critic adds them"):
        _ = made["values"]
    with pytest.raises(AttributeError, match="a TrainBatch has no advantage; it has input_ids, .*advantages"):
        _ = made.advantage
    assert "advantages" not in made and made.get("advantages") is None
    made.advantages = torch.ones(2, 3)
    assert "advantages" in made and torch.equal(made["advantages"], torch.ones(2, 3))


def test_the_same_as_a_mapping():
    made = batch()
    made["values"], made["my_column"] = torch.ones(2, 3), [1, 2]
    assert torch.equal(made.values, torch.ones(2, 3)) and made.further == {"my_column": [1, 2]}
    assert list(made) == [
        "input_ids",
        "input_lengths",
        "token_mask",
        "generation_logprobs",
        "sample_mask",
        "rewards",
        "values",
        "reward/right",
        "my_column",
    ]
    assert dict(made)["reward/right"].tolist() == [1.0, 0.0] and len(made) == 9
    del made["values"], made["my_column"], made["reward/right"]
    assert "values" not in made and made.reward_parts == made.further == {}


def test_masks_and_old_logprobs():
    made = batch()
    assert made.valid_mask.tolist() == [[0, 1, 1], [0, 0, 0]] and made.is_valid.sum() == 2 and made.size == 2
    assert made.old_logprobs is made.generation_logprobs
    made.prev_logprobs = torch.ones(2, 3)
    assert made.old_logprobs is made.prev_logprobs


def test_rollouts_name_what_is_missing_and_stay_rollouts():
    rows = Rollouts(total_reward=torch.tensor([1.0, 2.0]), note=["a", "b"])
    rows["reward/short"] = torch.tensor([0.5, 0.5])
    assert rows.unshaped_reward is rows.total_reward and list(rows.parts) == ["short"]
    with pytest.raises(MissingField, match="the rollouts have no group_id: it comes from the prompt source"):
        _ = rows.group_id
    picked = rows.select_indices(torch.tensor([False, True]))
    joined = Rollouts.from_batches([picked, rows])
    assert (
        type(picked) is type(joined) is Rollouts
        and joined.total_reward.tolist() == [2.0, 1.0, 2.0]
        and joined["note"] == ["b", "a", "b"]
    )
