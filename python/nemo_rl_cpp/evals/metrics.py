"""pass@k and cons@k, estimated from n responses, and confidence intervals of means and proportions."""

import math
import statistics
from collections.abc import Hashable, Sequence
from typing import NamedTuple


def pass_at_k(num_tests: int, num_correct: int, k: int) -> float:
    """Return an unbiased estimate of pass@k if c = `num_correct` of n = `num_tests` responses are correct: 1 -
    C(n - c, k) / C(n, k) (Chen et al., "Evaluating Large Language Models Trained on Code", 2021).
    """
    subsets = math.comb(num_tests, k)
    return (subsets - math.comb(num_tests - num_correct, k)) / subsets


def cons_at_k(rewards: Sequence[float], answers: Sequence[Hashable], k: int) -> float:
    """Return cons@k: the share of all k-subsets of the responses whose majority answer has reward 1.

    In a tie, the answer that comes first in the subset wins. An answer's reward is that of its first response in the
    subset. "No answer" (None) is an answer like any other. The subsets are counted by formula, not enumerated: if the
    winner has v votes and its first vote is response i, then every other answer has fewer than v votes, or v votes that
    all come after i.
    """
    places: dict[Hashable, list[int]] = {}
    for i, answer in enumerate(answers):
        places.setdefault(answer, []).append(i)
    good = 0
    for answer, own in places.items():
        others = [place for other, place in places.items() if other != answer]
        for rank, first in enumerate(own):
            if rewards[first] != 1:
                continue
            later = len(own) - rank - 1
            for votes in range(1, min(k, later + 1) + 1):
                good += math.comb(later, votes - 1) * _ways(others, votes, first, k - votes)
    return good / math.comb(len(answers), k)


def _ways(others: list[list[int]], votes: int, first: int, remaining: int) -> int:
    """Return in how many ways `remaining` votes can go to answers that lose against an answer with `votes` votes, the
    first of which is response `first`.
    """
    ways = [1] + [0] * remaining  # ways[m]: the number of ways in which m votes go to the answers so far
    for place in others:
        after = sum(i > first for i in place)
        each = [math.comb(len(place), w) for w in range(votes)] + [math.comb(after, votes)]
        ways = [sum(ways[m - w] * each[w] for w in range(min(m, votes) + 1)) for m in range(remaining + 1)]
    return ways[remaining]


class Interval(NamedTuple):
    low: float
    high: float


_Z = 1.959963984540054  # 95 % of a normal distribution lie within this many standard deviations


def normal_interval(values: Sequence[float]) -> Interval:
    """Return the 95 % interval of the mean of two or more values: mean +- 1.96 s / sqrt(n), with s the standard
    deviation.
    """
    mean, half = math.fsum(values) / len(values), _Z * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean - half, mean + half)


def wilson_interval(share: float, count: int) -> Interval:
    """Return the 95 % interval of a proportion `share` observed in `count` trials (Wilson, 1927), with z = 1.96:

    (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n)
    """
    center = share + _Z * _Z / (2 * count)
    spread = _Z * math.sqrt(share * (1 - share) / count + _Z * _Z / (4 * count * count))
    scale = 1 + _Z * _Z / count
    return Interval(max(0.0, (center - spread) / scale), min(1.0, (center + spread) / scale))
