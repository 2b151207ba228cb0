"""The `eval` section and the whole configuration of an evaluation."""

from typing import Literal

from .base import Int, Positive, Section, key


class EvalConfig(Section):
    """What is measured."""

    metric: Literal["pass@k", "cons@k"] = key("pass@k", "pass@k: one of k right; cons@k: the majority of k right")
    num_tests_per_prompt: Positive = key(1, "responses to each prompt")
    k_value: Positive = key(1, "k of the metric")
    seed: Int = key(42, "seed of sampling")
    max_rollout_turns: Positive = key(1, "turns of a conversation, for environments that answer")
    save_path: str | None = key(None, "folder for evaluation.html, evaluation_data.json and config.json; null: none")
