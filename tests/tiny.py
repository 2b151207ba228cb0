"""Runs of the tiny model (100 thousand random parameters, configs/grpo_tiny.yaml) inside the test process."""

from pathlib import Path
from types import SimpleNamespace

import torch

from nemo_rl_cpp.algorithms import grpo
from nemo_rl_cpp.algorithms import setup as build
from nemo_rl_cpp.config import load_grpo_config

# close positions that rotary embeddings tell apart, a wider model, four updates a step: learns within 120 steps
FAST = (
    "++policy.hf_config_overrides.rope_theta=3.0", "policy.hf_config_overrides.hidden_size=128",
    "policy.hf_config_overrides.num_attention_heads=8", "policy.hf_config_overrides.num_key_value_heads=8",
    "grpo.num_generations_per_prompt=16", "policy.train_global_batch_size=128", "policy.optimizer.kwargs.lr=7e-4",
)  # fmt: skip
SMALL = ("grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4", "policy.train_global_batch_size=32")


def make(folder: Path, *overrides: str) -> SimpleNamespace:
    """parts, config, state of a run that writes into `folder`; nothing is printed, nothing saved."""
    torch.set_num_threads(1)  # the same bits as with two, and sooner at this size
    config = load_grpo_config(
        "grpo_tiny.yaml",
        [f"logger.log_dir={folder / 'logs'}", f"checkpointing.checkpoint_dir={folder / 'checkpoints'}", "checkpointing.enabled=false",
         "grpo.val_period=0", "grpo.val_at_end=false", *overrides],
    )  # fmt: skip
    tokenizer = build.make_tokenizer(config.policy)
    data = build.make_data(config, tokenizer)
    policy, generation, _, _, loader, val_loader, loss_fn, logger, checkpoints, state, *_ = grpo.setup(config, tokenizer, data.train, data.validation)
    parts = grpo.make_components(
        policy, generation, loader, val_loader, tokenizer, loss_fn, data.task_to_env, data.val_task_to_env, logger, checkpoints, state, config
    )
    parts.run.progress.mode = "quiet"
    return SimpleNamespace(parts=parts, config=config, state=state, policy=policy)


class StopWhenLearned:
    """Ends a run once the mean reward of five steps is above `target`."""

    def __init__(self, run: SimpleNamespace, target: float):
        self.run, self.target = run, target

    def step(self, step, metrics):
        rewards = [row["reward"] for row in self.run.parts.run.history[-5:]]
        if len(rewards) == 5 and sum(rewards) / 5 > self.target:
            self.run.state.stop("learned")

    def print(self, text):
        pass

    def finish(self, summary, title):
        pass


def train(folder: Path, *overrides: str, until: float | None = None) -> SimpleNamespace:
    """The same, after training; `history` holds the metrics of each step. `until`: stop at this mean reward."""
    run = make(folder, *overrides)
    if until is not None:
        run.parts.run.progress = StopWhenLearned(run, until)
    grpo.run_to_end(grpo.grpo_loop, run.parts, run.config, run.state, "tiny")
    run.history = run.parts.run.history
    return run
