"""Runs of the tiny model (100 thousand random parameters, grpo_tiny.yaml and ppo_tiny.yaml) inside the test process."""

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nemo_rl_cpp.algorithms.build import TrainingRun, build_run
from nemo_rl_cpp.algorithms.parts import RunData, make_data
from nemo_rl_cpp.config import load_grpo_config, load_ppo_config
from nemo_rl_cpp.config.loader import kind_of

# RoPE that distinguishes close positions, a wider model, four updates per step: learns within 120 steps
FAST = (
    "++policy.hf_config_overrides.rope_theta=3.0", "policy.hf_config_overrides.hidden_size=128",
    "policy.hf_config_overrides.num_attention_heads=8", "policy.hf_config_overrides.num_key_value_heads=8",
    "grpo.num_generations_per_prompt=16", "policy.train_global_batch_size=128", "policy.optimizer.kwargs.lr=7e-4",
)  # fmt: skip
LOGGED = "logger.report=true", "logger.tensorboard_enabled=true"  # switched off in the runs of `make`
SMALL = ("grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4", "policy.train_global_batch_size=32")
SMALL_PPO = (
    "ppo.num_prompts_per_step=8", "ppo.num_generations_per_prompt=4", "policy.train_global_batch_size=32",
    "value.train_global_batch_size=32",
)  # fmt: skip


def seeds_of(quick: dict[str, tuple[int, ...]], several: Iterable[int] = range(1, 6)) -> list[Any]:
    """Return pytest parameters (name, seed) of runs that learn.

    The seeds in `quick` run in every suite, the others of `several` only with `pytest -m long`."""
    return [
        pytest.param(name, seed, marks=() if seed in seeds else pytest.mark.long)
        for name, seeds in quick.items()
        for seed in several
    ]


def one_thread() -> None:
    """Use one thread: with two, results are bit-identical, but a model of this size is slower."""
    torch.set_num_threads(1)


def make(
    folder: Path, *overrides: str, config: str = "grpo_tiny.yaml", environment: Any = None, **options: Any
) -> TrainingRun:
    """Return a run of `config` that writes into `folder`, but prints nothing and writes no checkpoints, reports and
    TensorBoard events.

    `environment` scores every training task instead of the configuration's environment. `options` are passed to
    `build_run`."""
    one_thread()
    section = kind_of(config)
    load = load_grpo_config if section == "grpo" else load_ppo_config
    config = load(
        config,
        ["logger.report=false", "logger.tensorboard_enabled=false", f"logger.log_dir={folder / 'logs'}",
         f"checkpointing.checkpoint_dir={folder / 'checkpoints'}", "checkpointing.enabled=false",
         f"{section}.val_period=0", f"{section}.val_at_end=false", *overrides],
    )  # fmt: skip

    def data(config: Any, tokenizer: Any) -> RunData:
        made = make_data(config, tokenizer)
        if environment is not None:
            made.environments.train = dict.fromkeys(made.environments.train, environment)
        return made

    run = build_run(config, data=data, **options)
    run.terminal.progress.mode = "quiet"
    return run


class StopWhenLearned:
    """A hook that ends a run once the mean of the raw rewards of five steps is above `target`."""

    def __init__(self, run: TrainingRun, target: float):
        self.run, self.target = run, target

    def __call__(self, result):
        rewards = [row["accuracy"] for row in self.run.history[-5:]]
        if len(rewards) == 5 and sum(rewards) / 5 > self.target:
            result.state.stop("learned")


def train(folder: Path, *overrides: str, until: float | None = None, **options: Any) -> TrainingRun:
    """Make a run as `make` does, and train. `run.history` has the metrics of each step.

    Stop early once the mean raw reward of five steps is above `until`."""
    run = make(folder, *overrides, **options)
    if until is not None:
        run.after_step.append(StopWhenLearned(run, until))
    run.train()
    return run


def learn(config: str, seed: int, folder: Path, until: float = 0.9) -> SimpleNamespace:
    """Train until the mean accuracy of five steps is above `until`, validate, and return a summary of the run."""
    section = kind_of(config)
    run = train(Path(folder), f"{section}.seed={seed}", f"{section}.max_num_steps=400", config=config, until=until)
    accuracy = [row["accuracy"] for row in run.history]
    return SimpleNamespace(
        history=run.history, first=accuracy[0], last=sum(accuracy[-5:]) / 5,
        held_out=run.validation.validator.run(run.state.step).metrics["accuracy"], has_critic=run.config.has_critic,
    )  # fmt: skip
