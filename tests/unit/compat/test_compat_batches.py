"""NeMo RL's batches: sharding, packing, dynamic batching, micro-batches, and gathering over ranks."""

import random
from copy import deepcopy

import pytest
import torch
from nemo_rl_cpp.compat.distributed.batched_data_dict import BatchedDataDict, SlicedDataDict
from nemo_rl_cpp.distributed import batched_data_dict as house
from reference import packing as reference


def make(rows, width=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    return BatchedDataDict(
        {
            "input_ids": torch.arange(rows * width).reshape(rows, width),
            "input_lengths": lengths,
            "name": [f"row {i}" for i in range(rows)],
        }
    )


def test_slice_chunk_select():
    batch = make(5)
    part = batch.slice(1, 3)
    assert isinstance(part, SlicedDataDict) and part["name"] == ["row 1", "row 2"]
    with pytest.raises(AssertionError, match="rows"):
        batch.slice(3, 6)
    assert [batch.chunk(r, 2)["name"] for r in (0, 1)] == [["row 0", "row 1", "row 2"], ["row 3", "row 4"]]
    with pytest.raises(AssertionError):
        make(2).chunk(1, 2)
    assert batch.select_indices([3, 0])["name"] == ["row 3", "row 0"]
    assert batch.select_indices(torch.tensor([4]))["input_ids"][0, 0] == 48
    assert batch.select_indices(torch.tensor([True, False, False, False, True]))["name"] == ["row 0", "row 4"]
    assert batch.select_indices([]).size == 0


def test_a_batch_of_the_house_becomes_one_of_nemo_rl():
    batch = BatchedDataDict(house.BatchedDataDict({"x": torch.tensor([1, 2, 3, 4])}))
    assert batch.elem_counts_per_gb is None and isinstance(batch, house.BatchedDataDict)
    assert [shard["x"].tolist() for shard in batch.shard_by_batch_size(2)] == [[1, 2], [3, 4]]
    for copy in (batch.repeat_interleave(2), batch.select_indices([0]), BatchedDataDict.from_batches([batch])):
        assert type(copy) is BatchedDataDict


def test_plain_shards():
    shards = make(8).shard_by_batch_size(2, batch_size=4)
    assert [s["name"] for s in shards] == [["row 0", "row 1", "row 4", "row 5"], ["row 2", "row 3", "row 6", "row 7"]]
    uneven = make(5).shard_by_batch_size(4, allow_uneven_shards=True)
    assert [s.size for s in uneven] == [2, 2, 1, 0]
    for bad in (dict(shards=3, batch_size=4), dict(shards=2, batch_size=3)):
        with pytest.raises(AssertionError):
            make(8).shard_by_batch_size(**bad)
    with pytest.raises(ValueError, match="batch_size"):
        make(8).shard_by_batch_size(3, batch_size=8, allow_uneven_shards=True)


def packing_args(**changes):
    return dict(
        max_tokens_per_microbatch=24, input_key="input_ids", input_lengths_key="input_lengths",
        algorithm="modified_first_fit_decreasing", sequence_length_pad_multiple=4,
    ) | changes  # fmt: skip


def dynamic_args(**changes):
    return (
        dict(
            max_tokens_per_microbatch=24,
            sequence_length_round=4,
            input_key="input_ids",
            input_lengths_key="input_lengths",
        )
        | changes
    )


@pytest.mark.parametrize("order", [None, "packer", "largest_first"])
def test_packed_shards_undo_and_keep_the_budget(order):
    rng = random.Random(1)
    for seed in range(200):
        shards = rng.choice([1, 2, 4])
        chunk = shards * rng.randint(2, 6)
        chunks = rng.randint(1, 3)
        batch = make(chunk * chunks, seed=seed)
        before = deepcopy(batch)
        args = packing_args() if order is None else packing_args(microbatch_order=order)
        parts, indices = batch.shard_by_batch_size(shards, batch_size=chunk, sequence_packing_args=args)
        assert batch["name"] == before["name"]
        padded = [-(-n // 4) * 4 for n in batch["input_lengths"].tolist()]
        for part in parts:
            assert sum(part.elem_counts_per_gb) == part.size and len(part.elem_counts_per_gb) == chunks
            for gb in range(chunks):
                sub = part.get_batch(gb)
                tokens = []
                for mb in sub.make_microbatch_iterator_for_packable_sequences():
                    tokens.append(sum(padded[int(name.split()[1])] for name in mb["name"]))
                    assert 0 < tokens[-1] <= 24
                    assert all(int(name.split()[1]) // chunk == gb for name in mb["name"])
                assert tokens == sub.micro_batch_lengths[0]
                assert sub.get_microbatch_iterator_for_packable_sequences_len() == (len(tokens), max(tokens))
                assert order != "largest_first" or tokens == sorted(tokens, reverse=True)
        assert len({len(part.micro_batch_indices[0]) for part in parts}) == 1  # same number of bins everywhere
        joined = BatchedDataDict.from_batches(parts)
        joined.reorder_data(indices)
        assert joined["name"] == before["name"] and torch.equal(joined["input_ids"], before["input_ids"])


def test_packing_bins_go_round_the_shards():
    batch = BatchedDataDict({"input_ids": torch.zeros(4, 8), "input_lengths": torch.tensor([8, 8, 4, 4])})
    args = packing_args(max_tokens_per_microbatch=8, algorithm="first_fit_decreasing")
    parts, indices = batch.shard_by_batch_size(2, sequence_packing_args=args)
    # bins [1], [0], [3, 2] and, to make their number even, [2] taken from the fullest
    assert indices == [1, 3, 0, 2]
    assert parts[0].micro_batch_indices == [[[0, 1], [1, 2]]] and parts[0].micro_batch_lengths == [[8, 4]]


def test_bad_packing_arguments():
    with pytest.raises(ValueError, match="microbatch_order"):
        make(4).shard_by_batch_size(1, sequence_packing_args=packing_args(microbatch_order="random"))
    with pytest.raises(AssertionError, match="cannot be passed together"):
        make(4).shard_by_batch_size(1, sequence_packing_args=packing_args(), dynamic_batching_args=dynamic_args())
    with pytest.raises(ValueError, match="train_mb_tokens"):
        make(4).shard_by_batch_size(1, dynamic_batching_args=dynamic_args(max_tokens_per_microbatch=3))


def test_dynamic_batching_plan_is_the_reference():
    rng = random.Random(2)
    for seed in range(200):
        shards = rng.choice([1, 2, 4])
        chunk = shards * rng.randint(1, 6)
        chunks = rng.randint(1, 3)
        batch = make(chunk * chunks, seed=seed)
        parts, order = batch.shard_by_batch_size(shards, batch_size=chunk, dynamic_batching_args=dynamic_args())
        lengths = batch["input_lengths"].tolist()
        expected = []
        for gb in range(chunks):
            rows = sorted(range(gb * chunk, (gb + 1) * chunk), key=lambda i: lengths[i])
            dealt = [rows[s::shards] for s in range(shards)]
            expected += [i for shard in dealt for i in shard]
            spans, widths = reference.dynamic_microbatches([[lengths[i] for i in s] for s in dealt], 4, 12, 24)
            for part in parts:
                assert part.micro_batch_indices[gb] == spans and part.micro_batch_lengths[gb] == widths
                sub = part.get_batch(gb, chunk // shards)
                batches = list(sub.make_microbatch_iterator_with_dynamic_shapes())
                assert len(batches) == sub.get_microbatch_iterator_dynamic_shapes_len()
                for mb, width in zip(batches, widths):
                    assert mb["input_ids"].shape[1] == width >= int(mb["input_lengths"].max())
                assert sum(mb.size for mb in batches) == chunk // shards
        assert order == expected
        if chunks == 1:
            joined = BatchedDataDict.from_batches(parts)
            joined.reorder_data(order)
            assert joined["name"] == batch["name"]


def test_microbatches_and_the_rest():
    batch = make(4)
    assert [mb.size for mb in batch.make_microbatch_iterator(2)] == [2, 2]
    with pytest.raises(AssertionError):
        list(batch.make_microbatch_iterator(3))
    with pytest.raises(AssertionError, match="exactly one chunk"):
        batch.get_microbatch_iterator_dynamic_shapes_len()
    assert batch.get_batch(1, 2)["name"] == ["row 2", "row 3"]
    batch.truncate_tensors(dim=1, truncated_len=5)
    assert batch["input_ids"].shape == (4, 5) and batch["input_lengths"].shape == (4,)
    assert batch.to("meta")["input_ids"].device.type == "meta"
    assert BatchedDataDict().size == 0 and batch.get_dict() is batch.data
    assert batch.get_multimodal_dict() == {}
    with pytest.raises(ValueError, match="Batch sizes are not the same"):
        BatchedDataDict(a=[1], b=[1, 2]).chunk(0, 1)


def _gather(rank, port, results):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    own = BatchedDataDict({"x": torch.full((rank + 1, 2), rank), "s": [f"r{rank}"] * (rank + 1)})
    gathered = own.all_gather(dist.group.WORLD)
    results.put((rank, gathered["x"].tolist(), gathered["s"]))
    dist.destroy_process_group()


@pytest.mark.slow
def test_all_gather_of_unequal_ranks():
    import socket

    import torch.multiprocessing as mp

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=_gather, args=(rank, port, results)) for rank in range(2)]
    for worker in workers:
        worker.start()
    got = [results.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join()
    assert all(x == [[0, 0], [1, 1], [1, 1]] and s == ["r0", "r1", "r1"] for _, x, s in got)
