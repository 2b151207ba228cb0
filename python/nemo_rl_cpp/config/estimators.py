"""The table of advantage estimators, from which the values of `grpo.adv_estimator.name` and `ppo.adv_estimator.name` follow."""

from dataclasses import dataclass
from typing import Annotated

from nemo_rl_cpp.dotted_names import is_dotted

from .tables import Entry, OneOf, Table


@dataclass(frozen=True)
class EstimatorEntry(Entry):
    """An estimator's class, and the algorithm that may choose it; None: code only, since no configuration gives its inputs."""

    algorithm: str | None = None


def _estimator(name: str, algorithm: str | None) -> EstimatorEntry:
    return EstimatorEntry(f"nemo_rl_cpp.algorithms.advantage_estimator:{name}", algorithm)


ADVANTAGE_ESTIMATORS: Table[EstimatorEntry] = Table(
    "advantage estimator",
    {
        "grpo": _estimator("GRPOAdvantageEstimator", "grpo"),
        "gdpo": _estimator("GDPOAdvantageEstimator", "grpo"),
        "reinforce_plus_plus": _estimator("ReinforcePlusPlusAdvantageEstimator", "grpo"),
        "gae": _estimator("GeneralizedAdvantageEstimator", "ppo"),
        "raw_reward": _estimator("RawRewardAdvantageEstimator", "ppo"),
        "opd": _estimator("OPDAdvantageEstimator", None),  # its teacher has no place in a configuration
    },
)
"""name -> class."""


def estimators_of(algorithm: str) -> list[str]:
    """The estimators that `grpo` or `ppo` may choose."""
    return [name for name, entry in ADVANTAGE_ESTIMATORS.entries.items() if entry.algorithm == algorithm]


GRPOEstimator = Annotated[str, OneOf(lambda: estimators_of("grpo"), dotted=True)]
PPOEstimator = Annotated[str, OneOf(lambda: estimators_of("ppo"), dotted=True)]


def checked_name(algorithm: str, name: str) -> str:
    """`name`; ValueError where it is none of the algorithm's estimators, and no dotted name."""
    known = estimators_of(algorithm)
    if name not in known and not is_dotted(name):
        raise ValueError(f"{algorithm}.adv_estimator.name is {name!r}; expected one of {', '.join(known)}")
    return name
