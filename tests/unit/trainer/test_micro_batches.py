import random

import pytest
import torch
from nemo_rl_cpp._native import C
from nemo_rl_cpp.config.policy import PACKERS, SequencePackingConfig
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch
from nemo_rl_cpp.models.policy.micro_batches import MicroBatching, plan, wanted_tokens


def rows_of(lengths, groups=None, prompts=None):
    """Rows that compute `length` tokens each: the last token of a row is predicted, not read."""
    data = {
        "input_ids": torch.zeros(len(lengths), max(lengths) + 1, dtype=torch.int64),
        "input_lengths": torch.tensor(lengths) + 1,
    }
    if groups:
        places = torch.arange(max(lengths) + 1)[None]
        data |= {"group_id": torch.tensor(groups), "token_mask": (places >= torch.tensor(prompts)[:, None]).int()}
    return RaggedBatch.of(data)


def micro_batches(data, **batching):
    return plan(data, wanted_tokens(data), range(data.size), MicroBatching(**batching))[1]


def test_configuration_schema_allows_exactly_the_implemented_packing_algorithms():
    for name in PACKERS:
        assert SequencePackingConfig(algorithm=name).algorithm == name
    with pytest.raises(ValueError, match="must be one of " + ", ".join(PACKERS)):
        SequencePackingConfig(algorithm="nothing")


# Capacity 10. First fit decreasing: 7+3, 6+4, 2. Concatenative: 3+6, 7+2, 4.
@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [("concatenative", [[0, 1], [2, 3], [4]]), ("first_fit_decreasing", [[0, 2], [1, 4], [3]])],
)
def test_sequence_packing_algorithms_match_hand_computed_cases(algorithm, expected):
    data = rows_of([3, 6, 7, 2, 4])
    assert micro_batches(data, max_tokens=10, share_prefix=False, algorithm=algorithm) == expected


def test_largest_first_option_sorts_micro_batches_by_token_count():
    data = rows_of([3, 2, 6, 7])
    options = dict(max_tokens=8, share_prefix=False, algorithm="concatenative")
    assert micro_batches(data, **options) == [[0, 1], [2], [3]]
    assert micro_batches(data, **options, largest_first=True) == [[3], [2], [0, 1]]


def test_dynamic_batching_rounds_sequence_lengths_up_to_the_configured_multiple():
    data = rows_of([3, 9, 4, 8, 2])  # lengths with the predicted token: 4 10 5 9 3
    assert micro_batches(data, max_tokens=20, length_round=1) == [[0, 2, 4], [1, 3]]
    assert micro_batches(data, max_tokens=20, length_round=8) == [[0, 4], [2, 3], [1]]  # counted 8 8 | 8 10 | 10


@pytest.mark.parametrize("algorithm", PACKERS)
def test_every_sample_is_in_exactly_one_micro_batch_within_the_token_budget(algorithm):
    draw = random.Random(7)
    for count in (1, 5, 40):
        groups = sorted(draw.randrange(count) for _ in range(count))
        prompts = [3 + group % 4 for group in groups]
        data = rows_of([prompt + draw.randrange(20) for prompt in prompts], groups, prompts)
        batch, bins = plan(data, wanted_tokens(data), range(count), MicroBatching(max_tokens=60, algorithm=algorithm))
        assert sorted(row for rows in bins for row in rows) == list(range(count))
        assert all(C.packed_tokens(batch, rows, True) <= 60 for rows in bins)


def test_consecutive_samples_of_a_prompt_share_a_micro_batch_up_to_the_token_budget():
    # two prompts of 3 tokens, answers of 4, 4, 4 and 2 tokens of which the last is not read
    data = rows_of([6, 6, 6, 4, 9], [0, 0, 0, 1, 1], [3, 3, 3, 3, 4])
    batch, _ = plan(data, wanted_tokens(data), range(5), MicroBatching())
    assert C.prompt_units(batch, [0, 1, 2, 3, 4], 100, True) == ([[0, 1, 2], [3], [4]], [3 + 3 * 3, 4, 9])
    assert C.prompt_units(batch, [0, 1, 2, 3, 4], 9, True) == ([[0, 1], [2], [3], [4]], [9, 6, 4, 9])
    assert C.prompt_units(batch, [0, 2], 5, True) == ([[0], [2]], [6, 6])  # longer than the budget: alone
    assert C.prompt_units(batch, [1, 3, 4], 100, False) == ([[1], [3], [4]], [6, 4, 9])
    assert C.prompt_units(batch, [], 100, True) == ([], [])
    assert [C.packed_tokens(batch, rows, True) for rows in ([0, 1, 2], [0, 3], [4])] == [12, 10, 9]


def test_sample_longer_than_the_token_budget_gets_a_separate_micro_batch():
    for batching in (dict(algorithm=name) for name in PACKERS):
        assert [1] in micro_batches(rows_of([3, 30, 4]), max_tokens=10, share_prefix=False, **batching)
    assert [1] in micro_batches(rows_of([3, 30, 4]), max_tokens=10, length_round=4)
