"""Runs of the tiny model (100 thousand random parameters, grpo_tiny.yaml and ppo_tiny.yaml) inside the test process."""

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nemo_rl_cpp.algorithms.build import TrainingRun, build_run
from nemo_rl_cpp.algorithms.parts import RunData, make_data
from nemo_rl_cpp.config import load_grpo_config, load_ppo_config
from nemo_rl_cpp.config.loader import kind_of
from nemo_rl_cpp.models.policy.lm_policy import Policy

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


SAVED_AT_THE_END = ("checkpointing.enabled=true", "checkpointing.save_period=1000", "checkpointing.metric_name=null")
EXPERTS = {
    "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True,
}  # fmt: skip
RECURRENT = {
    "model_type": "qwen3_5_text", "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
MAMBA2 = {
    "model_type": "nemotron_h", "hybrid_override_pattern": "M-*-", "n_groups": 2, "mamba_num_heads": 4, "ssm_state_size": 16,
    "mamba_head_dim": 16,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "kv_lora_rank": 16,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip


def shaped(keys: dict[str, Any]) -> tuple[str, ...]:
    """Return the overrides that give the random model these keys of config.json."""
    return tuple(f"++policy.hf_config_overrides.{key}={value}" for key, value in keys.items())


def workers(count: int, executor: str = "processes") -> tuple[str, ...]:
    return (f"cluster.executor={executor}", f"cluster.gpus_per_node={count}", "cluster.cpus_per_worker=1")


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


def watch_training(run: TrainingRun, note: Callable[[Any], object]) -> None:
    """Call `note` with each batch that the policy is trained on, before the training."""
    train = run.policy.train

    def watched(batch: Any, *args: Any, **given: Any) -> Any:
        note(batch)
        return train(batch, *args, **given)

    run.policy.train = watched


def policy_of_version(folder: Path, run: TrainingRun, version: int) -> Policy:
    """Return a policy with the weights after `version` steps, from the checkpoints of a run that writes into `folder`."""
    weights = folder / "checkpoints" / f"step_{version}" / "policy" / "weights" if version else None
    seed = run.config.loop.seed
    return Policy(None, run.config.policy, run.tokenizer, weights_path=weights, init_reference_model=False, seed=seed)


def saved(
    folder: Path, steps: int, *overrides: str, config: str = "grpo_tiny.yaml"
) -> tuple[list[dict[str, Any]], Path]:
    """Train `steps` steps, and return (the metrics of those that were made here, the checkpoint after the last one)."""
    with make(folder, *SAVED_AT_THE_END, f"{kind_of(config)}.max_num_steps={steps}", *overrides, config=config) as run:
        run.train()
    return run.history, folder / "checkpoints" / f"step_{steps}"


def learn(config: str, seed: int, folder: Path, until: float = 0.9) -> SimpleNamespace:
    """Train until the mean accuracy of five steps is above `until`, validate, and return a summary of the run."""
    section = kind_of(config)
    run = train(Path(folder), f"{section}.seed={seed}", f"{section}.max_num_steps=400", config=config, until=until)
    accuracy = [row["accuracy"] for row in run.history]
    return SimpleNamespace(
        history=run.history, first=accuracy[0], last=sum(accuracy[-5:]) / 5,
        held_out=run.validation.validator.run(run.state.step).metrics["accuracy"], has_critic=run.config.has_critic,
    )  # fmt: skip
