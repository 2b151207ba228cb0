import pytest
import torch
from nemo_rl_cpp.distributed.ragged_batch import BatchedDataDict


def make(rows, width=12, seed=0):
    lengths = torch.randint(1, width + 1, (rows,), generator=torch.Generator().manual_seed(seed))
    ids, names = torch.arange(rows * width).reshape(rows, width), [f"row {i}" for i in range(rows)]
    return BatchedDataDict(input_ids=ids, input_lengths=lengths, name=names)


def test_batched_data_dict_from_batches_joins_tensors_and_lists_under_sorted_keys():
    a = {"z": torch.tensor([[1, 2]]), "list": ["a"], "r": torch.tensor([0.5])}
    b = {"z": torch.tensor([[3, 4], [5, 6]]), "list": ["b", "c"], "r": torch.tensor([1.5, 2.5])}
    joined = BatchedDataDict.from_batches([a, b])
    assert list(joined) == ["list", "r", "z"] and joined.size == 3
    assert joined["z"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert joined["list"] == ["a", "b", "c"] and joined["r"].tolist() == [0.5, 1.5, 2.5]
    with pytest.raises(KeyError, match="'y'"):
        BatchedDataDict.from_batches([{"x": [1], "y": [2]}, {"x": [3]}])


def test_batched_data_dict_repeat_interleave_deep_copies_list_items():
    batch = BatchedDataDict({"x": torch.tensor([1, 2]), "log": [[{"n": 1}], [{"n": 2}]]})
    repeated = batch.repeat_interleave(2)
    assert repeated["x"].tolist() == [1, 1, 2, 2]
    repeated["log"][0][0]["n"] = 7
    assert [log[0]["n"] for log in repeated["log"]] == [7, 1, 2, 2] and batch["log"][0][0]["n"] == 1


def test_batched_data_dict_select_indices_returns_the_requested_rows():
    batch = make(5)
    assert batch.select_indices([3, 0])["name"] == ["row 3", "row 0"]
    assert batch.select_indices(torch.tensor([4]))["input_ids"][0, 0] == 48
    assert batch.select_indices(torch.tensor([True, False, False, False, True]))["name"] == ["row 0", "row 4"]
    assert batch.select_indices([]).size == 0
