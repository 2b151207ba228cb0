"""Choose memory settings (micro-batches, activation checkpointing, kept activations, size of the KV cache) with which
the estimated memory is at most policy.memory_budget_gb."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nemo_rl_cpp.config.errors import ConfigError, Problem
from nemo_rl_cpp.config.master import TrainMasterConfig, WholeConfig
from nemo_rl_cpp.config.policy import MEMORY_BUDGET
from nemo_rl_cpp.models import memory
from nemo_rl_cpp.models.model_sizes import model_sizes

_KEEP_ALL = 1e9  # GB
_UNCOUNTED = 0.06e9
"""Bytes of a budget for what the forecast does not count: modules of the user's code, and buffers of threads."""


def within_budget(config: WholeConfig) -> WholeConfig:
    """Return the configuration with memory settings that fit policy.memory_budget_gb, the first of `_choices` that
    does, or `config` itself if no budget is set.

    A setting stays if the user sets it in the same file as the budget or with a higher precedence, such as on the
    command line. Of the changed settings only micro-batches affect results (by rounding). Raise ConfigError if no
    choice fits."""
    if not isinstance(config, TrainMasterConfig) or config.policy.memory_budget_gb is None:
        return config
    budget, peak, chosen = config.policy.memory_budget_gb * 1e9, None, config
    for chosen in _choices(config):
        phases = memory.forecast(memory.with_known_sizes(chosen))
        if phases is None:
            text = f"needs the sizes of {config.policy.model_name}, which are not on this machine: download it first, or leave this out"
            raise ConfigError([Problem(config.positions.get(MEMORY_BUDGET, ""), MEMORY_BUDGET, text)])
        peak = max(phases, key=lambda phase: phase.total)
        if peak.total + _UNCOUNTED <= budget:
            return chosen
    raise ConfigError([Problem(config.positions.get(MEMORY_BUDGET, ""), MEMORY_BUDGET, _too_small(chosen, peak))])


def budget_text(config: TrainMasterConfig) -> str | None:
    """Return text with the budget and the chosen memory settings; None if no budget is set."""
    budget = config.policy.memory_budget_gb
    return None if budget is None else f"{budget:g} GB: {_settings_text(config)}"


def _settings_text(config: TrainMasterConfig) -> str:
    policy, sized = config.policy, memory.with_known_sizes(config)
    samples = memory.micro_batch_tokens(policy, "train") // policy.max_total_sequence_length
    parts = {name: size for phase in memory.forecast(sized) or () for name, size in phase.parts}
    kept, cache = parts.get("kept activations", 0.0), parts.get("KV cache")
    texts = [
        f"micro-batches of {samples} {'sample' if samples == 1 else 'samples'}",
        "activation checkpointing" if policy.activation_checkpointing else "no activation checkpointing",
        f"{memory.size_text(kept)} of kept activations" if kept else "no kept activations",
    ]
    return ", ".join(texts + ([] if cache is None else [f"a KV cache of {memory.size_text(cache)}"]))


def _choices(config: TrainMasterConfig) -> Iterator[TrainMasterConfig]:
    """Yield the configuration, then variants that need less and less memory: smaller micro-batches, which cost the
    least time; no kept activations; activation checkpointing; half of the KV cache, and so on."""
    policy, fixed = config.policy, config.fixed_by_user
    section = f"policy.{'megatron_cfg' if policy.megatron_cfg.enabled else 'dtensor_cfg'}.activation_checkpointing"
    checkpointing = [policy.activation_checkpointing]
    if section not in fixed and not checkpointing[0]:
        checkpointing.append(True)
    for cache in _cache_sizes(config):
        for recomputes in checkpointing:
            for kept in _kept_sizes(config, recomputes):
                for samples in _micro_batches(config):
                    yield _with(config, samples, recomputes, kept, cache)


def _micro_batches(config: TrainMasterConfig) -> Iterator[int | None]:
    """Yield numbers of samples per micro-batch to try: None for the configured one, then half as many each time."""
    yield None
    batch = "sequence_packing" if config.policy.sequence_packing.enabled else "dynamic_batching"
    if not config.fixed_by_user & {"policy.train_micro_batch_size", f"policy.{batch}.train_mb_tokens"}:
        samples = memory.micro_batch_tokens(config.policy, "train") // config.policy.max_total_sequence_length
        while samples > 1:
            samples //= 2
            yield samples


def _kept_sizes(config: TrainMasterConfig, recomputes: bool) -> list[float | None]:
    """Return the values of policy.kept_activations_gb to try, largest first. `recomputes`: activation checkpointing is
    on, so no activations are kept."""
    policy = config.policy
    if "policy.kept_activations_gb" in config.fixed_by_user:
        return [policy.kept_activations_gb]
    if recomputes or policy.reuse_generation_logprobs == "never" or config.algorithm == "sft":
        return [0.0]
    return [_KEEP_ALL, 0.0]


def _cache_sizes(config: TrainMasterConfig) -> Iterator[float | None]:
    """Yield values of policy.generation.kv_cache_gb to try: the configured one, then halves, down to one sequence's."""
    policy = memory.with_known_sizes(config).policy
    yield policy.generation.kv_cache_gb
    sizes = model_sizes(policy.model_name, policy.hf_config_overrides)
    if "policy.generation.kv_cache_gb" in config.fixed_by_user or config.algorithm == "sft" or sizes is None:
        return
    least = memory.least_cache_bytes(policy, sizes)
    phases = memory.forecast(memory.with_known_sizes(config))
    size = dict(part for phase in phases for part in phase.parts)["KV cache"] / 2
    while size > least:
        yield size / 1e9
        size /= 2
    yield least / 1e9


def _with(
    config: TrainMasterConfig, samples: int | None, recomputes: bool, kept: float | None, cache: float | None
) -> TrainMasterConfig:
    """Return a copy of the configuration with micro-batches of `samples` (None: the configured ones), activation
    checkpointing if `recomputes`, and `kept` GB of kept activations and `cache` GB of KV cache."""
    policy = config.policy
    backend = "megatron_cfg" if policy.megatron_cfg.enabled else "dtensor_cfg"
    changed: dict[str, object] = {
        backend: getattr(policy, backend).model_copy(update={"activation_checkpointing": recomputes}),
        "generation": policy.generation.model_copy(update={"kv_cache_gb": cache}),
        "kept_activations_gb": kept,
    }
    if samples is not None:
        tokens = samples * policy.max_total_sequence_length
        changed |= {
            "train_micro_batch_size": samples,
            "logprob_batch_size": min(samples, policy.logprob_batch_size or samples),
        }
        for name in ("sequence_packing", "dynamic_batching"):
            section = getattr(policy, name)
            scored = min(tokens, section.logprob_mb_tokens or tokens)
            changed[name] = section.model_copy(update={"train_mb_tokens": tokens, "logprob_mb_tokens": scored})
    made = config.model_copy(update={"policy": policy.model_copy(update=changed)})
    if kept == _KEEP_ALL:
        policy = memory.with_known_sizes(made).policy
        sizes = model_sizes(policy.model_name, policy.hf_config_overrides)
        need = 0.0 if sizes is None else memory.kept_activations_bytes(made, sizes)
        made.policy.__dict__["kept_activations_gb"] = math.ceil(need / 1e6) / 1e3
    return made


def _too_small(least: TrainMasterConfig, peak: memory.Phase) -> str:
    """Return the error message for a budget that no choice fits. `least` is the last choice, and `peak` its largest
    phase."""
    largest, size = max(peak.parts, key=lambda part: part[1])
    need = peak.total + _UNCOUNTED
    fixed = sorted(least.fixed_by_user)
    verb = "is set and stays" if len(fixed) == 1 else "are set and stay"
    kept = f" ({', '.join(fixed)} {verb})" if fixed else ""
    smaller = "train adapters (policy.dtensor_cfg.lora_cfg.enabled) of quantised weights (policy.quantization)"
    remedy = "or take a smaller model" if least.policy.quantization else f"{smaller}, or take a smaller model"
    return (
        f"is {least.policy.memory_budget_gb:g}, but this run needs {memory.size_text(need)} with {_settings_text(least)}{kept}; the largest part "
        f"is {largest}, {memory.size_text(size)}, in {peak.name}: set it to {math.ceil(need / 1e8) / 10:g} or more, {remedy}"
    )
