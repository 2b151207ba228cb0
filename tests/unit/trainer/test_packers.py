"""Packers give the bins of slow references; tests/cpp/batching has small cases worked out by hand."""

import random

import pytest
from nemo_rl_cpp.config.policy import PACKERS
from reference import packing as reference

REFERENCES = {
    "concatenative": reference.concatenative,
    "first_fit_decreasing": reference.first_fit_decreasing,
    "modified_first_fit_decreasing": reference.modified_first_fit_decreasing,
}


def cases(count, seed=0):
    rng = random.Random(seed)
    for _ in range(count):
        capacity = rng.choice([1, 2, 5, 6, 7, 12, 30, 61, 100, 1000])
        # few distinct lengths make ties, which decide among equally good bins
        top = rng.choice([max(1, capacity // 6), max(1, capacity // 3), max(1, capacity // 2), capacity])
        yield [rng.randint(1, top) for _ in range(rng.randint(0, 60))], capacity


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_sequence_packing_algorithms_give_the_bins_of_a_reference_implementation(name):
    for lengths, capacity in cases(1200):
        assert PACKERS[name](lengths, capacity) == REFERENCES[name](lengths, capacity), (lengths, capacity)


def test_first_fit_shuffle_packing_uses_a_fixed_seed():
    for lengths, capacity in cases(1000, seed=1):
        order = list(range(len(lengths)))
        random.Random(0).shuffle(order)
        assert PACKERS["first_fit_shuffle"](lengths, capacity) == reference.first_fit(lengths, order, capacity)


@pytest.mark.parametrize("name", sorted(PACKERS))
def test_packing_a_sequence_longer_than_the_bin_capacity_is_an_error(name):
    with pytest.raises(ValueError, match="sequence 1 has length 9"):
        PACKERS[name]([1, 9], 8)
    assert PACKERS[name]([], 8) == []
