"""Rules of `backend: hf`: what transformers needs, and what only the native core does."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from .errors import Report
from .exactness import engine_name, exactness_of

if TYPE_CHECKING:
    from nemo_rl_cpp.config.generation import GenerationConfig
    from nemo_rl_cpp.config.master import TrainMasterConfig
    from nemo_rl_cpp.config.policy import PolicyConfig, TrainedModelConfig

INSTALL = "transformers is not installed: pip install 'nemo_rl_cpp[hf]'"


def check_pair(policy: PolicyConfig, report: Report) -> None:
    """An engine reads the weights of a trainer of its own name."""
    if exactness_of(policy) is None:
        report.add(
            "policy.generation.backend",
            f"is {engine_name(policy)}, which cannot read the weights of policy.backend {policy.backend}: set it to null, or both to the same",
            "policy.backend",
        )
    if policy.backend != "hf":
        return
    if policy.reuse_generation_logprobs == "always":
        report.add(
            "policy.reuse_generation_logprobs",
            "cannot be always with policy.backend hf: generation's log-probabilities are not those of training to the bit; set it to auto",
            "policy.backend",
        )
    if policy.kept_activations_gb:
        report.add(
            "policy.kept_activations_gb",
            f"is {policy.kept_activations_gb:g}, but transformers keeps no activations of generation: set it to null or 0",
            "policy.backend",
        )


def check_installed(backend: str | None, key: str, report: Report) -> None:
    if backend == "hf" and importlib.util.find_spec("transformers") is None:
        report.add(key, f"is hf, but {INSTALL}")


def check_engines(config: TrainMasterConfig, report: Report) -> None:
    """Its engine reads the trainer's weights, so it is where they are."""
    if config.policy.backend == "hf" and config.cluster.has_workers and not config.policy.generation.colocated.enabled:
        report.add(
            "policy.generation.colocated.enabled",
            "is false, which gives engines weights of their own, but those of transformers read the trainer's: set it to true, or "
            "policy.backend to native",
            "policy.backend",
        )


def check_model(model: TrainedModelConfig, name: str, report: Report) -> None:
    """What a model of transformers cannot do."""
    if model.backend != "hf":
        return
    check_installed(model.backend, f"{name}.backend", report)
    megatron = model.megatron_cfg
    wanted = {"moe_aux_loss_coeff": 0.0, "moe_router_bias_update_rate": 0.0, "moe_router_load_balancing_type": "none"}
    for key, off in wanted.items():
        given = getattr(megatron, key, off)
        if megatron.enabled and given not in (off, None):
            report.add(
                f"{name}.megatron_cfg.{key}",
                f"is {given}, which backend hf does not do: set it to {off}",
                f"{name}.backend",
            )
    if model.gradient_blocks is not None:
        report.add(
            f"{name}.gradient_blocks",
            f"is {model.gradient_blocks}, but with {name}.backend hf FSDP2 adds the gradients of processes in an order of its own: set it to null",
            f"{name}.backend",
        )
    for key in ("data_parallel_sharding_strategy", "overlap_grad_reduce"):
        if (given := getattr(model, key)) is not None:
            report.add(
                f"{name}.{key}",
                f"is {given}, which says how the native trainer adds gradients, and {name}.backend is hf: set it to null",
                f"{name}.backend",
            )


def check_evaluation(generation: GenerationConfig, report: Report) -> None:
    check_installed(generation.backend, "generation.backend", report)
