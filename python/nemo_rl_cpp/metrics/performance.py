"""Derived metrics of a step: the rates `performance/*`, and how informative the prompt groups were."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Devices(NamedTuple):
    """The number of devices: in total, for training and for generation. A device is a GPU, or the CPU of
    one process.
    """

    total: int = 1
    training: int = 1
    generation: int = 1


ONE_DEVICE = Devices()


def performance_metrics(
    timing: Mapping[str, float], *, num_samples: int, total_num_tokens: float, num_generated_tokens: float | None = None,
    num_rollout_tokens: float | None = None, devices: Devices = ONE_DEVICE,
) -> dict[str, float]:  # fmt: skip
    """Return the metrics `performance/*` of a step. Names that end in `_per_gpu` are rates per device of the stage;
    other names are rates of all devices together.

    A rate is a count divided by the seconds of a stage. `timing` has the seconds of each stage, under NeMo RL's labels.
    `total_num_tokens` counts the prompt and response tokens of the trained samples. As in NeMo RL, it is the numerator
    of every token rate except generation's, whose numerator is `num_rollout_tokens` (of all generated rollouts) if
    given. `decode_tokens_per_sec` is the rate of `num_generated_tokens` alone. Rates of stages that did not run are
    omitted.
    """
    step, generation = timing.get("total_step_time", 0.0), timing.get("generation", 0.0)
    training, logprobs = timing.get("policy_training", 0.0), timing.get("policy_and_reference_logprobs", 0.0)
    metrics: dict[str, float] = {}

    def rate(name: str, count: float, seconds: float, of: int, whole: bool = True) -> None:
        if seconds > 0:
            metrics[f"{name}_per_gpu"] = count / seconds / of
            if whole:
                metrics[name] = count / seconds

    rate("samples_per_sec", num_samples, step, devices.total)
    rate("tokens_per_sec", total_num_tokens, step, devices.total)
    made = total_num_tokens if num_rollout_tokens is None else num_rollout_tokens
    rate("generation_tokens_per_sec", made, generation, devices.generation)
    rate("policy_training_tokens_per_sec", total_num_tokens, training, devices.training, whole=False)
    rate("policy_and_reference_logprobs_tokens_per_sec", total_num_tokens, logprobs, devices.training, whole=False)
    rate("training_worker_group_tokens_per_sec", total_num_tokens, training + logprobs, devices.training)
    if num_generated_tokens is not None and generation > 0:
        metrics["decode_tokens_per_sec"] = num_generated_tokens / generation
    return metrics


def rewards_by_group(rewards: Iterable[float], group_ids: Iterable[int]) -> list[list[float]]:
    """Return the rewards of each group, in order of first appearance. `rewards` and `group_ids` are [B]."""
    groups: dict[int, list[float]] = {}
    for group, value in zip(group_ids, rewards, strict=True):
        groups.setdefault(group, []).append(value)
    return list(groups.values())


def is_equal(group: list[float]) -> bool:
    """Return whether a group has two or more rewards that are all equal."""
    return len(group) > 1 and min(group) == max(group)


def group_reward_metrics(groups: list[list[float]]) -> dict[str, float]:
    """Return metrics of the prompt groups that give no gradient because all their rewards are equal. `groups` are those
    of `rewards_by_group`.

    `groups/num` is the number of groups. The others are percentages of the groups of two or more, and are omitted if
    there are none: `groups/pct_equal`, and its parts `groups/pct_equal_best` (all rewards equal the highest of the
    batch) and `groups/pct_equal_worst` (all equal the lowest), and `groups/pct_mixed`. If all rewards of the batch are
    equal, a reward of 1 or more counts as best, and a smaller one as worst.
    """
    number = {"groups/num": float(len(groups))}
    compared = [group for group in groups if len(group) > 1]
    if not compared:
        return number
    low, high = min(map(min, groups)), max(map(max, groups))
    equal = [group[0] for group in compared if is_equal(group)]
    best = sum(value == high and (high > low or value >= 1.0) for value in equal)
    worst = sum(value == low and (high > low or value < 1.0) for value in equal)
    share = 100.0 / len(compared)
    return number | {
        "groups/pct_equal": len(equal) * share,
        "groups/pct_equal_best": best * share,
        "groups/pct_equal_worst": worst * share,
        "groups/pct_mixed": (len(compared) - len(equal)) * share,
    }
