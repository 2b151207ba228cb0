"""Packers give NeMo RL's bins: compared with slow references, and with small cases worked out by hand."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nemo_rl_cpp.compat.data.packing import PackingAlgorithm, PackingMetrics, get_packer
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
def test_same_bins_as_the_reference(name):
    for lengths, capacity in cases(1200):
        assert get_packer(name, capacity).pack(lengths) == REFERENCES[name](lengths, capacity), (lengths, capacity)


def test_shuffle_uses_pythons_random_order():
    for seed, (lengths, capacity) in enumerate(cases(1000, seed=1)):
        random.seed(seed)
        got = get_packer("first_fit_shuffle", capacity).pack(lengths)
        order = [(n, i) for i, n in enumerate(lengths)]
        random.Random(seed).shuffle(order)
        assert got == reference.first_fit(lengths, [i for _, i in order], capacity)


def test_worked_examples():
    # capacity 10; FFD places 7 5(idx 3 before 1) 4 3 2: 7+3, 5+5, 4+2
    assert get_packer("first_fit_decreasing", 10).pack([4, 5, 3, 5, 7, 2]) == [[4, 2], [3, 1], [0, 5]]
    assert get_packer("concatenative", 10).pack([4, 5, 3, 5, 7, 2]) == [[0, 1], [2, 3], [4, 5]]
    # capacity 12: large 7 (0); medium > 4: 5 (1) joins it. Left over, descending 4 3 3 2: least-loaded bin each time
    assert get_packer("modified_first_fit_decreasing", 12).pack([7, 5, 3, 4, 3, 2]) == [[0, 1], [3, 2, 4, 5]]
    # backward pass: 7 takes the two smalls (> 12/6, <= 12/3) 3 + the largest that fits with it (2 is tiny)
    assert get_packer("modified_first_fit_decreasing", 13).pack([7, 3, 3, 4, 2]) == [[0, 1, 2], [3, 4]]


def test_equal_lengths_decide_the_order():
    assert get_packer("first_fit_decreasing", 4).pack([2, 2, 2]) == [[2, 1], [0]]  # larger index first
    assert get_packer("modified_first_fit_decreasing", 4).pack([3, 3]) == [[0], [1]]  # lower index first


@given(
    lengths=st.lists(st.integers(1, 40), max_size=40),
    minimum=st.integers(0, 12),
    multiple=st.integers(1, 6),
    name=st.sampled_from([member.value for member in PackingAlgorithm]),
)
@settings(max_examples=400, deadline=None)
def test_every_index_once_within_capacity_and_bin_count(lengths, minimum, multiple, name):
    random.seed(3)
    plain = get_packer(name, 40).pack(lengths)
    random.seed(3)
    packer = get_packer(name, 40, min_bin_count=minimum, bin_count_multiple=multiple)
    target = -(-max(len(plain), minimum) // multiple) * multiple
    if target > len(lengths):
        with pytest.raises(ValueError, match="sequences"):
            packer.pack(lengths)
        return
    bins = packer.pack(lengths)
    assert bins == reference.adjust_bin_count(plain, minimum, multiple)
    assert len(bins) == target
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    assert all(members and sum(lengths[i] for i in members) <= 40 for members in bins)


def test_names_in_any_case_and_the_enum():
    for member in PackingAlgorithm:
        for name in (member, member.value, member.name):
            assert type(get_packer(name, 8)) is type(get_packer(member, 8))
    with pytest.raises(ValueError, match="first_fit_decreasing"):
        get_packer("best_fit", 8)


@pytest.mark.parametrize("name", [member.value for member in PackingAlgorithm])
def test_mistakes_are_value_errors(name):
    with pytest.raises(ValueError, match="sequence 1 has length 9"):
        get_packer(name, 8).pack([1, 9])
    with pytest.raises(ValueError, match="capacity"):
        get_packer(name, 0).pack([1])
    with pytest.raises(ValueError, match="min_bin_count"):
        get_packer(name, 8, min_bin_count=-1)
    with pytest.raises(ValueError, match="bin_count_multiple"):
        get_packer(name, 8, bin_count_multiple=0)
    assert get_packer(name, 8).pack([]) == []


def test_zero_lengths_only_fail_where_the_classes_need_them_positive():
    assert get_packer("first_fit_decreasing", 4).pack([0, 4, 0]) == [[1, 2, 0]]
    with pytest.raises(ValueError, match="positive"):
        get_packer("modified_first_fit_decreasing", 4).pack([0])


def test_metrics_by_hand():
    packer = get_packer("first_fit_decreasing", 10, collect_metrics=True)
    lengths = [6, 4, 5]
    bins = packer.pack(lengths)
    assert bins == [[0, 1], [2]]
    stats = PackingMetrics().calculate_stats_only(lengths, bins, 10)
    assert stats["num_sequences"] == 3 and stats["num_bins"] == 2 and stats["total_waste"] == 5
    assert stats["average_utilization"] == 0.75 and stats["waste_ratio"] == 0.25
    assert stats["bin_balance"] == pytest.approx(1 - (0.5**2 / 2) ** 0.5 / 0.75)  # sample stdev of (1, 0.5)
    assert stats["theoretical_min_bins"] == 2 and stats["bin_efficiency"] == 1.0
    assert packer.get_aggregated_metrics()["total_bins"] == 2
    packer.reset_metrics()
    assert packer.get_aggregated_metrics() == {}


@pytest.mark.parametrize("shape", ["log-normal", "zipf"])
def test_hundred_thousand_lengths_fill_their_bins(shape):
    rng = random.Random(5)
    draw = {"log-normal": lambda: rng.lognormvariate(6, 1), "zipf": lambda: rng.paretovariate(1.0)}[shape]
    lengths = [min(4096, int(draw()) + 1) for _ in range(100_000)]
    for name in ("first_fit_decreasing", "modified_first_fit_decreasing"):
        bins = get_packer(name, 4096).pack(lengths)
        assert sum(lengths) / (len(bins) * 4096) > 0.99
