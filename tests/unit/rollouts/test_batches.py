import pytest
import torch
from nemo_rl_cpp.rollouts.batches import MissingField, Rollouts, TrainBatch


def batch():
    return TrainBatch.of({
        "input_ids": torch.tensor([[1, 2, 3], [4, 5, 0]]), "input_lengths": torch.tensor([3, 2]),
        "token_mask": torch.tensor([[0, 1, 1], [0, 1, 0]]), "generation_logprobs": torch.zeros(2, 3),
        "sample_mask": torch.tensor([1.0, 0.0]), "rewards": torch.tensor([1.0, 0.0]), "reward/right": torch.tensor([1.0, 0.0]),
    })  # fmt: skip


def test_error_for_a_missing_training_batch_field_names_the_stage_that_adds_the_field():
    made = batch()
    with pytest.raises(MissingField, match="the batch has no advantages: the stage advantage_calculation adds them"):
        _ = made.advantages
    with pytest.raises(KeyError, match="values: a critic adds them"):
        _ = made["values"]
    with pytest.raises(AttributeError, match="a TrainBatch has no advantage; it has input_ids, .*advantages"):
        _ = made.advantage
    assert "advantages" not in made and made.get("advantages") is None
    made.advantages = torch.ones(5)
    assert "advantages" in made and torch.equal(made["advantages"], torch.tensor([[1.0, 1, 1], [1, 1, 0]]))


def test_training_batch_has_ragged_tensors_as_attributes_and_padded_tensors_as_items():
    made = batch()
    assert made.input_ids.tolist() == [1, 2, 3, 4, 5] and made["input_ids"].tolist() == [[1, 2, 3], [4, 5, 0]]
    assert made.offsets.tolist() == [0, 3, 5] and made.input_lengths.tolist() == [3, 2] and made.size == 2
    made.values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 99.0]])  # what stands behind the end is dropped
    assert made.values.tolist() == [1, 2, 3, 4, 5] and made["values"].tolist() == [[1, 2, 3], [4, 5, 0]]
    with pytest.raises(ValueError, match=r"shape \(4,\) does not belong to the 5 tokens .*, padded \[2, 3\]"):
        made.values = torch.ones(4)


def test_training_batch_can_be_read_and_written_as_a_mapping():
    made = batch()
    made["values"], made["my_column"], made["my_tokens"] = (
        torch.ones(2, 3),
        [1, 2],
        torch.tensor([[1, 2, 3], [4, 5, 6]]),
    )
    assert torch.equal(made.values, torch.ones(5)) and made["my_tokens"].tolist() == [[1, 2, 3], [4, 5, 0]]
    assert list(made) == [
        "input_ids", "input_lengths", "token_mask", "generation_logprobs", "values", "my_tokens", "sample_mask",
        "rewards", "reward/right", "my_column",
    ]  # fmt: skip
    assert dict(made)["reward/right"].tolist() == [1.0, 0.0] and len(made) == 10
    del made["values"], made["my_column"], made["reward/right"]
    assert "values" not in made and "my_column" not in made and "reward/right" not in made
    with pytest.raises(KeyError, match="lengths of a batch are not changed"):
        made["input_lengths"] = torch.tensor([1, 1])


def test_valid_mask_and_old_logprobs_of_a_training_batch_are_derived_from_other_fields():
    made = batch()
    assert made.valid_mask.tolist() == [0, 1, 1, 0, 0] and made.is_valid.sum() == 2
    assert made.old_logprobs is made.generation_logprobs
    made.prev_logprobs = torch.ones(2, 3)
    assert made.old_logprobs is made.prev_logprobs


def test_error_for_a_missing_rollout_field_names_the_source_of_the_field():
    rows = Rollouts(total_reward=torch.tensor([1.0, 2.0]), note=["a", "b"])
    with pytest.raises(MissingField, match="the rollouts have no group_id: it comes from the prompt source"):
        _ = rows.group_id
    picked = rows.select_indices(torch.tensor([False, True]))
    joined = Rollouts.from_batches([picked, rows])
    assert type(picked) is type(joined) is Rollouts
    assert joined.total_reward.tolist() == [2.0, 1.0, 2.0] and joined["note"] == ["b", "a", "b"]
