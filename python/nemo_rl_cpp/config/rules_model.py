"""Rules of the models: backends, batching, optimizer, generation, devices."""

import importlib.util

from nemo_rl_cpp.files.prompt_files import find_prompt

from . import rules_engine, rules_hf, rules_lora, rules_vllm
from .cluster import ClusterConfig
from .errors import Report
from .generation import GenerationConfig
from .policy import PolicyConfig, TokenizerConfig, TrainedModelConfig


def check_policy(policy: PolicyConfig, report: Report) -> None:
    rules_hf.check_pair(policy, report)
    rules_vllm.check_vllm(policy, report)
    check_trained_model(policy, "policy", report)
    rules_engine.check_engine(policy.generation, "policy.generation", report, policy.hf_config_overrides)
    _check_sampling(policy.generation, report)


def check_trained_model(model: TrainedModelConfig, name: str, report: Report) -> None:
    _check_backend(model, name, report)
    rules_lora.check_lora(model, name, report)
    _check_batching(model, name, report)
    check_tokenizer(model.tokenizer, f"{name}.tokenizer", report)
    if not model.megatron_cfg.enabled:
        _check_torch_optimizer(model, name, report)
    else:
        optimizer, prefix = model.megatron_cfg.optimizer, f"{name}.megatron_cfg"
        if optimizer.min_lr > optimizer.lr:
            report.add(
                f"{prefix}.optimizer.min_lr",
                f"{optimizer.min_lr:g} is above lr {optimizer.lr:g}; lower it",
                f"{prefix}.optimizer.lr",
            )


def _check_backend(model: TrainedModelConfig, name: str, report: Report) -> None:
    if model.dtensor_cfg.enabled and model.megatron_cfg.enabled:
        report.add(
            f"{name}.megatron_cfg.enabled",
            f"and {name}.dtensor_cfg.enabled are both true; set one of them to false",
            f"{name}.dtensor_cfg.enabled",
        )


def _check_batching(model: TrainedModelConfig, name: str, report: Report) -> None:
    if model.sequence_packing.enabled and model.dynamic_batching.enabled:
        report.add(
            f"{name}.dynamic_batching.enabled",
            f"and {name}.sequence_packing.enabled are both true; set one of them to false",
            f"{name}.sequence_packing.enabled",
        )
    for batching in ("sequence_packing", "dynamic_batching"):
        config = getattr(model, batching)
        for budget in ("train_mb_tokens", "logprob_mb_tokens"):
            tokens = getattr(config, budget)
            if config.enabled and tokens < model.max_total_sequence_length:
                report.add(
                    f"{name}.{batching}.{budget}",
                    f"is {tokens}, too small for one sequence of max_total_sequence_length "
                    f"{model.max_total_sequence_length}; raise it",
                    f"{name}.max_total_sequence_length",
                )


def _check_torch_optimizer(model: TrainedModelConfig, name: str, report: Report) -> None:
    if model.optimizer is None:
        report.add(
            f"{name}.optimizer",
            f"is null but {name}.megatron_cfg is not enabled; give an optimizer (torch.optim.AdamW) or enable it",
            f"{name}.megatron_cfg.enabled",
        )
    elif not all(0 <= beta < 1 for beta in model.optimizer.kwargs.betas):
        report.add(f"{name}.optimizer.kwargs.betas", f"must lie in [0, 1), not {list(model.optimizer.kwargs.betas)}")
    stages = model.scheduler or []
    named = [stage for stage in stages if stage.name is not None]
    milestones = [stage.milestones for stage in stages if stage.milestones is not None]
    if len(milestones) > 1:
        report.add(f"{name}.scheduler", "has milestones twice; give them once")
    elif stages and not named:
        report.add(f"{name}.scheduler", "has milestones but no schedule; add an entry with a name, or write null")
    elif named and len(milestones[0] if milestones else []) != len(named) - 1:
        report.add(
            f"{name}.scheduler",
            f"has {len(named)} schedules, which need {len(named) - 1} milestones (the steps at which the next begins), "
            f"not {len(milestones[0]) if milestones else 0}",
        )


def check_tokenizer(tokenizer: TokenizerConfig, name: str, report: Report) -> None:
    template = tokenizer.chat_template
    if template is not None and template.endswith(".jinja") and find_prompt(template) is None:
        report.add(
            f"{name}.chat_template",
            f"names the file {template}, which does not exist; correct the path, or write default or null",
        )


def _check_sampling(generation: GenerationConfig, report: Report) -> None:
    prefix = "policy.generation"
    if generation.temperature == 0:
        report.add(
            f"{prefix}.temperature",
            "cannot be 0 in training: greedy responses to a prompt are all equal; set it above 0",
        )


def check_cluster(cluster: ClusterConfig, report: Report) -> None:
    if cluster.executor == "ray" and importlib.util.find_spec("ray") is None:
        report.add(
            "cluster.executor",
            "ray is not installed: pip install 'nemo_rl_cpp[ray]', or set it to processes (workers of this machine without Ray) or auto",
        )
    if cluster.has_workers and cluster.device != "cpu":
        one_gpu = "start one process" if cluster.executor == "auto" else "executor=auto"
        report.add(
            "cluster.executor",
            f"{cluster.executor_text} runs on the CPU only, and cluster.device is {cluster.device}: set cluster.device=cpu, or {one_gpu} for one GPU",
            "cluster.device",
        )


def check_blocks(model: TrainedModelConfig, name: str, processes: int, report: Report) -> None:
    """`gradient_blocks` is a power of two that the processes share equally; sharded gradients are added beside the backward."""
    if model.shards_gradients and model.overlap_grad_reduce is False:
        report.add(
            f"{name}.overlap_grad_reduce",
            "is false, but gradients that are shared out (data_parallel_sharding_strategy optim_grads) are added while the backward goes on: "
            "set it to null or true, or data_parallel_sharding_strategy to optim",
            f"{name}.data_parallel_sharding_strategy",
        )
    exchange, key = (
        model.megatron_cfg.distributed_data_parallel_config,
        f"{name}.megatron_cfg.distributed_data_parallel_config",
    )
    asked = model.megatron_cfg.enabled and model.overlap_grad_reduce is None
    if model.shards_gradients and asked and not exchange.overlap_grad_reduce:
        sharing = (
            f"{key}.use_custom_fsdp to false"
            if model.data_parallel_sharding_strategy is None
            else f"{name}.data_parallel_sharding_strategy to optim"
        )
        report.add(
            f"{key}.overlap_grad_reduce",
            "is false, but gradients that are shared out are added while the backward goes on: "
            f"set it to true, or {sharing}",
            f"{key}.use_custom_fsdp",
        )
    blocks = model.gradient_blocks
    if blocks is None:
        return
    if blocks & (blocks - 1):
        report.add(f"{name}.gradient_blocks", f"is {blocks}: it must be a power of two")
    elif processes > 0 and blocks % processes:
        report.add(
            f"{name}.gradient_blocks",
            f"is {blocks}, which {processes} processes (cluster.num_nodes * gpus_per_node, without those that only generate) cannot share equally: take a number of processes that divides it, or null",
            "cluster.gpus_per_node",
        )
