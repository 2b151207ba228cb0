import pytest
import torch
from nemo_rl_cpp.distributed.ragged_batch import BatchedDataDict


def make(rows, width=12, seed=0):
    lengths = torch.randint(1, width + 1, (rows,), generator=torch.Generator().manual_seed(seed))
    ids, names = torch.arange(rows * width).reshape(rows, width), [f"row {i}" for i in range(rows)]
    return BatchedDataDict(input_ids=ids, input_lengths=lengths, name=names)


def test_batched_data_dict_from_batches_pads_tensors_and_sorts_the_keys():
    a = {"z": torch.tensor([[1, 2]]), "list": ["a"], "r": torch.tensor([0.5]), "x": torch.ones(1, 2, 3)}
    b = {"z": torch.tensor([[3], [4]]), "list": ["b", "c"], "r": torch.tensor([1.5, 2.5]), "x": torch.ones(2, 4, 3)}
    joined = BatchedDataDict.from_batches([a, b], pad_value_dict={"z": 9})
    assert list(joined) == ["list", "r", "x", "z"]
    assert joined["z"].tolist() == [[1, 2], [3, 9], [4, 9]]
    assert joined["list"] == ["a", "b", "c"] and joined["r"].tolist() == [0.5, 1.5, 2.5]
    assert joined.size == 3 and joined["x"].shape == (3, 4, 3) and joined["x"].sum() == 2 * 3 + 2 * 4 * 3


def test_batched_data_dict_from_batches_rejects_missing_keys_and_ignores_empty_batches():
    with pytest.raises(KeyError, match="'y'"):
        BatchedDataDict.from_batches([{"x": [1], "y": [2]}, {"x": [3]}])
    with pytest.raises(KeyError, match="'y'"):
        BatchedDataDict.from_batches([{"x": torch.zeros(0), "y": torch.zeros(0)}, {"x": torch.ones(1)}])
    assert BatchedDataDict.from_batches([{}, {"x": [3]}])["x"] == [3]
    joined = BatchedDataDict.from_batches([{"x": torch.zeros(0)}, {"x": torch.ones(1), "y": torch.ones(1), "z": ["a"]}])
    assert {key: list(value) for key, value in joined.items()} == {"x": [1.0], "y": [1.0], "z": ["a"]}
    assert BatchedDataDict.from_batches([]).size == 0
    with pytest.raises(NotImplementedError, match="'x'"):
        BatchedDataDict.from_batches([{"x": 3}])


def test_batched_data_dict_repeat_interleave_deep_copies_list_items():
    batch = BatchedDataDict({"x": torch.tensor([1, 2]), "log": [[{"n": 1}], [{"n": 2}]]})
    repeated = batch.repeat_interleave(2)
    assert repeated["x"].tolist() == [1, 1, 2, 2]
    repeated["log"][0][0]["n"] = 7
    assert [log[0]["n"] for log in repeated["log"]] == [7, 1, 2, 2] and batch["log"][0][0]["n"] == 1


def test_batched_data_dict_slice_and_select_indices_return_the_requested_rows():
    batch = make(5)
    assert batch.slice(1, 3)["name"] == ["row 1", "row 2"] and batch.slice(4, 5).size == 1
    with pytest.raises(ValueError, match="rows"):
        batch.slice(3, 6)
    assert batch.select_indices([3, 0])["name"] == ["row 3", "row 0"]
    assert batch.select_indices(torch.tensor([4]))["input_ids"][0, 0] == 48
    assert batch.select_indices(torch.tensor([True, False, False, False, True]))["name"] == ["row 0", "row 4"]
    assert batch.select_indices([]).size == 0
    for wrong in ([1.7], torch.tensor([True, False])):
        with pytest.raises(ValueError, match="expected row numbers, or 5 booleans"):
            batch.select_indices(wrong)
