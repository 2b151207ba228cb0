"""pass@k and cons@k by enumerating every subset of k responses: slow, but directly the definition."""

from collections import Counter
from itertools import combinations


def pass_at_k(rewards, k):
    subsets = list(combinations(rewards, k))
    return sum(any(reward == 1 for reward in subset) for subset in subsets) / len(subsets)


def cons_at_k(rewards, answers, k):
    subsets = list(combinations(range(len(rewards)), k))
    right = 0
    for subset in subsets:
        winner = Counter(answers[i] for i in subset).most_common(1)[0][0]
        right += rewards[next(i for i in subset if answers[i] == winner)] == 1
    return right / len(subsets)
