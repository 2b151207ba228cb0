import math
import random

import pytest
from nemo_rl_cpp.evals.results import cons_at_k, interval_of_mean, pass_at_k, wilson_interval
from reference import evaluation as reference


def test_pass_at_k_matches_the_enumeration_of_all_subsets():
    for n in range(1, 9):
        for right in range(n + 1):
            rewards = [1.0] * right + [0.0] * (n - right)
            for k in range(1, n + 1):
                assert pass_at_k(n, right, k) == pytest.approx(reference.pass_at_k(rewards, k), abs=1e-12)


def test_pass_at_k_is_accurate_for_10000_responses():
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01)
    assert pass_at_k(10_000, 5_000, 50) == pytest.approx(1 - math.comb(5_000, 50) / math.comb(10_000, 50))


def test_majority_vote_cons_at_k_matches_the_enumeration_of_all_subsets():
    generator = random.Random(1)
    for _ in range(1500):
        n = generator.randint(1, 9)
        answers = [generator.choice(["1", "2", "3", "4", None]) for _ in range(n)]
        rewards = [float(generator.random() < 0.5) for _ in range(n)]
        k = generator.randint(1, n)
        assert cons_at_k(rewards, answers, k) == pytest.approx(reference.cons_at_k(rewards, answers, k), abs=1e-12)


def test_majority_vote_cons_at_k_is_exact_for_many_responses():
    answers = ["a"] * 40 + ["b"] * 24
    rewards = [1.0] * 40 + [0.0] * 24
    share = sum(math.comb(40, v) * math.comb(24, 31 - v) for v in range(16, 32)) / math.comb(64, 31)
    assert cons_at_k(rewards, answers, 31) == pytest.approx(share)


def test_confidence_interval_of_the_mean_matches_hand_computed_values():
    low, high = interval_of_mean([0.0] * 10 + [1.0] * 10)
    assert (low, high) == pytest.approx((0.2993, 0.7007), abs=1e-4)  # Wilson, 10 of 20
    assert interval_of_mean([1.0] * 5).low == pytest.approx(0.5655, abs=1e-4)
    low, high = interval_of_mean([0.25, 0.5, 0.75, 0.5])
    assert (low, high) == pytest.approx((0.5 - 1.96 * 0.2041 / 2, 0.5 + 1.96 * 0.2041 / 2), abs=1e-3)
    assert interval_of_mean([0.5]).high < 1.0


def test_wilson_confidence_interval_matches_hand_computed_values():
    # 8 of 10: (0.8 + 0.19207) / 1.38415 = 0.71675; half width 1.95996 sqrt(0.016 + 0.0096036) / 1.38415 = 0.22658
    low, high = wilson_interval(0.8, 10)
    assert low == pytest.approx(0.4902, abs=1e-4) and high == pytest.approx(0.9433, abs=1e-4)
    assert wilson_interval(0.0, 20).low == 0.0 and wilson_interval(1.0, 20).high == 1.0
