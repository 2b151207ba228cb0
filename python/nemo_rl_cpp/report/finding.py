"""What a finding is, and the list of rules that make findings. Every rule is a pure function of the metric history."""

from collections.abc import Callable
from typing import NamedTuple

from nemo_rl_cpp.report.history import MetricHistory

LEVELS = ("bad", "warn", "good", "info")


class Finding(NamedTuple):
    """One statement: `level` is bad, warn, good or info; `title` the statement, `advice` what to do about it or why."""

    level: str
    title: str
    advice: str
    metric: str


Rule = Callable[[MetricHistory], Finding | None]
RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    """Adds a function to the rules that `findings.find` applies."""
    RULES.append(function)
    return function


def percent(share: float) -> str:
    """A share between 0 and 1 as text: `71 %`."""
    value = 100 * share
    return f"{value:.1f} %" if 0 < value < 10 else f"{value:.0f} %"


def count(number: float, noun: str) -> str:
    """A number with its noun: `1 step`, `3 steps`."""
    return f"{number:.0f} {noun}{'' if number == 1 else 's'}"
