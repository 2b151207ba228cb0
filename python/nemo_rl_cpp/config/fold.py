"""Sizes and engines that a file was written for: folded onto what runs and the native engine, and said in one line.

How many devices share the work, and how a model is cut for them, says nothing of what is computed: gradients are sums over
the tokens of a batch. Which engine generates neither: an engine is an implementation. What does change results (training
beside generation, quantisation) is never folded; its keys are errors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

from .backends import PARALLEL_SIZES
from .base import Section
from .engines import FOREIGN_ENGINES
from .keys import fields_of, mark_of
from .memory import forecast_summary
from .resources import trainers_of

if TYPE_CHECKING:
    from nemo_rl_cpp.config.generation import GenerationConfig
    from nemo_rl_cpp.config.master import WholeConfig
    from nemo_rl_cpp.config.policy import TrainedModelConfig

_ENGINE_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size", "data_parallel_size")
_CUTS_A_MODEL = ("tensor", "pipeline", "context")


def sizes_of(config: WholeConfig) -> dict[str, int]:
    """Every size above 1 that is folded, by its dotted key: machines, devices, and the parallel sizes of enabled backends. Tensor
    parallel sizes by which the worker processes can be cut are not: they run."""
    ours = config.cluster.has_written_size  # they run
    trainers = max(trainers_of(config), 1) if hasattr(config, "policy") else 1
    sizes = (
        {} if ours else {f"cluster.{name}": getattr(config.cluster, name) for name in ("num_nodes", "gpus_per_node")}
    )
    for name, model in _models(config):
        for backend, keys in PARALLEL_SIZES.items():
            section = getattr(model, backend)
            sizes |= {f"{name}.{backend}.{key}": getattr(section, key) for key in keys if section.enabled}
        tensor = model.tensor_parallel(trainers)
        if tensor > 1:
            sizes.pop(model.tensor_parallel_key(name))
    prefix, generation = _generation(config)
    sizes |= {f"{prefix}.vllm_cfg.{key}": getattr(generation.vllm_cfg, key) for key in _ENGINE_SIZES}
    if (
        hasattr(config, "policy")
        and config.policy.tensor_parallel(trainers) == generation.vllm_cfg.tensor_parallel_size
    ):
        sizes.pop(f"{prefix}.vllm_cfg.tensor_parallel_size")  # the engine has the policy's slices
    return {key: size for key, size in sizes.items() if size != 1}


def devices_of(config: WholeConfig) -> int:
    """How many devices a configuration was written for: those of the cluster, or as many as a model is cut into."""
    cut: dict[str, list[int]] = {}
    for key, size in sizes_of(config).items():
        section, _, name = key.rpartition(".")
        if name.startswith(_CUTS_A_MODEL):
            cut.setdefault(section, []).append(size)
    written = 1 if config.cluster.has_written_size else config.cluster.num_nodes * config.cluster.gpus_per_node
    return max(written, *(prod(sizes) for sizes in cut.values()), 1)


def engine_of(config: WholeConfig) -> str | None:
    """The engine of NeMo RL that the trainer's own stands in for; None for that one."""
    generation = _generation(config)[1]
    return generation.backend if generation.backend in FOREIGN_ENGINES and not generation.runs_vllm else None


def is_apart(config: WholeConfig) -> bool:
    """Whether generation was to have devices of its own, and shares the trainer's."""
    cluster = config.cluster
    return not _generation(config)[1].colocated.enabled and (not cluster.has_workers or cluster.executor == "auto")


def fold_text(config: WholeConfig) -> str | None:
    """The one line that a run, `check` and `--dry-run` print about what was folded; None where nothing was."""
    devices, engine, apart = devices_of(config), engine_of(config), is_apart(config)
    written = []
    if devices > 1:
        sizes = ", ".join(f"{key} {size}" for key, size in sizes_of(config).items())
        written.append(f"{devices} devices ({sizes})")
    if engine is not None:
        written.append(f"the engine {engine}")
    if apart:
        written.append("generation on devices of its own")
    if not written:
        return None
    count = config.cluster.processes
    own = _own_engine(config)
    here = (
        f"on {f'{count} processes' if count > 1 else '1 device'} ({config.cluster.device}) with {own}"
        if devices > 1 or apart
        else f"with {own}"
    )
    text = f"written for {' and '.join(written)}: runs {here}; same mathematics"
    if devices > 1:
        if count == 1:
            text += f", about {devices} times the time of {devices} such devices"
        if (summary := forecast_summary(config)) is not None:
            text += f"; memory forecast: {summary}"
    return text


def _own_engine(config: WholeConfig) -> str:
    """What generates, for people."""
    if _generation(config)[1].runs_vllm:
        return "vLLM"
    return "transformers" if hasattr(config, "policy") and config.policy.backend == "hf" else "the native engine"


_SAID: set[str] = set()  # without the forecast, which follows from the rest


def note_as_said(text: str) -> str:
    """Remembers a line of `fold_text` that goes to the user by another way, so that the run does not repeat it."""
    _SAID.add(text.partition("; memory forecast")[0])
    return text


def say_fold(config: WholeConfig) -> None:
    """Prints `fold_text` to stderr, once in a process: for configurations that no script has looked at before."""
    text = fold_text(config)
    if text is not None and text.partition("; memory forecast")[0] not in _SAID:
        print(f"warning: {note_as_said(text)}", file=sys.stderr, flush=True)


def keys_without_effect(config: WholeConfig) -> dict[str, list[str]]:
    """The keys that a file or the command line sets to other than their usual values and that make no difference here, by the
    section that holds them. They steer another implementation: its kernels, its communication, its engine.
    """
    found: dict[str, list[str]] = {}
    for section, name in _ineffective(config, "", config.positions):
        found.setdefault(section, []).append(name)
    return found


def keys_without_effect_text(config: WholeConfig) -> str | None:
    """`keys_without_effect` for the terminal; None where there are none."""
    found = keys_without_effect(config)
    if not found:
        return None
    lines = ["Keys without effect here (they only steer NeMo RL's own engines, kernels and communication):"]
    return "\n".join([*lines, *(f"  {section}: {', '.join(names)}" for section, names in found.items())])


def _models(config: WholeConfig) -> Iterator[tuple[str, TrainedModelConfig]]:
    """The models that are trained, with the names of their sections."""
    if hasattr(config, "policy"):
        yield "policy", config.policy
    if config.has_critic:
        yield "value", config.value


def _generation(config: WholeConfig) -> tuple[str, GenerationConfig]:
    if hasattr(config, "policy"):
        return "policy.generation", config.policy.generation
    return "generation", config.generation


def _ineffective(section: Section, prefix: str, positions: dict[str, str]) -> Iterator[tuple[str, str]]:
    fields = {info.alias or name: name for name, info in type(section).model_fields.items()}
    for key, info in fields_of(type(section)):
        value, dotted = getattr(section, fields[key]), f"{prefix}{key}"
        if mark_of(info).get("no_effect"):
            written = dotted in positions or any(place.startswith(f"{dotted}.") for place in positions)
            if written and value != info.get_default(call_default_factory=True):
                yield prefix.rstrip(".") or "the file", key
        elif isinstance(value, Section):
            yield from _ineffective(value, f"{dotted}.", positions)
