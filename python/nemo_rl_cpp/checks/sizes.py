"""Reports the sizes and engines that a file was written for, and checks whether this machine's memory is enough."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from nemo_rl_cpp.config.fold import fold_text, note_as_said
from nemo_rl_cpp.config.master import TrainMasterConfig, WholeConfig
from nemo_rl_cpp.models.memory import (
    certain_bytes,
    fit_text,
    fits,
    forecast,
    forecast_summary,
    known_model,
    machine_memory,
    size_text,
    swap_memory,
    with_known_sizes,
)

from .finding import Finding

_DRIVERS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")  # the last is that of WSL
_EXPERTS = re.compile(
    r"\d[bB]-?[aA]\d+(\.\d+)?[bB](?![a-zA-Z0-9])"
)  # 30B-A3B: so many parameters, so many of them active


def check(config: WholeConfig) -> Iterator[Finding]:
    """One line about what was folded, and an error if weights and optimizer alone exceed the machine's memory."""
    text = fold_text(config, forecast_summary(config))
    if text is not None:
        yield Finding("warning", "", note_as_said(text))
    if config.cluster.device == "cuda" and not any(map(os.path.exists, _DRIVERS)):
        yield Finding(
            "warning",
            "cluster.device",
            "is cuda, but no NVIDIA driver is loaded on this machine: a run here ends when it asks for the GPU",
        )
    if not isinstance(config, TrainMasterConfig) or config.cluster.device != "cpu":
        return
    name = config.policy.model_name
    named_experts = _EXPERTS.search(name) and not Path(name).expanduser().is_dir() and known_model(name) is None
    if config.policy.backend == "native" and named_experts:
        yield Finding(
            "warning",
            "policy.model_name",
            f"is {name}, by its name a mixture of experts, and policy.backend native has those of some model types only (docs/supported-models.md): with "
            "another the run ends where it reads the model's config.json; policy.backend=hf trains it with transformers",
        )
    needed, memory = certain_bytes(config), machine_memory()
    machine = memory + swap_memory() if memory is not None else None
    if needed is not None and machine is not None and needed > machine:
        exact = (
            config.policy.backend == "native"
        )  # else the sizes are those of a native model of the same configuration
        yield Finding(
            "error" if exact else "warning",
            "policy.model_name",
            f"is {config.policy.model_name}, whose weights, gradients and optimizer alone take {size_text(needed)}, but this machine "
            f"has {size_text(machine)} of memory and swap; take a smaller model or a larger machine (--dry-run shows the forecast)",
        )
    elif fits(config := with_known_sizes(config)) is False:
        peak = max(phase.total for phase in forecast(config) or ())
        yield Finding("warning", "", f"the forecast of memory, {size_text(peak)} at the peak, {fit_text(config)}")
