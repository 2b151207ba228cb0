"""How the samples of a batch are dealt to processes: all of them, once, groups together, about equally many tokens."""

from itertools import product

import pytest
import torch
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch, offsets_of
from nemo_rl_cpp.distributed.ranks import Ranks, deal, generated_by, prompt_lengths


def batch(lengths: list[int], groups: list[int] | None = None) -> RaggedBatch:
    lengths = torch.tensor(lengths)
    samples = {} if groups is None else {"group_id": torch.tensor(groups)}
    return RaggedBatch(offsets_of(lengths), {"input_ids": torch.zeros(int(lengths.sum()), dtype=torch.long)}, samples)


DEALT = {  # lengths, groups, first row, last row, parts -> the rows of each part
    # 9 -> a; 7 -> b; 5 -> b (12); 4 -> a (13); 3 -> b (15)
    "the longest to the part with the fewest tokens": ([3, 9, 4, 7, 5], None, 0, 5, 2, [[1, 2], [0, 3, 4]]),
    "groups together": ([5, 5, 1, 1, 4, 4], [7, 7, 8, 8, 9, 9], 0, 6, 2, [[0, 1], [2, 3, 4, 5]]),
    "fewer groups than parts": ([5, 5, 5, 5], [0, 0, 0, 0], 0, 4, 2, [[0, 2], [1, 3]]),
    "without a group individually": ([2, 2, 2, 2], [-1, -1, -1, -1], 0, 4, 4, [[0], [1], [2], [3]]),
    "one part in the batch's order": ([1, 9, 2], None, 1, 3, 1, [[1, 2]]),
}


@pytest.mark.parametrize("case", DEALT)
def test_samples_are_assigned_to_ranks_as_worked_out_by_hand(case):
    lengths, groups, first, last, parts, expected = DEALT[case]
    assert deal(batch(lengths, groups), first, last, parts) == expected


@pytest.mark.parametrize("seed", range(8))
def test_every_sample_is_assigned_to_one_rank_and_token_counts_are_balanced(seed):
    generator = torch.Generator().manual_seed(seed)
    groups = torch.arange(24).repeat_interleave(4)
    lengths = torch.randint(1, 200, (96,), generator=generator)
    for parts in (2, 3, 4, 8):
        dealt = deal(batch(lengths.tolist(), groups.tolist()), 0, 96, parts)
        assert sorted(row for rows in dealt for row in rows) == list(range(96))
        loads = [int(lengths[rows].sum()) for rows in dealt]
        assert max(loads) - min(loads) <= int(lengths.view(24, 4).sum(1).max())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gradient_blocks_do_not_depend_on_the_number_of_ranks(size):
    data = batch([3, 9, 4, 7, 5, 2, 8, 6])
    one = Ranks().blocks(data, 0, 8, 4)
    several = [block for rank in range(size) for block in Ranks(rank, size).blocks(data, 0, 8, 4)]
    assert several == one and len(one) == 4
    in_turns = [Ranks(rank, size).blocks(data, 0, 8, 4, in_turns=True) for rank in range(size)]
    assert [block for turn in zip(*in_turns) for block in turn] == one


def test_samples_are_trained_on_the_rank_that_generated_them():
    """Two answers a prompt; the prompts' tokens decide, unless the answers make a block much too long."""
    prompts = batch([6, 6, 2, 2, 5, 5, 3, 3], [0, 0, 1, 1, 2, 2, 3, 3])
    for answers, kept in (([1, 2, 1, 3, 2, 1, 3, 1], True), ([1, 1, 40, 50, 1, 1, 30, 1], False)):
        whole = batch((prompts.lengths + torch.tensor(answers)).tolist(), [0, 0, 1, 1, 2, 2, 3, 3])
        mask = torch.cat([torch.tensor([0] * n + [1] * m) for n, m in zip(prompts.lengths.tolist(), answers)])
        whole.tokens["token_mask"] = mask
        assert prompt_lengths(whole) == prompts.lengths.tolist()
        for ranks, turns in product((1, 2, 4), (False, True)):
            trained = [sorted(sum(Ranks(rank, ranks).blocks(whole, 0, 8, 4, turns), [])) for rank in range(ranks)]
            assert (generated_by(prompts, ranks, 4, 8, turns) == trained) == (kept or ranks == 1)


def test_rank_generates_the_samples_that_it_trains_of_every_global_batch():
    assert generated_by(batch([5, 1, 1, 1, 7, 6]), 2, None, 3) == [[0, 4], [1, 2, 3, 5]]
