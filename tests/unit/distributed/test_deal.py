import random
from itertools import product

import pytest
import torch
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch, offsets_of
from nemo_rl_cpp.distributed.ranks import LEAST_GAIN, Move, Ranks, deal, even_moves, generated_by, prompt_lengths


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
def test_assignment_of_samples_to_ranks_matches_hand_computed_cases(case):
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
def test_assignment_of_samples_to_gradient_blocks_does_not_depend_on_the_number_of_ranks(size):
    data = batch([3, 9, 4, 7, 5, 2, 8, 6])
    one = Ranks().blocks(data, 0, 8, 4)
    several = [block for rank in range(size) for block in Ranks(rank, size).blocks(data, 0, 8, 4)]
    assert several == one and len(one) == 4
    in_turns = [Ranks(rank, size).blocks(data, 0, 8, 4, in_turns=True) for rank in range(size)]
    assert [block for turn in zip(*in_turns) for block in turn] == one


def test_samples_are_trained_on_their_generating_rank_unless_ranks_are_too_unbalanced():
    """Each prompt has two responses. The prompts' tokens decide, unless the responses make a block much too long."""
    prompts = batch([6, 6, 2, 2, 5, 5, 3, 3], [0, 0, 1, 1, 2, 2, 3, 3])
    for answers, kept in (([1, 2, 1, 3, 2, 1, 3, 1], True), ([1, 1, 40, 50, 1, 1, 30, 1], False)):
        whole = batch((prompts.lengths + torch.tensor(answers)).tolist(), [0, 0, 1, 1, 2, 2, 3, 3])
        mask = torch.cat([torch.tensor([0] * n + [1] * m) for n, m in zip(prompts.lengths.tolist(), answers)])
        whole.tokens["token_mask"] = mask
        assert prompt_lengths(whole) == prompts.lengths.tolist()
        for ranks, turns in product((1, 2, 4), (False, True)):
            trained = [sorted(sum(Ranks(rank, ranks).blocks(whole, 0, 8, 4, turns), [])) for rank in range(ranks)]
            assert (generated_by(prompts, ranks, 4, 8, turns) == trained) == (kept or ranks == 1)


def test_each_rank_generates_the_samples_that_the_rank_will_train_in_every_global_batch():
    assert generated_by(batch([5, 1, 1, 1, 7, 6]), 2, None, 3) == [[0, 4], [1, 2, 3, 5]]


def test_load_balancing_moves_the_best_fitting_samples_from_the_most_to_the_least_loaded_rank():
    units = [[([0, 1], 40), ([4], 10), ([6], 30)], [([2, 3], 20)], [([5], 50)]]
    assert even_moves(units) == [Move([6], 0, 1)]  # 80, 20, 50 -> 50, 50, 50
    assert even_moves([[([0], 100)], []]) == []  # one unit alone goes nowhere
    assert even_moves([[([0], 51), ([1], 51)], [([2], 100)]]) == []
    assert even_moves([[], []]) == []


@pytest.mark.parametrize("seed", range(20))
def test_every_load_balancing_move_lowers_the_maximum_load_and_keeps_every_sample(seed):
    dice = random.Random(seed)
    units, row = [], 0
    for _ in range(dice.randint(2, 5)):
        units.append([])
        for _ in range(dice.randint(0, 9)):
            units[-1].append(([row], dice.randint(1, 99)))
            row += 1
    cost = {own[0]: value for of_rank in units for own, value in of_rank}
    place = {own[0]: rank for rank, of_rank in enumerate(units) for own, _ in of_rank}

    def most():
        return max(sum(cost[row] for row in cost if place[row] == rank) for rank in range(len(units)))

    largest = [most()]
    for rows, source, target in even_moves(units):
        assert place[rows[0]] == source != target
        place[rows[0]] = target
        largest.append(most())
    assert largest == sorted(largest, reverse=True)
    if len(largest) > 1:
        assert largest[-1] <= (1 - LEAST_GAIN) * largest[0]
    assert largest[-1] <= sum(cost.values()) / len(units) * (1 + LEAST_GAIN) + max(cost.values(), default=0)


def test_load_balancing_distributes_samples_that_need_a_backward_pass_equally_over_ranks():
    """Rank 0 has generated all four groups that need a backward pass; two of them move, each as a whole."""
    lengths, groups = torch.full((16,), 5), torch.arange(16) // 2
    mask = torch.tensor([0, 0, 0, 1, 1] * 16)
    data = RaggedBatch(
        offsets_of(lengths), {"input_ids": torch.arange(80), "token_mask": mask}, {"group_id": groups}
    )  # fmt: skip
    generated = [Ranks(rank, 2).blocks(data, 0, 16, None)[0] for rank in range(2)]
    idle = torch.ones(16, dtype=torch.bool)
    idle[generated[0]] = False
    told = [Ranks(rank, 2).even_block(data, 0, 16, idle) for rank in range(2)]
    (own, moves), (other, same_moves) = told
    assert moves == same_moves and [(move.source, move.target) for move in moves] == [(0, 1), (0, 1)]
    moved = sorted(row for move in moves for row in move.rows)
    assert sorted(own + other) == list(range(16)) and set(other) == set(generated[1]) | set(moved)
    assert sum(not idle[row] for row in own) == sum(not idle[row] for row in other) == 4
    assert {len(move.rows) for move in moves} == {2} and all(move.rows[1] == move.rows[0] + 1 for move in moves)
