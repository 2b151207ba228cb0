"""Rules for models, engines and processes: what transformers, vLLM and several processes need of other keys."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from .base import Section
from .cluster import ClusterConfig, engines_of, trainers_of
from .data import environments_of
from .errors import ConfigError, Report
from .fold import engine_name, exactness_of, is_apart, sizes_of
from .generation import EXPOSED, PACKAGES, GenerationConfig
from .policy import MEMORY_BUDGET, PolicyConfig, TrainedModelConfig, check_trained_model

if TYPE_CHECKING:
    from nemo_rl_cpp.config.master import TrainMasterConfig, WholeConfig

_GENERATION = "policy.generation"
_COLOCATED = f"{_GENERATION}.colocated"
_AGENTS = ("agent", "verifiers", "nemo_gym")  # environments whose agents make the rollouts


def checked_policy(config: PolicyConfig | Mapping[str, object]) -> PolicyConfig:
    """Return a `PolicyConfig` unchanged, or build and check one from a mapping; raise ConfigError for mistakes."""
    if isinstance(config, PolicyConfig):
        return config
    section = PolicyConfig(**config)
    section.fill_defaults()
    report = Report({})
    check_policy(section, report)
    if report.problems:
        raise ConfigError(report.problems)
    return section


def check_policy(policy: PolicyConfig, report: Report) -> None:
    _check_pair(policy, report)
    _check_vllm(policy, report)
    check_trained_model(policy, "policy", report)
    check_engine(policy.generation, _GENERATION, report, policy.hf_config_overrides)
    if policy.generation.temperature == 0:
        text = "cannot be 0 in training: greedy responses to a prompt are all equal; set it above 0"
        report.add(f"{_GENERATION}.temperature", text)


# ---- the cluster


def check_cluster(cluster: ClusterConfig, report: Report) -> None:
    if cluster.executor == "ray" and importlib.util.find_spec("ray") is None:
        text = "ray is not installed: pip install 'nemo_rl_cpp[ray]', or set it to processes or auto"
        report.add("cluster.executor", text)


def check_gpus(config: TrainMasterConfig, report: Report) -> None:
    """Report what several processes support on the CPU only."""
    cluster = config.cluster
    if cluster.device == "cpu" or not cluster.has_workers:
        return
    for name, model in config.trained_models().items():
        key, slices = model.tensor_parallel_key(name), model.tensor_parallel(max(trainers_of(config), 1))
        if slices > 1:
            report.add(key, f"is {slices}, but models are sliced on the CPU only: set it to 1", "cluster.device")
        if model.shards_gradients:
            key = f"{name}.data_parallel_sharding_strategy"
            report.add(key, "shares out gradients, which works on the CPU only: set it to optim", "cluster.device")


def check_blocks(model: TrainedModelConfig, name: str, processes: int, report: Report) -> None:
    """Report gradient_blocks if it is not a power of two that `processes` divides. Report overlap_grad_reduce if it is
    false although gradients are sharded, because sharded gradients must be reduced during the backward pass."""
    strategy = f"{name}.data_parallel_sharding_strategy"
    late = "is false, but gradients that are shared out are added while the backward is running: "
    if model.shards_gradients and model.overlap_grad_reduce is False:
        report.add(f"{name}.overlap_grad_reduce", f"{late}set it to true, or {strategy} to optim", strategy)
    exchange = model.megatron_cfg.distributed_data_parallel_config
    asked = model.megatron_cfg.enabled and model.overlap_grad_reduce is None
    if model.shards_gradients and asked and not exchange.overlap_grad_reduce:
        key = f"{name}.megatron_cfg.distributed_data_parallel_config"
        by_megatron = model.data_parallel_sharding_strategy is None
        other = f"{key}.use_custom_fsdp to false" if by_megatron else f"{strategy} to optim"
        report.add(f"{key}.overlap_grad_reduce", f"{late}set it to true, or {other}", f"{key}.use_custom_fsdp")
    blocks = model.gradient_blocks
    if blocks is not None and blocks & (blocks - 1):
        report.add(f"{name}.gradient_blocks", f"is {blocks}: it must be a power of two")
    elif blocks is not None and processes > 0 and blocks % processes:
        text = f"is {blocks}, which {processes} processes cannot share equally: take a number that divides it"
        report.add(f"{name}.gradient_blocks", text, "cluster.gpus_per_node")


def check_sizes(config: WholeConfig, report: Report) -> None:
    """If `cluster.strict_sizes`, report sizes (`sizes_of`) and separate engines that the run cannot have."""
    if not config.cluster.strict_sizes:
        return
    count, strict = config.cluster.processes, "cluster.strict_sizes"
    has = "one device" if count == 1 else f"{count} processes"
    for key, size in sizes_of(config).items():
        text = f"is {size}, but the run has {has} and {strict} is true; set it to 1, or {strict} to false"
        report.add(key, text, strict)
    if is_apart(config):
        text = f"is false, but generation shares the one device and {strict} is true; change one of the two"
        report.add(f"{config.sampling[0]}.colocated.enabled", text, strict)


_OFFLOADS = (
    "dtensor_cfg.cpu_offload",
    "megatron_cfg.fine_grained_activation_offloading",
    "megatron_cfg.optimizer.optimizer_cpu_offload",
)


def check_offload(config: TrainMasterConfig, report: Report) -> None:
    if config.cluster.device == "cpu":
        return
    for name, model in config.trained_models().items():
        for key in _OFFLOADS:
            if getattr(model, key.partition(".")[0]).enabled and attrgetter(key)(model):
                text = "cannot be true with cluster.device cuda: offloading is not supported yet; set it to false"
                report.add(f"{name}.{key}", text)


def check_quantized_run(config: TrainMasterConfig, report: Report) -> None:
    """Report `quantization` with tensor parallelism, or with engines that have their own weights."""
    policy = config.policy
    for name, model in config.trained_models().items():
        if model.quantization is None:
            continue
        key, count = f"{name}.quantization", trainers_of(config)
        if (slices := model.tensor_parallel(max(count, 1))) > 1:
            parallel = model.tensor_parallel_key(name)
            text = f"is {model.quantization}, but {parallel} {slices} splits the model: set {parallel}=1, or null here"
            report.add(key, text, parallel)
    if policy.quantization is not None and policy.generation.runs_vllm:
        text = f"is {policy.quantization}, which vLLM is not sent: set {_GENERATION}.backend=native, or null here"
        report.add("policy.quantization", text, f"{_GENERATION}.backend")
    elif policy.quantization is not None and engines_of(config) > 0:
        apart = f"{_COLOCATED}.enabled"
        text = f"is {policy.quantization}, but engines with weights of their own are not sent blocks: set {apart}=true, or null here"
        report.add("policy.quantization", text, apart)


_BY_BUDGET = (
    "train_micro_batch_size", "sequence_packing.train_mb_tokens", "dynamic_batching.train_mb_tokens", "kept_activations_gb",
    "dtensor_cfg.activation_checkpointing", "megatron_cfg.activation_checkpointing", "generation.kv_cache_gb",
)  # fmt: skip
"""Keys of `policy` that follow from memory_budget_gb."""


def check_budget(config: TrainMasterConfig, report: Report) -> frozenset[str]:
    """Report policy.memory_budget_gb for a run whose memory cannot be estimated exactly. Return the keys that the
    budget must not change: those set where the budget is set, or with higher precedence (see `Report.nearness`)."""
    policy, cluster = config.policy, config.cluster
    if policy.memory_budget_gb is None:
        return frozenset()
    others = {
        "cluster.device": cluster.device != "cpu" and f"runs on {cluster.device}",
        "cluster.executor": cluster.has_workers and "has several processes",
        "policy.backend": policy.backend != "native" and f"trains with {policy.backend}",
        "policy.generation.backend": policy.generation.runs_vllm and "generates with vLLM",
        "value": config.has_critic and "has a critic",
    }
    for key, what in others.items():
        if what:
            text = f"is {policy.memory_budget_gb:g}, but this run {what}, whose memory is not planned: set it to null"
            report.add(MEMORY_BUDGET, text, key)
    near = report.nearness(MEMORY_BUDGET)
    set_here = {f"policy.{key}" for key in _BY_BUDGET if _value_at(policy, key) is not None}
    return frozenset(key for key in set_here if report.nearness(key) >= near)


def _value_at(section: Section, dotted: str) -> object:
    """Return the value that the user set for the key `dotted` of a section; None if the key has its default."""
    first, _, rest = dotted.partition(".")
    if rest:
        return _value_at(getattr(section, first), rest)
    return getattr(section, first) if first in section.model_fields_set else None


def check_resources(config: TrainMasterConfig, report: Report) -> None:
    """Report, if generation is not colocated, numbers of workers that leave no worker for generation or for training,
    and keys that require shared weights."""
    generation, cluster = config.policy.generation, config.cluster
    if generation.colocated.enabled:
        return
    apart = f"{_COLOCATED}.enabled"
    if cluster.executor == "in_process":
        text = "is false, but cluster.executor is in_process: set it to processes or ray, or this to true"
        report.add(apart, text, "cluster.executor")
    # generation then shares the trainer's devices, and a message says so
    if not cluster.has_workers or (cluster.executor == "auto" and (generation.runs_vllm or not cluster.is_split)):
        return
    if not cluster.is_split:  # otherwise one process trains and one generates, whatever the resources
        _check_shares(config, report)
    if (slices := config.policy.tensor_parallel(max(trainers_of(config), 1))) > 1:
        text = f"is {slices}, but separate engines have whole models: set it to 1, or {apart} to true"
        report.add(config.policy.tensor_parallel_key("policy"), text, apart)
    if (lora := config.policy.lora) is not None and not lora.merge:
        text = f"is false, but separate engines get merged weights: set it to true, or {apart} to true"
        report.add(f"{config.policy.lora_key('policy')}.merge", text, apart)
    if given := config.policy.kept_activations_gb:
        text = f"is {given:g}, but separate engines keep no activations: set it to 0 or null"
        report.add("policy.kept_activations_gb", text, apart)


def _check_shares(config: TrainMasterConfig, report: Report) -> None:
    """Report `colocated.resources` if it does not give generation some of the workers and leave some for training."""
    resources, cluster, key = config.policy.generation.colocated.resources, config.cluster, f"{_COLOCATED}.resources"
    own, unit = ("gpus_per_node", "workers") if cluster.num_nodes == 1 else ("num_nodes", "nodes")
    wanted, there = getattr(resources, own), getattr(cluster, own)
    if wanted is None:
        text = f"is missing: of the {there} {unit} (cluster.{own}) say how many only generate"
        report.add(f"{key}.{own}", text)
    elif cluster.num_nodes == 1 and resources.num_nodes not in (None, 1):
        text = f"is {resources.num_nodes}, and the cluster has one node: set it to 1 or null"
        report.add(f"{key}.num_nodes", text, "cluster.num_nodes")
    elif cluster.num_nodes > 1 and resources.gpus_per_node not in (None, cluster.gpus_per_node):
        text = f"is {resources.gpus_per_node}, but generation takes whole nodes: write null"
        report.add(f"{key}.gpus_per_node", text, "cluster.gpus_per_node")
    elif wanted >= there:
        text = f"takes {engines_of(config)} of the {cluster.processes} workers, which leaves none for training"
        report.add(key, text, "cluster.gpus_per_node")


# ---- quantised engines, and models that differ from the trainer's

_PRECISIONS = (None, "auto", "bfloat16", "bf16", "float32", "fp32", "float", "float16", "fp16", "half")
_QUANTISED = ("quantization", "quant_cfg", "quant_config", "quantization_config")
_OF_A_TYPE = ("dtype", "precision", "kv_cache_dtype")


def check_engine(
    generation: GenerationConfig, name: str, report: Report, overrides: Mapping[str, object] | None = None
) -> None:
    """Report engine settings that would change the results of generation: quantisation, and overrides of the model's
    config.json that differ from `overrides` (policy.hf_config_overrides). `name` is the dotted key of `generation`."""
    found = {f"vllm_cfg.{key}": getattr(generation.vllm_cfg, key) for key in ("precision", "kv_cache_dtype")}
    found = {key: value for key, value in found.items() if value not in _PRECISIONS}
    for engine in ("vllm_kwargs", "sglang_cfg", "trtllm_cfg", "dynamo_cfg"):
        for key, value in _leaves(getattr(generation, engine) or {}, engine):
            last = key.rpartition(".")[2]
            if (last in _QUANTISED and _quantises(value)) or (last in _OF_A_TYPE and value not in _PRECISIONS):
                found[key] = value
    megatron = generation.mcore_generation_config
    if ((megatron.model_extra or {}).get("fp8_cfg") or {}).get("enabled"):
        found["mcore_generation_config.fp8_cfg.enabled"] = "true"
    for key, value in found.items():
        text = f"is {value}: quantised generation changes results and is not supported; set it to bfloat16 or float32"
        report.add(f"{name}.{key}", text)
    for key, value in (generation.vllm_kwargs.get("hf_overrides") or {}).items():
        if (overrides or {}).get(key) != value:
            text = "changes the model of generation alone; set it in policy.hf_config_overrides as well"
            report.add(f"{name}.vllm_kwargs.hf_overrides.{key}", text, "policy.hf_config_overrides")


def _quantises(value: object) -> bool:
    return bool(value) and (value.get("scheme", "unknown") if isinstance(value, dict) else value) not in _PRECISIONS


def _leaves(tree: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    """Yield (`prefix` + dotted key, value) of nested mappings; quantisation settings count as one value."""
    for key, value in tree.items():
        if isinstance(value, dict) and key not in _QUANTISED:
            yield from _leaves(value, f"{prefix}.{key}")
        else:
            yield f"{prefix}.{key}", value


# ---- transformers

INSTALL = "transformers is not installed: pip install 'nemo_rl_cpp[hf]'"


def _check_pair(policy: PolicyConfig, report: Report) -> None:
    """Report an engine that cannot use the weights of policy.backend, and router replay with a backend or an engine
    that does not support it."""
    if exactness_of(policy) is None:
        text = f"is {engine_name(policy)}, which cannot read the weights of policy.backend {policy.backend}: set it to null"
        report.add(f"{_GENERATION}.backend", text, "policy.backend")
    if policy.router_replay is not None and policy.router_replay.enabled:
        if policy.backend == "hf" or policy.generation.runs_vllm:
            by = "hf" if policy.backend == "hf" else engine_name(policy)
            text = f"is true, which {by} does not do: set it to false, or both backends to native"
            report.add("policy.router_replay.enabled", text, "policy.backend")
    if policy.backend == "hf":
        _check_bits(policy, "policy.backend hf", "policy.backend", report)


def _check_bits(policy: PolicyConfig, engine: str, key: str, report: Report) -> None:
    """Report settings that need bit-identical generation and training, which `engine`, selected by `key`, lacks."""
    if policy.reuse_generation_logprobs == "always":
        text = f"cannot be always with {engine}, whose log-probabilities differ from training's; set it to auto"
        report.add("policy.reuse_generation_logprobs", text, key)
    if given := policy.kept_activations_gb:
        text = f"is {given:g}, but {engine} keeps no activations for training: set it to null or 0"
        report.add("policy.kept_activations_gb", text, key)


def check_engines(config: TrainMasterConfig, report: Report) -> None:
    """Report separate generation workers if policy.backend is hf: its engine reads the trainer's weights in place."""
    if config.policy.backend == "hf" and config.cluster.has_workers and not config.policy.generation.colocated.enabled:
        text = "is false, but the engines of policy.backend hf read the trainer's weights: set it to true"
        report.add(f"{_COLOCATED}.enabled", text, "policy.backend")


def balance_wanted(model: TrainedModelConfig, router: str | None = None) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for each key that requests a method of balancing the experts' load which this model does not
    support. `router` is the kind of the model's routers, "softmax" or "sigmoid", or None if the native core does not
    run the model."""
    megatron = model.megatron_cfg
    if not megatron.enabled:
        return
    given = {
        "moe_router_bias_update_rate": (megatron.moe_router_bias_update_rate, 0.0, "sigmoid"),
        "moe_router_load_balancing_type": (megatron.moe_router_load_balancing_type, "none", "softmax"),
    }
    for key, (value, off, kind) in given.items():
        if value != off and router != kind:
            text = f"is {value}, which balances the experts of {kind} routers in the native core; "
            has = "is computed by another backend" if router is None else f"has {router} routers"
            yield f"megatron_cfg.{key}", f"{text}this model {has}: set it to {off}"
    if megatron.moe_aux_loss_coeff and megatron.moe_router_load_balancing_type == "none":
        text = f"is {megatron.moe_aux_loss_coeff:g}, but moe_router_load_balancing_type is none: set that to seq_aux_loss, or this to 0"
        yield "megatron_cfg.moe_aux_loss_coeff", text


def check_model(model: TrainedModelConfig, name: str, report: Report) -> None:
    """Report multi-token-prediction heads whose loss would change the policy (not detached), because that loss is not
    computed. Also report settings that backend hf does not support. `name` is the section's name."""
    megatron = model.megatron_cfg
    if megatron.enabled and megatron.mtp_num_layers and not megatron.mtp_detach_heads:
        text = f"is {megatron.mtp_num_layers} with mtp_detach_heads false, so the loss of these heads would change the policy"
        text += ", and it is not computed: set this to 0, or mtp_detach_heads to true, which leaves the heads untrained"
        report.add(f"{name}.megatron_cfg.mtp_num_layers", text)
    if model.backend != "hf":
        return
    _check_installed(model.backend, f"{name}.backend", report)
    _refuse_gguf(model.model_name, f"{name}.model_name", f"{name}.backend", report)
    for key, text in balance_wanted(model):
        report.add(f"{name}.{key}", text, f"{name}.backend")
    for key in ("gradient_blocks", "data_parallel_sharding_strategy", "overlap_grad_reduce"):
        if (given := getattr(model, key)) is not None:
            text = f"is {given}, which is of the native trainer and not of backend hf: set it to null"
            report.add(f"{name}.{key}", text, f"{name}.backend")


def _refuse_gguf(model: str | None, key: str, engine: str, report: Report) -> None:
    """Report the model `model`, the value of `key`, if it is a GGUF file and the key `engine` is not native."""
    if model is not None and model.endswith(".gguf"):
        text = f"is a GGUF file, which only native reads: set {engine} to native, or name a folder with safetensors"
        report.add(key, text, engine)


def check_evaluation(generation: GenerationConfig, report: Report) -> None:
    """Report mistakes in the engine of an evaluation, which has no trainer that sends weights to vLLM."""
    _check_installed(generation.backend, "generation.backend", report)
    if generation.backend == "hf":
        _refuse_gguf(generation.model_name, "generation.model_name", "generation.backend", report)
        if generation.quantization is not None:
            text = f"is {generation.quantization}, which the native engine alone reads: set generation.backend=native"
            report.add("generation.quantization", text, "generation.backend")
    for name in ("python", "server_url"):
        if getattr(generation.vllm_cfg, name) is not None:
            text = "is for training: an evaluation generates with native or hf; set it to null"
            report.add(f"generation.vllm_cfg.{name}", text, "generation.backend")


def _check_installed(backend: str | None, key: str, report: Report) -> None:
    if backend == "hf" and importlib.util.find_spec("transformers") is None:
        report.add(key, f"is hf, but {INSTALL}")


# ---- vLLM

_PYTHON, _SERVER = f"{_GENERATION}.vllm_cfg.python", f"{_GENERATION}.vllm_cfg.server_url"
_OF_THE_SERVER = ("vllm_cfg.env_vars", "vllm_cfg.enable_prefix_caching", "vllm_kwargs", "kv_cache_gb")
_LEAST_TEMPERATURE = 0.01
_OURS = {  # vLLM options that the run sets itself when it starts a server -> the key for their value
    "model": "policy.model_name", "tokenizer": "policy.tokenizer", "skip_tokenizer_init": None, "load_format": None,
    "dtype": f"{_GENERATION}.vllm_cfg.precision", "max_model_len": f"{_GENERATION}.vllm_cfg.max_model_len",
    "max_num_seqs": f"{_GENERATION}.max_batch_size", "kv_cache_memory_bytes": f"{_GENERATION}.kv_cache_gb",
    "enforce_eager": f"{_GENERATION}.vllm_cfg.enforce_eager", "seed": None, "logprobs_mode": None,
    "enable_prefix_caching": f"{_GENERATION}.vllm_cfg.enable_prefix_caching", "generation_config": None,
    "weight_transfer_config": None, "enable_chunked_prefill": None, "host": None, "port": None,
    "enable_scale_out": None, "tensor_parallel_size": None, "pipeline_parallel_size": None, "worker_cls": None,
    "data_parallel_size": None, "worker_extension_cls": None, "hf_overrides": "policy.hf_config_overrides",
}  # fmt: skip


def _check_vllm(policy: PolicyConfig, report: Report) -> None:
    generation = policy.generation
    python, url = generation.vllm_cfg.python, generation.vllm_cfg.server_url
    if python is None and url is None:
        return
    key, what = (_PYTHON, "an interpreter with vLLM") if url is None else (_SERVER, "a vLLM server")
    if generation.backend != "vllm":
        backend, name = f"{_GENERATION}.backend", key.rpartition(".")[2]
        text = f"names {what}, but {backend} is {generation.backend or 'null'}: set it to vllm, or {name} to null"
        report.add(key, text, backend)
        return
    _refuse_gguf(policy.model_name, "policy.model_name", f"{_GENERATION}.backend", report)
    if url is not None:
        _check_server(generation, report)
    elif not (os.path.isfile(python) and os.access(python, os.X_OK)):
        text = f"is {python}, which is no program: name a Python interpreter that has vLLM (docs/vllm.md)"
        report.add(_PYTHON, text)
    for name, greedy in (("temperature", ""), ("val_temperature", ", or to 0 for greedy responses")):
        value, least = getattr(generation, name), _LEAST_TEMPERATURE
        if value is not None and 0 < value < least:  # training would use the lower temperature
            text = f"is {value:g}, which vLLM would raise to {least:g}: set it to {least:g} or more{greedy}"
            report.add(f"{_GENERATION}.{name}", text, key)
    for name in (name for name in generation.vllm_kwargs if url is None and name in _OURS):
        elsewhere = f", and set {_OURS[name]}" if _OURS[name] else ""
        text = f"is given by the run itself: leave it out{elsewhere}"
        report.add(f"{_GENERATION}.vllm_kwargs.{name}", text, _PYTHON)
    _check_bits(policy, "vLLM", key, report)


def _check_server(generation: GenerationConfig, report: Report) -> None:
    """Report mistakes in vLLM's server_url, and keys that the user must give to the server instead."""
    url = generation.vllm_cfg.server_url
    if generation.vllm_cfg.python is not None:
        text = f"is given beside {_PYTHON}: set one of them to null; the run joins a server or starts one"
        report.add(_SERVER, text, _PYTHON)
    if not _is_address(url):
        report.add(_SERVER, f"is {url}: expected http://HOST:PORT of a vLLM server")
    for name in _OF_THE_SERVER:
        if attrgetter(name)(generation) not in (None, {}):
            text = "is said where the server is started: leave it out here, and give it to the server"
            report.add(f"{_GENERATION}.{name}", text, _SERVER)


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        plain = not (parts.query or parts.fragment)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0 and plain
    except ValueError:
        return False


def check_vllm_run(config: TrainMasterConfig, report: Report) -> None:
    """If vLLM generates, report settings that it does not support; it needs a single training process."""
    generation, cluster = config.policy.generation, config.cluster
    if not generation.runs_vllm:
        return
    key = _PYTHON if generation.vllm_cfg.server_url is None else _SERVER
    if generation.expose_http_server:
        text = f"is true, but vLLM generates, not the native engine: set it to false, or {key} to null"
        report.add(EXPOSED, text, key)
    if cluster.has_workers:
        text = f"is {cluster.executor_text}, but vLLM gets its weights from one training process"
        report.add("cluster.executor", f"{text}: {cluster.one_process_text}, or set {key} to null", key)


# ---- the policy's server, and agents


def check_serving(config: TrainMasterConfig, report: Report) -> None:
    """If the policy is served over HTTP, report settings that the server does not support. It reads the weights of one
    native engine on the CPU, in this process or in a worker that only generates."""
    generation, cluster = config.policy.generation, config.cluster
    _check_agents(config, report)
    megatron = generation.mcore_generation_config.expose_http_server  # NeMo RL reads it with its engine alone
    if megatron and generation.backend == "megatron" and not generation.expose_http_server:
        key = f"{_GENERATION}.mcore_generation_config.expose_http_server"
        report.add(key, f"is true, but {EXPOSED}, the key of every engine, is not: set it to true as well", EXPOSED)
    if not generation.expose_http_server:
        return
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        text = f"is true, which needs the package {' and '.join(missing)}: run `pip install 'nemo-rl-cpp[serve]'`"
        report.add(EXPOSED, text)
    variable = generation.http_server.api_key_variable
    if variable is not None and not os.environ.get(variable):
        text = f"is {variable}, but that variable is not set: set it, or write null for a new key"
        report.add(f"{_GENERATION}.http_server.api_key_variable", text)
    needs = "is true, but the server needs the native engine in this process, on the CPU: set it to false, or"
    if config.policy.backend == "hf":
        report.add(EXPOSED, f"{needs} policy.backend to native", "policy.backend")
    engines = engines_of(config)
    if cluster.has_workers and engines == 0:
        report.add(EXPOSED, f"{needs} cluster.executor to in_process", "cluster.executor")
    elif engines > 1:
        text = f"is true, but one engine can be served and {engines} generate: set it to false, or one of the workers to generate"
        report.add(EXPOSED, text, f"{_COLOCATED}.resources")
    elif engines and cluster.executor == "ray":
        text = "is true, but agents reach an engine on this machine only: set it to false, or cluster.executor to processes"
        report.add(EXPOSED, text, "cluster.executor")
    if cluster.device == "cuda":
        report.add(EXPOSED, f"{needs} cluster.device to cpu", "cluster.device")


def _check_agents(config: TrainMasterConfig, report: Report) -> None:
    """If agents make the rollouts, report that they need the policy's HTTP server, and max_rollout_turns 1."""
    names = environments_of(config.data)
    if config.env.get("should_use_nemo_gym") and "nemo_gym" not in names:
        text = "is true, but no data set has the env_name nemo_gym: set data.default.env_name to nemo_gym, or this to false"
        report.add("env.should_use_nemo_gym", text)
    agent = next((name for name in names if name in _AGENTS), None)
    if agent is None:
        for name in ("invalid_tool_call_advantage", "malformed_thinking_advantage"):
            if (value := getattr(config.loop, name, None)) is not None:
                text = f"is {value}, but only responses to an agent have such flags: set it to null"
                report.add(f"{config.algorithm}.{name}", f"{text}, or env_name to one of {', '.join(_AGENTS)}")
        return
    if not config.policy.generation.expose_http_server:
        report.add(EXPOSED, f"is false, but the agent of env.{agent} asks the policy over HTTP: set it to true")
    if (turns := config.loop.max_rollout_turns) != 1:
        instead = "env.verifiers.max_turns" if agent == "verifiers" else "the agent itself"
        text = f"is {turns}, but the agent of env.{agent} decides about its turns: set it to 1, and limit {instead}"
        report.add(f"{config.algorithm}.max_rollout_turns", text)
