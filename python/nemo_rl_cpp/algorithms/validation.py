"""Validation: the policy responds to prompts on which it is not trained, and the responses are scored."""

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from nemo_rl_cpp.algorithms.step_metrics import Metrics, truths
from nemo_rl_cpp.config.loop import LoopConfig
from nemo_rl_cpp.config.policy import PolicyConfig
from nemo_rl_cpp.data.dataloader import StatefulDataLoader
from nemo_rl_cpp.data.interfaces import TokenizerType
from nemo_rl_cpp.distributed.ragged_batch import BatchedDataDict
from nemo_rl_cpp.environments.interfaces import Environment
from nemo_rl_cpp.evals.results import wilson_interval
from nemo_rl_cpp.loggers.logger import Logger
from nemo_rl_cpp.models.generation.interfaces import generating
from nemo_rl_cpp.models.interfaces import GenerationInterface
from nemo_rl_cpp.rollouts.rollout_metrics import combine_rollout_metrics
from nemo_rl_cpp.rollouts.rollouts import repeat_prompts, run_multi_turn_rollout


class ValidationResult(NamedTuple):
    """The result of a validation: the metrics listed in `Validator.run`, and `total_validation_time` in seconds."""

    metrics: Metrics
    timings: dict[str, float]


OWN_METRICS = (
    "accuracy", "avg_length", "num_samples", "right_or_wrong", "accuracy_ci95_low", "accuracy_ci95_high", "pass_k",
)  # fmt: skip
"""The metrics that any validation may return, in addition to those of environments."""


@dataclass
class Validator:
    """A validator, which runs validations and decides when they are due. Sampling is seeded with the name `val` and the
    prompt's index in the data set, so two validations of the same weights give the same responses."""

    generation: GenerationInterface
    loader: StatefulDataLoader
    tokenizer: TokenizerType
    task_to_env: Mapping[str, Environment]  # the environment that scores the responses, by task
    loop: LoopConfig  # the configuration section of the training loop, such as `grpo` or `ppo`
    policy: PolicyConfig
    logger: Logger | None = None
    num_samples_to_print: int = 0

    def gives(self, rollout_names: Collection[str], task_to_env: Mapping[str, Environment]) -> list[str] | None:
        """Return the sorted names of the metrics that a validation will have: `rollout_names`, the metrics of training
        rollouts, and the metrics of validations alone. Return None (not known yet) if names or classes of the
        validation's environments differ from the training environments `task_to_env`."""
        mine, theirs = ({name: type(env) for name, env in envs.items()} for envs in (self.task_to_env, task_to_env))
        return sorted({*rollout_names, *OWN_METRICS}) if mine == theirs else None

    def due(self, step: int, is_last: bool) -> bool:
        """Return whether to validate after step `step`, counted from 1. `is_last`: whether the run ends with it."""
        if is_last and self.loop.val_at_end:
            return True
        period = self.loop.val_period
        return period > 0 and step % period == 0 and step >= self.loop.val_start_at

    def run(self, step: int) -> ValidationResult:
        """Validate the current weights, write val_data_step<step>.jsonl, and return the metrics:

            accuracy: the mean raw reward.
            accuracy_ci95_low, accuracy_ci95_high: the 95 % Wilson interval of accuracy, with one trial per prompt; only
                for rewards in [0, 1].
            avg_length: the mean number of tokens per response.
            num_samples: the number of prompts.
            right_or_wrong: 1 if every reward was 0 or 1, otherwise 0; reports then write "reward" instead of
                "accuracy".
            pass_k: with several generations per prompt, the share of prompts with a positive reward.

        and the metrics of rollouts and environments. Raise ValueError if there are no prompts."""
        start, rounds = time.perf_counter(), []
        logs: list[list[dict[str, str]]] = []
        rewards: list[float] = []
        right: list[object] = []
        with generating(self.generation):
            for prompts in self._prompts():
                rollouts, metrics = run_multi_turn_rollout(
                    self.generation, prompts, self.tokenizer, self.task_to_env, self.policy.max_total_sequence_length,
                    self.loop.max_rollout_turns, greedy=self.policy.generation.val_temperature == 0,
                )  # fmt: skip
                rounds.append((rollouts.size, metrics))
                rewards += rollouts["total_reward"].tolist()
                logs += [[{key: m[key] for key in ("role", "content")} for m in log] for log in rollouts["message_log"]]
                right += truths(rollouts).get("ground_truth", [None] * rollouts.size)
        metrics = self._metrics(rewards, combine_rollout_metrics(rounds))
        if self.logger is not None:
            table: dict[str, object] = {"content": logs, "rewards": rewards}
            if any(truth is not None for truth in right):
                table["ground_truth"] = right
            self.logger.log_batched_dict_as_jsonl(table, f"val_data_step{step}.jsonl")
        if self.num_samples_to_print:
            print_samples(logs, rewards, self.num_samples_to_print, step)
        return ValidationResult(metrics, {"total_validation_time": time.perf_counter() - start})

    def _prompts(self) -> Iterator[BatchedDataDict]:
        """Yield batches of prompts, max_val_samples prompts in total, or all prompts if there are fewer."""
        limit = self.loop.max_val_samples
        taken = 0
        for batch in self.loader:
            if limit is not None and taken + batch.size > limit:
                batch = batch.select_indices(torch.arange(limit - taken))
            if batch.size:
                yield repeat_prompts(batch, self.loop.val_num_generations_per_prompt, taken, stream="val")
            taken += batch.size
            if limit is not None and taken >= limit:
                break

    def _metrics(self, rewards: list[float], rollout_metrics: Metrics) -> Metrics:
        if not rewards:
            raise ValueError(
                f"validation has no prompts: check data.validation and {self.loop.section_name}.max_val_samples"
            )
        each = self.loop.val_num_generations_per_prompt
        per_prompt = [rewards[i : i + each] for i in range(0, len(rewards), each)]
        accuracy = math.fsum(rewards) / len(rewards)
        metrics = {
            **rollout_metrics,
            "accuracy": accuracy,
            "avg_length": rollout_metrics["mean_gen_tokens_per_sample"],
            "num_samples": len(per_prompt),
            "right_or_wrong": float(all(reward in (0.0, 1.0) for reward in rewards)),
        }
        if all(0.0 <= reward <= 1.0 for reward in rewards):
            interval = wilson_interval(accuracy, len(per_prompt))
            metrics |= {"accuracy_ci95_low": interval.low, "accuracy_ci95_high": interval.high}
        if each > 1:
            metrics["pass_k"] = sum(max(group) > 0 for group in per_prompt) / len(per_prompt)
        return metrics


def headline(metrics: Mapping[str, Any]) -> tuple[str, float]:
    """Return (name, value) of the main result: the loss on held-out answers, or the mean reward, which is named
    "accuracy" if all rewards were 0 or 1, otherwise "reward"."""
    if "val_loss" in metrics:
        return "loss", float(metrics["val_loss"])
    word = "accuracy" if metrics.get("right_or_wrong", 1.0) == 1.0 else "reward"
    return word, float(metrics["accuracy"])


def reached_target(metrics: Metrics | None, loop: LoopConfig) -> bool:
    """Return whether a validation reached `stop_at_validation_threshold`."""
    name, threshold = loop.stop_at_validation_metric, loop.stop_at_validation_threshold
    if metrics is None or threshold is None:
        return False
    return metrics.get(name, -math.inf) >= threshold


# ---- conversations in the terminal


def choose_samples(rewards: Sequence[float], num_samples: int) -> list[int]:
    """Return the indices of the samples to print: half of them with the highest rewards, half with the lowest, and one
    from the middle if `num_samples` is odd; all if there are no more."""
    if len(rewards) <= num_samples:
        return list(range(len(rewards)))
    ranked = sorted(range(len(rewards)), key=lambda index: rewards[index], reverse=True)
    half = num_samples // 2
    middle = [ranked[len(ranked) // 2]] if num_samples % 2 else []
    return ranked[:half] + middle + (ranked[-half:] if half else [])


def print_samples(
    logs: Sequence[Sequence[Mapping[str, str]]], rewards: Sequence[float], num_samples: int, step: int
) -> None:
    """Print up to `num_samples` conversations with their rewards, as chosen by `choose_samples`."""
    console = Console()
    for index in choose_samples(rewards, num_samples):
        text = "\n".join(f"{message['role']}: {message['content']}" for message in logs[index])
        console.print(Panel(Text(text), title=f"step {step}, row {index}, reward {rewards[index]:.4g}"))
