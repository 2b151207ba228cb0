import torch
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch, offsets_of


def padded():
    return {
        "input_ids": torch.tensor([[1, 2, 0, 0], [3, 4, 5, 0], [6, 0, 0, 0]]), "input_lengths": torch.tensor([2, 3, 1]),
        "mask": torch.tensor([[0, 1, 9, 9], [0, 1, 1, 9], [1, 9, 9, 9]]), "reward": torch.tensor([1.0, 2.0, 3.0]), "name": ["a", "b", "c"],
        "states": torch.arange(24.0).reshape(3, 4, 2), "epoch": 7,
    }  # fmt: skip


def test_ragged_batch_made_from_a_padded_batch_has_per_token_and_per_sample_fields():
    batch = RaggedBatch.of(padded())
    assert batch.tokens["input_ids"].tolist() == [1, 2, 3, 4, 5, 6] and batch.tokens["mask"].tolist() == [
        0, 1, 0, 1, 1, 1,
    ]  # fmt: skip
    assert batch.tokens["states"].shape == (6, 2) and batch.tokens["states"][3].tolist() == [10.0, 11.0]
    assert set(batch.samples) == {"reward", "name", "epoch"} and batch.size == 3 and batch.num_tokens == 6
    assert batch.offsets.tolist() == [0, 2, 5, 6] == offsets_of(torch.tensor([2, 3, 1])).tolist()
    assert batch.sample_of_token.tolist() == [0, 0, 1, 1, 1, 2]
    assert RaggedBatch.of(batch) is batch


def test_padded_tensors_of_a_ragged_batch_are_filled_with_zeros_and_pad_tokens():
    batch = RaggedBatch.of(padded())
    batch.pad_token_id = -1
    assert batch["input_ids"].tolist() == [[1, 2, -1, -1], [3, 4, 5, -1], [6, -1, -1, -1]]
    assert batch["mask"].tolist() == [[0, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 0]] and batch["epoch"] == 7
    assert batch["input_lengths"].tolist() == [2, 3, 1] and batch["states"].shape == (3, 4, 2)


def test_ragged_batch_sums_token_values_per_sample_and_expands_sample_values_to_tokens():
    batch = RaggedBatch.of(padded())
    assert batch.by_sample(batch.tokens["mask"]).tolist() == [1, 2, 1]
    assert batch.by_token(batch.samples["reward"]).tolist() == [1, 1, 2, 2, 2, 3]
    assert [row.tolist() for row in batch.rows(batch.tokens["input_ids"])] == [[1, 2], [3, 4, 5], [6]]


def test_ragged_batch_places_returns_token_indices_of_selected_samples_padded_to_equal_length():
    places, inside = RaggedBatch.of(padded()).places(torch.tensor([2, 0]), 2)
    assert places.tolist() == [[5, 0], [0, 1]] and inside.tolist() == [[True, False], [True, True]]


def test_assignments_to_a_copy_of_a_ragged_batch_do_not_change_the_original():
    batch = RaggedBatch.of(padded())
    other = batch.copy()
    other["reward"], other.tokens["mask"] = torch.zeros(3), torch.zeros(6)
    assert batch["reward"].tolist() == [1, 2, 3] and batch.tokens["mask"].sum() == 4
