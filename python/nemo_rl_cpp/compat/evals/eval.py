"""Evaluation under NeMo RL's names: the house's, and sums of pass@k and cons@k over prompts."""

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from nemo_rl_cpp.config.eval import EvalConfig
from nemo_rl_cpp.config.master import EvalMasterConfig as MasterConfig
from nemo_rl_cpp.config.python_values import checked
from nemo_rl_cpp.evals.eval import main, make_dataset, make_generation, make_loader, run_env_eval
from nemo_rl_cpp.evals.metrics import cons_at_k, pass_at_k


def setup(master_config: MasterConfig, tokenizer: Any, dataset: Any) -> tuple[Any, Any, MasterConfig]:
    """(engine with the model loaded, loader of prompts, the configuration). Raises ConfigError."""
    master_config = checked(master_config, MasterConfig)
    loader = make_loader(master_config, dataset)
    return make_generation(master_config, tokenizer), loader, master_config


def eval_pass_k(rewards: Tensor, num_tests_per_prompt: int, k: int) -> float:
    """Sum over prompts of `pass_at_k`; `rewards` [prompts * num_tests_per_prompt] holds a prompt's responses side by side.

    Divide by the number of prompts for the score. The number of right responses is the sum of a prompt's rewards.
    """
    return math.fsum(
        pass_at_k(num_tests_per_prompt, math.fsum(own), k) for own in _per_prompt(rewards, num_tests_per_prompt)
    )


def eval_cons_k(rewards: Tensor, num_tests_per_prompt: int, k: int, extracted_answers: list[str | None]) -> float:
    """Sum over prompts of `cons_at_k`; `extracted_answers` lie as `rewards` do. Divide by the number of prompts."""
    own_rewards = _per_prompt(rewards, num_tests_per_prompt)
    own_answers = _per_prompt(extracted_answers, num_tests_per_prompt)
    return math.fsum(cons_at_k(r, a, k) for r, a in zip(own_rewards, own_answers, strict=True))


def _per_prompt(values: "Tensor | list[Any]", size: int) -> Iterator[list[Any]]:
    flat = values.tolist() if isinstance(values, Tensor) else values
    return (flat[i : i + size] for i in range(0, len(flat), size))
