"""`nemo-rl-cpp models`: the architectures and popular models, with the memory that they need by task and precision."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from nemo_rl_cpp.command_line import command_parser
from nemo_rl_cpp.config import load_grpo_config, load_ppo_config
from nemo_rl_cpp.models.architectures import SUPPORTED_ARCHITECTURES
from nemo_rl_cpp.models.memory import KNOWN_MODELS, forecast, generation_bytes, machine_memory, size_text

if TYPE_CHECKING:
    from nemo_rl_cpp.config.master import GRPOMasterConfig, PPOMasterConfig, TrainMasterConfig
    from nemo_rl_cpp.models.memory import KnownModel

_EXAMPLES = """examples:
  nemo-rl-cpp models
  nemo-rl-cpp models qwen3
  nemo-rl-cpp models 7B --responses 512 --tokens 4096

The forecast for your own run: nemo-rl-cpp train --config my.yaml --dry-run"""


class Task(NamedTuple):
    """A column: its heading, whether a critic is trained, the weight of a KL penalty, and the precision."""

    heading: str
    critic: bool
    kl: float
    precision: str


TASKS = (
    Task("GRPO", False, 0.0, "bfloat16"),
    Task("with KL", False, 0.01, "bfloat16"),
    Task("PPO", True, 0.0, "bfloat16"),
    Task("GRPO fp32", False, 0.0, "float32"),
)


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = command_parser(
        "models", "List the supported models with the memory that training and generation need on a CPU.", _EXAMPLES
    )
    parser.add_argument("word", nargs="?", default="", help="only models with this in their name or model_type")
    parser.add_argument("--responses", type=_whole, default=128, metavar="N", help="responses a step (default: 128)")
    parser.add_argument(
        "--tokens", type=_whole, default=512, metavar="N", help="tokens of prompt and response together (default: 512)"
    )
    return _show(parser.parse_args(arguments))


def _whole(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _show(arguments: argparse.Namespace) -> int:
    word = arguments.word.lower()
    models = [model for model in KNOWN_MODELS if word in f"{model.name} {model.model_type}".lower()]
    if not models:
        print(
            f"no known model has {arguments.word!r} in its name; any folder or hub name of these types trains: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
        return 1
    memory = machine_memory()
    rows = [_row(model, arguments.responses, arguments.tokens, memory) for model in models]
    heads = ["model", "model_type", "parameters", *(task.heading for task in TASKS), "text alone"]
    print(
        f"Memory at the peak of a step: {arguments.responses} responses of up to {arguments.tokens} tokens, micro-batches of 4,"
    )
    print("activation checkpointing; bfloat16 where nothing is said.\n")
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    for row in [heads, ["─" * width for width in widths], *rows]:
        print(
            "  ".join(
                f"{cell:<{width}}" if i < 2 else f"{cell:>{width}}"
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
        )
    if memory is not None:
        print(f"\n* fits into this machine's {size_text(memory)}.")
    if not word:
        print(
            f"\nThe native core has the architectures {', '.join(SUPPORTED_ARCHITECTURES)}; any model of theirs trains, by folder or hub"
        )
        print(
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


_loaded: dict[bool, GRPOMasterConfig | PPOMasterConfig] = {}


def _config(model: KnownModel, task: Task, responses: int, tokens: int) -> TrainMasterConfig:
    """Return the configuration of a task: the shipped file's, with the model's sizes and the table's batch."""
    if task.critic not in _loaded:
        _loaded[task.critic] = (
            load_ppo_config("ppo_math_1B.yaml") if task.critic else load_grpo_config("grpo_math_1B.yaml")
        )
    config = _loaded[task.critic].model_copy(deep=True)
    loop = config.ppo if task.critic else config.grpo
    loop.__dict__ |= {"num_prompts_per_step": responses, "num_generations_per_prompt": 1}
    for part in (config.policy, config.value) if task.critic else (config.policy,):
        part.__dict__ |= {
            "model_name": model.name, "hf_config_overrides": model.sizes.as_config(), "precision": task.precision,
            "max_total_sequence_length": tokens, "train_micro_batch_size": 4, "logprob_batch_size": 4,
        }  # fmt: skip
        part.dtensor_cfg.__dict__ |= {"enabled": True, "activation_checkpointing": True}
        part.sequence_packing.__dict__["enabled"] = part.dynamic_batching.__dict__["enabled"] = False
    config.policy.megatron_cfg.__dict__["enabled"] = False
    config.loss_fn.__dict__["reference_policy_kl_penalty"] = task.kl
    return config
