"""Rules of the generation engine and of sizes: what is folded, what `cluster.strict_sizes` refuses, what changes results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING

from .errors import Report
from .fold import is_apart, sizes_of
from .generation import GenerationConfig

if TYPE_CHECKING:
    from nemo_rl_cpp.config.master import WholeConfig

_PRECISIONS = (None, "auto", "bfloat16", "bf16", "float32", "fp32", "float", "float16", "fp16", "half")
_QUANTISED = ("quantization", "quant_cfg", "quant_config", "quantization_config")
_OFFLOADS = (
    "dtensor_cfg.cpu_offload",
    "megatron_cfg.fine_grained_activation_offloading",
    "megatron_cfg.optimizer.optimizer_cpu_offload",
)
_OF_A_TYPE = ("dtype", "precision", "kv_cache_dtype")


def check_sizes(config: WholeConfig, report: Report) -> None:
    """With `cluster.strict_sizes` nothing is folded."""
    if not config.cluster.strict_sizes:
        return
    count = config.cluster.processes
    has, there = ("one device", "on one device") if count == 1 else (f"{count} processes", "without it")
    for key, size in sizes_of(config).items():
        report.add(
            key,
            f"is {size}, but the run has {has} and cluster.strict_sizes is true; set it to 1, or strict_sizes to false to run {there} "
            "with the same mathematics",
            "cluster.strict_sizes",
        )
    if is_apart(config):
        key = "policy.generation.colocated.enabled" if hasattr(config, "policy") else "generation.colocated.enabled"
        report.add(
            key, "is false, but generation shares the one device and cluster.strict_sizes is true; set one of the two the other way",
            "cluster.strict_sizes",
        )  # fmt: skip


def check_offload(config: WholeConfig, report: Report) -> None:
    """Offloading says where memory lies; on a GPU it is needed and not there."""
    if config.cluster.device == "cpu":
        return
    for name in ("policy", "value"):
        model = getattr(config, name, None)
        for key in _OFFLOADS if model is not None else ():
            if getattr(model, key.partition(".")[0]).enabled and attrgetter(key)(model):
                report.add(
                    f"{name}.{key}",
                    "cannot be true with cluster.device cuda: offloading is not supported yet; set it to false",
                )


def check_engine(
    generation: GenerationConfig, name: str, report: Report, overrides: Mapping[str, object] | None = None
) -> None:
    """Settings of other engines that would change results: quantised weights, activations, keys and values; another model.

    `overrides`: policy.hf_config_overrides, which vllm_kwargs.hf_overrides may repeat.
    """
    for key in ("precision", "kv_cache_dtype"):
        value = getattr(generation.vllm_cfg, key)
        if value not in _PRECISIONS:
            report.add(f"{name}.vllm_cfg.{key}", _quantised(value))
    for engine in ("vllm_kwargs", "sglang_cfg", "trtllm_cfg", "dynamo_cfg"):
        for key, value in _leaves(getattr(generation, engine) or {}, f"{name}.{engine}"):
            last = key.rpartition(".")[2]
            if (last in _QUANTISED and _quantises(value)) or (last in _OF_A_TYPE and value not in _PRECISIONS):
                report.add(key, _quantised(value))
    megatron = generation.mcore_generation_config
    if ((megatron.model_extra or {}).get("fp8_cfg") or {}).get("enabled"):
        report.add(f"{name}.mcore_generation_config.fp8_cfg.enabled", _quantised("true"))
    for key, value in (generation.vllm_kwargs.get("hf_overrides") or {}).items():
        if (overrides or {}).get(key) != value:
            report.add(
                f"{name}.vllm_kwargs.hf_overrides.{key}",
                "changes the model of generation alone, which shares the trainer's; set it in policy.hf_config_overrides as well",
                "policy.hf_config_overrides",
            )


def _quantises(value: object) -> bool:
    """Whether a setting of quantisation switches it on; a section does unless its scheme is a plain type."""
    return bool(value) and (value.get("scheme", "unknown") if isinstance(value, dict) else value) not in _PRECISIONS


def _quantised(value: object) -> str:
    return f"is {value}: quantised generation changes results and is not supported; set it to the precision of the policy (bfloat16 or float32)"


def _leaves(tree: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    """Values of a free mapping by dotted key. A quantisation that is a section counts as one value."""
    for key, value in tree.items():
        if isinstance(value, dict) and key not in _QUANTISED:
            yield from _leaves(value, f"{prefix}.{key}")
        else:
            yield f"{prefix}.{key}", value
