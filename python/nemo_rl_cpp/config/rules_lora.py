"""Rules of `lora_cfg`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_rl_cpp.argument_checks import did_you_mean

from .errors import Report
from .lora import FROZEN, MATRICES, adapted_modules, matches, modules_of_layers

if TYPE_CHECKING:
    from .lora import LoraConfig
    from .policy import TrainedModelConfig

_MANY_LAYERS = 200  # of no model's, for names of single layers
_ASKING = ("dim", "alpha", "target_modules", "exclude_modules")  # who sets one of these wants adapters


def check_lora(model: TrainedModelConfig, name: str, report: Report) -> None:
    """Of one trained model; `name` is its section."""
    lora, prefix = model.lora, f"{name}.dtensor_cfg.lora_cfg"
    if lora is None:
        if model.dtensor_cfg.lora_cfg.enabled:
            report.add(
                f"{prefix}.enabled",
                f"is true, but it is read with {name}.dtensor_cfg.enabled=true and {name}.megatron_cfg.enabled=false only: set them so, or this "
                "to false",
                f"{name}.megatron_cfg.enabled",
            )
        else:
            _check_unused(model.dtensor_cfg.lora_cfg, prefix, report)
        return
    if model.backend == "hf":
        report.add(
            f"{prefix}.enabled",
            f"is true, but adapters are trained by the native core alone, and {name}.backend is hf: set {name}.backend=native, or enabled=false",
            f"{name}.backend",
        )
    given = [key for key in ("target_modules", "exclude_modules") if getattr(lora, key)]
    if lora.match_all_linear and given:
        report.add(
            f"{prefix}.{given[0]}",
            f"names matrices, and match_all_linear is true, which means all of them: set {prefix}.match_all_linear=false",
            f"{prefix}.match_all_linear",
        )
    elif len(given) == 2:
        report.add(
            f"{prefix}.exclude_modules",
            "and target_modules are both given; give one of them",
            f"{prefix}.target_modules",
        )
    for key in given:
        for pattern in getattr(lora, key):
            if (fault := _fault(pattern, key)) is not None:
                report.add(f"{prefix}.{key}", fault)
    if not adapted_modules(lora, _MANY_LAYERS) and given == ["exclude_modules"]:
        report.add(f"{prefix}.exclude_modules", "leaves no matrix to adapt; name fewer")


def _check_unused(lora: LoraConfig, prefix: str, report: Report) -> None:
    """Keys of adapters are refused where `enabled` is false, since all weights would be trained. They are no mistake where `enabled: false`
    stands beside them or nearer to the user: a file of NeMo RL's, or a comparison without LoRA."""
    if report.has_problem(prefix):
        return
    for key in _ASKING:
        value, written = getattr(lora, key), report.nearness(f"{prefix}.{key}")
        is_asked = written > report.nearness(f"{prefix}.enabled") or "enabled" not in lora.model_fields_set
        if is_asked and value != type(lora).model_fields[key].get_default(call_default_factory=True):
            also = f" and {prefix}.match_all_linear=false" if key.endswith("_modules") and lora.match_all_linear else ""
            report.add(
                f"{prefix}.{key}",
                f"is {value}, but {prefix}.enabled is false, so all weights are trained: set {prefix}.enabled=true{also}, or leave this out",
            )


def _fault(pattern: str, key: str) -> str | None:
    """What is wrong with a name of target_modules or exclude_modules; None: nothing."""
    if any(matches(pattern, module) for fused in (False, True) for module in modules_of_layers(_MANY_LAYERS, fused)):
        return None
    if any(matches(pattern, module) for module in FROZEN):
        return None if key == "exclude_modules" else f"names {pattern}: head and embedding stay frozen; leave it out"
    near = did_you_mean(pattern, MATRICES)
    return f"names {pattern}, which no matrix is called{near and f'; {near}'} (there are {', '.join(MATRICES)}; * stands for any text)"
