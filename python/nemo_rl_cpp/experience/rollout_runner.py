"""Runs the rollouts of training steps and keeps count of them."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_cpp.experience.batches import Rollouts
from nemo_rl_cpp.experience.rollouts import run_multi_turn_rollout
from nemo_rl_cpp.telemetry.performance import group_reward_metrics

if TYPE_CHECKING:
    from nemo_rl_cpp.data.interfaces import TokenizerType
    from nemo_rl_cpp.environments.interfaces import Environment
    from nemo_rl_cpp.models.generation.interfaces import GenerationInterface


class RolloutRunner:
    """Lets the engine answer prompts and the environments score the answers; one call a round of generation."""

    def __init__(
        self, generation: "GenerationInterface", tokenizer: "TokenizerType", task_to_env: "Mapping[str, Environment]",
        max_seq_len: int, max_turns: int, change_rewards: Callable[[Rollouts], dict[str, float]] | None = None,
    ) -> None:  # fmt: skip
        """`change_rewards` changes `total_reward` of finished rollouts and gives metrics (`grpo.length_penalty`)."""
        self._generation = generation
        self._tokenizer = tokenizer
        self.task_to_env = task_to_env
        self._max_seq_len = max_seq_len
        self._max_turns = max_turns
        self._change_rewards = change_rewards
        self._rounds: list[tuple[int, dict[str, float]]] = []
        self._rewards: list[float] = []
        self._groups: list[int] = []

    def run(self, prompts: BatchedDataDict, weight_version: int) -> Rollouts:
        """`prompts` (repeated, see `PromptSource`) rolled out. Adds, besides `total_reward` and `truncated`, the rewards
        as the environments gave them, `raw_reward` float32 [B], and `weight_version` int64 [B]."""
        finished, metrics = run_multi_turn_rollout(
            self._generation,
            prompts,
            self._tokenizer,
            self.task_to_env,
            self._max_seq_len,
            self._max_turns,
            greedy=False,
        )
        rollouts = Rollouts(finished.data)
        rollouts.raw_reward = rollouts.total_reward.clone()
        if self._change_rewards is not None:
            metrics |= self._change_rewards(rollouts)
        rollouts.weight_version = torch.full((rollouts.size,), weight_version)
        self._rounds.append((rollouts.size, metrics))
        self._rewards += rollouts.raw_reward.tolist()
        self._groups += rollouts.group_id.tolist()
        return rollouts

    def pop_metrics(self) -> dict[str, float]:
        """The metrics of all rounds since the last call, those that are filtered out later included: NeMo RL's rollout
        metrics, `accuracy` (mean raw reward), `zero_std_groups` (groups whose raw rewards are all equal) and `groups/*`."""
        metrics = combine_rollout_metrics(self._rounds)
        if self._rewards:
            groups = group_reward_metrics(self._rewards, self._groups)
            metrics |= groups
            metrics["zero_std_groups"] = round(groups["groups/pct_equal"] * groups["groups/num"] / 100.0)
            metrics["accuracy"] = sum(self._rewards) / len(self._rewards)
        self._rounds, self._rewards, self._groups = [], [], []
        return metrics


def combine_rollout_metrics(rounds: list[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """The metrics of several rounds, each with its number of samples, as of one.

    Highest and lowest values stay such, totals and counts of verifiers add up, `accuracy_of_X` is weighted by the samples
    that were X, everything else, rates above all, by all samples. A name that a round lacks is taken from the others.
    """
    names = dict.fromkeys(name for _, metrics in rounds for name in metrics)
    combined: dict[str, float] = {}
    for name in names:
        entries = [(size, metrics) for size, metrics in rounds if name in metrics]
        values = [metrics[name] for _, metrics in entries]
        if not all(isinstance(value, (int, float)) for value in values):
            combined[name] = values[-1]
        elif (join := join_of(name)) is not None:
            combined[name] = join(values)
        elif name.rsplit("/", 1)[-1].startswith(("verifier_", "num_")) and not name.endswith("_rate"):
            combined[name] = sum(values)
        else:
            share = name.replace("accuracy_of_", "") if "accuracy_of_" in name else None
            weights = [size * metrics.get(share, 1.0) for size, metrics in entries]
            total = sum(weights)
            combined[name] = sum(w * v for w, v in zip(weights, values)) / total if total else values[-1]
    return combined


def join_of(name: str) -> Callable[[list[float]], float] | None:
    """How values of a metric are joined, by its name: `max_*` and `*/max`, `min_*` and `*/min`, `total_*` and `*/total`; None: by
    their mean, as rates are (`max_turns_reached_rate`)."""
    last = name.rsplit("/", 1)[-1]
    kind = last.split("_", 1)[0]
    return None if last.endswith("_rate") else {"max": max, "min": min, "total": sum}.get(kind)
