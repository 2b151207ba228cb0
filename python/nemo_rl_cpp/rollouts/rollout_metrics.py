"""Counts of turns and tokens per rollout, and metrics of a batch of rollouts and of its prompt groups."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nemo_rl_cpp.data.interfaces import LLMMessageLogType
from nemo_rl_cpp.environments.interfaces import Environment, Mean
from nemo_rl_cpp.environments.remote import answer_of, call_remote


@dataclass
class SampleStats:
    """The counts of one rollout: its turns and tokens, and how it ended."""

    turns: int = 0  # the number of generations, each followed by the environment's reply
    assistant_tokens: int = 0  # the number of generated tokens
    env_tokens: int = 0  # the number of tokens in the environment's replies
    done: bool = False  # whether the environment ended the conversation, or an observation did not fit
    truncated: bool = False  # whether a response or an observation was truncated at a length limit
    max_turns_reached: bool = False  # whether the conversation was still going after the last allowed turn


def rollout_metrics(samples: list[SampleStats]) -> dict[str, float]:
    """Return NeMo RL's rollout metrics of the samples; rates are fractions of the samples."""
    count = len(samples)
    return {
        "total_turns": sum(s.turns for s in samples),
        "avg_turns_per_sample": sum(s.turns for s in samples) / count,
        "max_turns_per_sample": max(s.turns for s in samples),
        "natural_termination_rate": sum(s.done for s in samples) / count,
        "truncation_rate": sum(s.truncated for s in samples) / count,
        "max_turns_reached_rate": sum(s.max_turns_reached for s in samples) / count,
        "mean_total_tokens_per_sample": sum(s.assistant_tokens + s.env_tokens for s in samples) / count,
        "mean_gen_tokens_per_sample": sum(s.assistant_tokens for s in samples) / count,
        "max_gen_tokens_per_sample": max(s.assistant_tokens for s in samples),
        "mean_env_tokens_per_sample": sum(s.env_tokens for s in samples) / count,
        "total_generated_tokens": sum(s.assistant_tokens for s in samples),
    }


def version_metrics(logs: Sequence[LLMMessageLogType], version: int) -> dict[str, float]:
    """Return metrics of conversations that began with the weights `version` and may continue with newer weights:
    mean_weight_versions per conversation, and the tokens sampled before and after the change
    (total_tokens_of_older_weights, total_tokens_of_newer_weights)."""
    of_samples, older, newer = [], 0, 0
    for log in logs:
        sampled = [message for message in log if "generation_logprobs" in message]
        after = sum(int((m["token_versions"] > version).sum()) for m in sampled if "token_versions" in m)
        before = sum(len(message["token_ids"]) for message in sampled) - after
        of_samples.append((before > 0) + (after > 0))
        older, newer = older + before, newer + after
    return {
        "mean_weight_versions": sum(of_samples) / len(of_samples),
        "total_tokens_of_older_weights": older,
        "total_tokens_of_newer_weights": newer,
    }


def environment_metrics(task_to_env: Mapping[str, Environment], tasks: Iterable[str] = ()) -> dict[str, float]:
    """Return the environments' metrics since the last call (`pop_metrics`). With several environments, names become
    `task/name`, `verifier_timeouts` without a task is the sum over all tasks, and `task/num_responses` is the number of
    responses that the environment scored; `tasks` has the task of each response."""
    environments: dict[str, Environment] = {}  # by the first of their tasks
    for task, environment in task_to_env.items():
        if all(environment is not other for other in environments.values()):
            environments[task] = environment
    begun = {task: call_remote(env, "pop_metrics") for task, env in environments.items() if hasattr(env, "pop_metrics")}
    answers = {task: answer_of(environments[task], result, task) for task, result in begun.items()}
    gathered = {task: metrics for task, metrics in answers.items() if metrics}
    if len(environments) == 1:
        return dict(next(iter(gathered.values()), {}))
    result = {f"{task}/{name}": value for task, metrics in gathered.items() for name, value in metrics.items()}
    if scored := Counter(id(task_to_env[task]) for task in tasks):
        result |= {f"{task}/{_NUMBER}": scored[id(environment)] for task, environment in environments.items()}
    timeouts = [metrics["verifier_timeouts"] for metrics in gathered.values() if "verifier_timeouts" in metrics]
    return result | ({"verifier_timeouts": sum(timeouts)} if timeouts else {})


_NUMBER = "num_responses"
COUNTS = frozenset({"agent_errors", "agent_timeouts", "agent_calls", "agent_calls_left_out"})
"""Metrics that are counts, although their names do not begin with `num_`."""


def combine_rollout_metrics(rounds: list[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """Combine the metrics of several rounds of generation, (number of samples, metrics) each.

    Take the maximum of maxima and the minimum of minima; add totals and counts, such as `verifier_timeouts`,
    `agent_errors` and `num_won`. Average `accuracy_of_X` over rounds, weighted by the number of samples with the
    property X, and all other metrics, such as rates, weighted by the number of samples, or for `task/name` by
    `task/num_responses`. A `Mean` is weighted by its count, whatever its name. A metric is combined over the rounds that
    have it."""
    combined: dict[str, float] = {}
    for name in dict.fromkeys(name for _, metrics in rounds for name in metrics):
        entries = [(size, metrics) for size, metrics in rounds if name in metrics]
        values = [metrics[name] for _, metrics in entries]
        last = name.rsplit("/", 1)[-1]  # of games/num_won; the part before may be a task
        join = {"max": max, "min": min, "total": sum}.get(last.split("_", 1)[0])
        if last in COUNTS or last.startswith(("verifier_", "num_")):
            join = sum
        of_means = all(isinstance(value, Mean) for value in values)
        if not all(isinstance(value, (int, float)) for value in values):
            combined[name] = values[-1]
        elif join is not None and not last.endswith("_rate") and not of_means:
            combined[name] = join(values)
        else:
            share = name.replace("accuracy_of_", "") if "accuracy_of_" in name else None
            weights = [_responses(size, metrics, name) * metrics.get(share, 1.0) for size, metrics in entries]
            if of_means:
                weights = [value.count for value in values]
            total = sum(weights)
            combined[name] = sum(w * v for w, v in zip(weights, values)) / total if total else float(values[-1])
    return combined


def _responses(size: int, metrics: Mapping[str, float], name: str) -> float:
    """Return how many of the `size` responses of a round the metric `name` describes, from the round's `metrics`."""
    counts = [key for key in metrics if key.endswith(f"/{_NUMBER}") and name.startswith(key.removesuffix(_NUMBER))]
    return metrics[max(counts, key=len)] if counts else size


Round = tuple[dict[str, float], list[float], list[int]]
"""A round of generation: its metrics, and each sample's raw reward and group id."""


def round_metrics(rounds: Sequence[Round]) -> dict[str, float]:
    """Return the combined metrics of all rounds of a step, including rollouts that dynamic sampling drops later: NeMo
    RL's rollout metrics, `accuracy` (mean raw reward), and the metrics of the groups' raw rewards."""
    combined = combine_rollout_metrics([(len(rewards), metrics) for metrics, rewards, _ in rounds])
    if rounds:
        rewards = [reward for _, own, _ in rounds for reward in own]
        groups = [group for _, _, own in rounds for group in own]
        combined |= group_reward_metrics(rewards_by_group(rewards, groups))
        combined["accuracy"] = sum(rewards) / len(rewards)
    return combined


# ---- how informative the prompt groups are


def rewards_by_group(rewards: Iterable[float], group_ids: Iterable[int]) -> list[list[float]]:
    """Return the rewards of each group, in order of first appearance. `rewards` and `group_ids` are [B]."""
    groups: dict[int, list[float]] = {}
    for group, value in zip(group_ids, rewards, strict=True):
        groups.setdefault(group, []).append(value)
    return list(groups.values())


def group_reward_metrics(groups: list[list[float]]) -> dict[str, float]:
    """Return metrics of the prompt groups that give no gradient because all their rewards are equal.

    `groups/num` counts all groups, `zero_std_groups` (NeMo RL's name) the groups of two or more whose rewards are all
    equal. The others are percentages of the groups of two or more, and are omitted if there are none:
    `groups/pct_mixed` (rewards that differ), `groups/pct_equal` (equal rewards), `groups/pct_equal_best` (all rewards
    equal the highest of the batch) and `groups/pct_equal_worst` (all equal the lowest). If all rewards of the batch are
    equal, a reward of 1 or more counts as best, and a smaller one as worst."""
    compared = [group for group in groups if len(group) > 1]
    equal = [group[0] for group in compared if min(group) == max(group)]
    number = {"groups/num": float(len(groups)), "zero_std_groups": len(equal)}
    if not compared:
        return number
    low, high = min(map(min, groups)), max(map(max, groups))
    best = sum(value == high and (high > low or value >= 1.0) for value in equal)
    worst = sum(value == low and (high > low or value < 1.0) for value in equal)
    share = 100.0 / len(compared)
    return number | {
        "groups/pct_equal": len(equal) * share,
        "groups/pct_equal_best": best * share,
        "groups/pct_equal_worst": worst * share,
        "groups/pct_mixed": (len(compared) - len(equal)) * share,
    }
