"""`nemo-rl-cpp models` lists architectures and popular models, with the memory that each task needs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from nemo_rl_cpp.command_line import at_least, command_parser
from nemo_rl_cpp.config import load_grpo_config, load_ppo_config
from nemo_rl_cpp.models.architectures import SUPPORTED_ARCHITECTURES
from nemo_rl_cpp.models.memory import forecast, generation_bytes, machine_memory, size_text
from nemo_rl_cpp.models.model_sizes import KNOWN_MODELS

if TYPE_CHECKING:
    from nemo_rl_cpp.config.master import GRPOMasterConfig, PPOMasterConfig, TrainMasterConfig
    from nemo_rl_cpp.models.model_sizes import KnownModel

_EXAMPLES = """examples:
  nemo-rl-cpp models
  nemo-rl-cpp models qwen3
  nemo-rl-cpp models 7B --responses 512 --tokens 4096

The forecast for your own run: nemo-rl-cpp train --config my.yaml --dry-run"""


class Task(NamedTuple):
    """A kind of run, which is a column of the memory table: its heading, whether it trains a critic, its KL penalty (0:
    no reference model), and the precision of its weights."""

    heading: str
    critic: bool = False
    kl: float = 0.0
    precision: str = "bfloat16"


TASKS = (Task("GRPO"), Task("with KL", kl=0.01), Task("PPO", critic=True), Task("GRPO fp32", precision="float32"))


def main(arguments: Sequence[str]) -> int:
    what = "List the supported models with the memory that training and generation need on a CPU."
    parser = command_parser("models", what, _EXAMPLES)
    parser.add_argument("word", nargs="?", default="", help="only models with this in their name or model_type")
    parser.add_argument("--responses", type=at_least(1), default=128, help="responses a step (default: 128)")
    parser.add_argument("--tokens", type=at_least(1), default=512, help="of prompt and response (default: 512)")
    known = parser.parse_args(arguments)
    word, types = known.word.lower(), ", ".join(SUPPORTED_ARCHITECTURES)
    models = [model for model in KNOWN_MODELS if word in f"{model.name} {model.model_type}".lower()]
    if not models:
        print(f"no known model has {known.word!r} in its name; any folder or hub name of these types trains: {types}")
        return 1
    memory = machine_memory()
    rows = [["model", "model_type", "parameters", *(task.heading for task in TASKS), "text alone"]]
    rows += [_row(model, known.responses, known.tokens, memory) for model in models]
    print(
        f"Memory at the peak of a step: {known.responses} responses of up to {known.tokens} tokens, micro-batches of 4,\n"
        "activation checkpointing; bfloat16 where nothing is said.\n"
    )
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows.insert(1, ["─" * width for width in widths])
    for row in rows:
        cells = [f"{cell:{'<' if i < 2 else '>'}{widths[i]}}" for i, cell in enumerate(row)]
        print("  ".join(cells).rstrip())
    if memory is not None:
        print(f"\n* fits into this machine's {size_text(memory)}.")
    if not word:
        print(
            f"\nThe native core has the architectures {types}; any model of theirs trains, by folder or hub\n"
            "name, -Instruct and other variants too. Other causal models: policy.backend=hf. `smollm2-135m-instruct` needs no hub."
        )
    return 0


def _row(model: KnownModel, responses: int, tokens: int, memory: float | None) -> list[str]:
    def cell(size: float | None) -> str:
        if size is None:
            return "–"
        return size_text(size) + ("*" if memory is not None and size <= memory else " ")

    peaks = []
    for task in TASKS:
        phases = forecast(_config(model, task, responses, tokens))
        peaks.append(None if phases is None else max(phase.total for phase in phases))
    text = generation_bytes(_config(model, TASKS[0], responses, tokens).policy)
    return [model.name, model.model_type, f"{model.sizes.parameters / 1e9:.3g} B", *map(cell, peaks), cell(text)]


@cache
def _base(critic: bool) -> GRPOMasterConfig | PPOMasterConfig:
    return load_ppo_config("ppo_math_1B.yaml") if critic else load_grpo_config("grpo_math_1B.yaml")


def _config(model: KnownModel, task: Task, responses: int, tokens: int) -> TrainMasterConfig:
    """Return a task's shipped configuration with the model's sizes and batches of `responses` sequences."""
    config = _base(task.critic)  # every call sets all of these keys, so no copy is needed
    loop = config.ppo if task.critic else config.grpo
    loop.__dict__ |= {"num_prompts_per_step": responses, "num_generations_per_prompt": 1}
    for part in (config.policy, config.value) if task.critic else (config.policy,):
        part.__dict__ |= {
            "model_name": model.name, "hf_config_overrides": model.config, "precision": task.precision,
            "max_total_sequence_length": tokens, "train_micro_batch_size": 4, "logprob_batch_size": 4,
        }  # fmt: skip
        part.dtensor_cfg.__dict__ |= {"enabled": True, "activation_checkpointing": True}
        part.sequence_packing.__dict__["enabled"] = part.dynamic_batching.__dict__["enabled"] = False
    config.policy.megatron_cfg.__dict__["enabled"] = False
    config.loss_fn.__dict__["reference_policy_kl_penalty"] = task.kl
    return config
