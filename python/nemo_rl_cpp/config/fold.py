"""Folding: running a configuration on fewer devices, or with another engine, than it was written for, with a line that
says so. Neither changes the result, because gradients are sums over the tokens of a batch. Settings that change results,
such as quantisation, are errors. `EXACTNESS` lists how closely generation and training agree (docs/transformers.md,
docs/vllm.md)."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from .base import Section, fields_of, mark_of
from .cluster import trainers_of
from .generation import FOREIGN_ENGINES
from .optimizer import PARALLEL_SIZES

if TYPE_CHECKING:
    from nemo_rl_cpp.config.master import WholeConfig
    from nemo_rl_cpp.config.policy import PolicyConfig


class Exactness(NamedTuple):
    """Whether the log-probabilities of generation and training are bit-identical (`equal`), and a `text` that explains
    why."""

    equal: bool
    text: str


_VLLM = Exactness(
    False,
    "another engine with weights of its own, whose digest is compared at each refit: the trainer scores each batch before it trains on it, "
    "and token_mult_prob_error and gen_kl_error say how far apart they were (about 1e-5 in float32, 0.01 and more in bfloat16)",
)
EXACTNESS: dict[tuple[str, str], Exactness] = {
    ("native", "native"): Exactness(True, "one computation: token_mult_prob_error is 1 and max_logprob_gap 0"),
    ("hf", "hf"): Exactness(
        False,
        "two computations on the same weights: the trainer scores each batch before it trains on it, and token_mult_prob_error and "
        "gen_kl_error say how far apart they were",
    ),
    ("native", "vllm"): _VLLM,
    ("hf", "vllm"): _VLLM,
}
"""(policy.backend, engine that generates) -> how closely their log-probabilities agree."""


def engine_name(policy: PolicyConfig) -> str:
    """Return the engine that generates: "vllm" if the run uses vLLM itself, otherwise "native" or "hf", the trainer's
    own engine, which also generates in place of another engine of NeMo RL."""
    backend = policy.generation.backend
    if policy.generation.runs_vllm:
        return "vllm"
    return policy.backend if backend is None or backend in FOREIGN_ENGINES else backend


def exactness_of(policy: PolicyConfig) -> Exactness | None:
    """Return the entry of `EXACTNESS` for the backend and the engine of `policy`; None if they cannot be combined."""
    return EXACTNESS.get((policy.backend, engine_name(policy)))


def exactness_text(config: WholeConfig) -> str | None:
    """Return a line for the terminal on how closely the log-probabilities of generation and training agree. Return None
    for an evaluation, or if the engine cannot be combined with policy.backend."""
    if not config.trained_models() or (row := exactness_of(config.policy)) is None:
        return None
    how = "equal to the bit" if row.equal else "equal up to rounding"
    text = f"generation ({engine_name(config.policy)}) and training ({config.policy.backend}) are {how}: {row.text}"
    if row.equal or not config.loss_fn.correction_left_open:
        return text
    return f"{text}; loss_fn.use_importance_sampling_correction was left open and is true because of that"


_ENGINE_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size", "data_parallel_size")
_CUTS_A_MODEL = ("tensor", "pipeline", "context")


def sizes_of(config: WholeConfig) -> dict[str, int]:
    """Return {dotted key: size} for sizes above 1 that this run does not use: numbers of machines and devices of the
    cluster, and of parallel processes of the enabled backends and of vLLM."""
    ours = config.cluster.has_written_size  # the sizes are used as written
    models = config.trained_models()
    trainers = max(trainers_of(config), 1) if models else 1
    of_cluster = () if ours else ("num_nodes", "gpus_per_node")
    sizes = {f"cluster.{name}": getattr(config.cluster, name) for name in of_cluster}
    for name, model in models.items():
        for backend, keys in PARALLEL_SIZES.items():
            section = getattr(model, backend)
            sizes |= {f"{name}.{backend}.{key}": getattr(section, key) for key in keys if section.enabled}
        tensor = model.tensor_parallel(trainers)
        if tensor > 1:
            sizes.pop(model.tensor_parallel_key(name))
    prefix, generation = config.sampling
    sizes |= {f"{prefix}.vllm_cfg.{key}": getattr(generation.vllm_cfg, key) for key in _ENGINE_SIZES}
    if models and models["policy"].tensor_parallel(trainers) == generation.vllm_cfg.tensor_parallel_size:
        sizes.pop(f"{prefix}.vllm_cfg.tensor_parallel_size")  # the engine uses the policy's shards
    return {key: size for key, size in sizes.items() if size != 1}


def devices_of(config: WholeConfig) -> int:
    """Return the number of devices for which a configuration was written: the cluster's size, or the number of shards
    of a model if that is larger. Sizes that `sizes_of` omits, because this run uses them, count as 1."""
    cut: dict[str, list[int]] = {}
    for key, size in sizes_of(config).items():
        section, _, name = key.rpartition(".")
        if name.startswith(_CUTS_A_MODEL):
            cut.setdefault(section, []).append(size)
    written = 1 if config.cluster.has_written_size else config.cluster.num_nodes * config.cluster.gpus_per_node
    return max(written, *(prod(sizes) for sizes in cut.values()), 1)


def is_apart(config: WholeConfig) -> bool:
    """Return whether generation has separate devices in the configuration, but shares the trainer's in this run."""
    cluster = config.cluster
    shared = not cluster.has_workers or (cluster.executor == "auto" and not cluster.is_split)
    return not config.sampling[1].colocated.enabled and shared


def fold_text(config: WholeConfig, forecast: str | None = None) -> str | None:
    """Return a line that names the devices and the engine for which the configuration was written, those that this run
    uses instead, and the `forecast` of its memory; None if they are the same."""
    devices, generation, apart = devices_of(config), config.sampling[1], is_apart(config)
    written = []
    if devices > 1:
        sizes = ", ".join(f"{key} {size}" for key, size in sizes_of(config).items())
        written.append(f"{devices} devices ({sizes})")
    if generation.backend in FOREIGN_ENGINES and not generation.runs_vllm:
        written.append(f"the engine {generation.backend}")
    if apart:
        written.append("generation on devices of its own")
    if not written:
        return None
    count = config.cluster.processes
    here = f"on {f'{count} processes' if count > 1 else '1 device'} ({config.cluster.device}) "
    engine = f"{here if devices > 1 or apart else ''}with {_own_engine(config)}"
    text = f"written for {' and '.join(written)}: runs {engine}; same mathematics"
    if devices > 1:
        if count == 1:
            text += f", about {devices} times the time of {devices} such devices"
        if forecast is not None:
            text += f"; memory forecast: {forecast}"
    return text


def _own_engine(config: WholeConfig) -> str:
    if config.sampling[1].runs_vllm:
        return "vLLM"
    policy = config.trained_models().get("policy")
    return "transformers" if policy is not None and policy.backend == "hf" else "the native engine"


def keys_without_effect_text(config: WholeConfig) -> str | None:
    """Return a text that lists ignored keys that a file or the command line sets to a value other than the default;
    they configure kernels, communication or engines of other implementations. None if there are no such keys."""
    found: dict[str, list[str]] = {}
    for section, name in _ineffective(config, "", config.positions):
        found.setdefault(section, []).append(name)
    if not found:
        return None
    lines = ["Keys without effect here (they only steer NeMo RL's own engines, kernels and communication):"]
    return "\n".join([*lines, *(f"  {section}: {', '.join(names)}" for section, names in found.items())])


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
