"""Rules of models, engines and processes: what transformers, vLLM, adapters and several processes need of other sections."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from .cluster import ClusterConfig, engines_of, trainers_of
from .data import DatasetDefaults, datasets_of
from .errors import ConfigError, Report
from .fold import engine_name, exactness_of, is_apart, sizes_of
from .generation import EXPOSED, PACKAGES, GenerationConfig
from .policy import PolicyConfig, TrainedModelConfig, check_trained_model

if TYPE_CHECKING:
    from nemo_rl_cpp.config.master import TrainMasterConfig, WholeConfig

_COLOCATED = "policy.generation.colocated"
_RESOURCES = f"{_COLOCATED}.resources"
_AGENTS = ("agent", "verifiers")  # environments that make their rollouts themselves


def checked_policy(config: PolicyConfig | Mapping[str, object]) -> PolicyConfig:
    """A section as it is; of a mapping the section, with what it leaves out filled in, and checked."""
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
    check_pair(policy, report)
    check_vllm(policy, report)
    check_trained_model(policy, "policy", report)
    check_engine(policy.generation, "policy.generation", report, policy.hf_config_overrides)
    _check_sampling(policy.generation, report)


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
        key = f"{config.sampling[0]}.colocated.enabled"
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


INSTALL = "transformers is not installed: pip install 'nemo_rl_cpp[hf]'"


def check_pair(policy: PolicyConfig, report: Report) -> None:
    """An engine reads the weights of a trainer of its own name."""
    if exactness_of(policy) is None:
        report.add(
            "policy.generation.backend",
            f"is {engine_name(policy)}, which cannot read the weights of policy.backend {policy.backend}: set it to null, or both to the same",
            "policy.backend",
        )
    if policy.router_replay is not None and policy.router_replay.enabled:
        by = "hf" if policy.backend == "hf" else engine_name(policy)
        if policy.backend == "hf" or policy.generation.runs_vllm:
            report.add(
                "policy.router_replay.enabled",
                f"is true, which {by} does not do: set it to false, or both backends to native, where routers agree to the bit",
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
    """What no model can do, and what one of transformers cannot."""
    megatron = model.megatron_cfg
    wanted = {"moe_aux_loss_coeff": 0.0, "moe_router_bias_update_rate": 0.0, "moe_router_load_balancing_type": "none"}
    for key, off in wanted.items():
        given = getattr(megatron, key, off)
        if megatron.enabled and given not in (off, None):
            report.add(
                f"{name}.megatron_cfg.{key}",
                f"is {given}, but no loss or bias that balances experts is computed: set it to {off}",
            )
    if model.backend != "hf":
        return
    check_installed(model.backend, f"{name}.backend", report)
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


_PYTHON = "policy.generation.vllm_cfg.python"
_SERVER = "policy.generation.vllm_cfg.server_url"
_OF_THE_SERVER: Mapping[str, object] = {  # what whoever starts a server says -> the value that leaves it open
    "vllm_cfg.env_vars": None, "vllm_cfg.enable_prefix_caching": None, "vllm_kwargs": {}, "kv_cache_gb": None,
}  # fmt: skip
_LEAST_TEMPERATURE = 0.01
_OURS = {  # options of the server that the run starts, which follow from elsewhere -> where
    "model": "policy.model_name", "tokenizer": "policy.tokenizer", "skip_tokenizer_init": None, "load_format": None, "seed": None,
    "dtype": "policy.generation.vllm_cfg.precision", "max_model_len": "policy.generation.vllm_cfg.max_model_len",
    "max_num_seqs": "policy.generation.max_batch_size", "kv_cache_memory_bytes": "policy.generation.kv_cache_gb",
    "enforce_eager": "policy.generation.vllm_cfg.enforce_eager", "enable_prefix_caching": "policy.generation.vllm_cfg.enable_prefix_caching",
    "logprobs_mode": None, "generation_config": None, "weight_transfer_config": None, "enable_chunked_prefill": None,
    "host": None, "port": None, "enable_scale_out": None, "tensor_parallel_size": None, "pipeline_parallel_size": None, "data_parallel_size": None, "worker_cls": None,
    "worker_extension_cls": None, "hf_overrides": "policy.hf_config_overrides",
}  # fmt: skip


def check_vllm(policy: PolicyConfig, report: Report) -> None:
    """The section's own rules, of a policy alone."""
    generation = policy.generation
    python, url = generation.vllm_cfg.python, generation.vllm_cfg.server_url
    if python is None and url is None:
        return
    key, what = (_PYTHON, "an interpreter with vLLM") if url is None else (_SERVER, "a vLLM server")
    if generation.backend != "vllm":
        report.add(
            key,
            f"names {what}, but policy.generation.backend is {generation.backend or 'null'}: set it to vllm, or {key.rpartition('.')[2]} to null",
            "policy.generation.backend",
        )
        return
    if url is not None:
        _check_server(generation, report)
    elif not (os.path.isfile(python) and os.access(python, os.X_OK)):
        report.add(
            _PYTHON,
            f"is {python}, which is no program that can be run: name the Python interpreter of an environment that has vLLM (docs/vllm.md)",
        )
    _check_temperatures(generation, report, key)
    for name in generation.vllm_kwargs if url is None else ():
        if name in _OURS:
            elsewhere = _OURS[name]
            report.add(
                f"policy.generation.vllm_kwargs.{name}",
                "is given by the run itself: leave it out" + (f", and set {elsewhere}" if elsewhere else ""),
                _PYTHON,
            )
    if policy.reuse_generation_logprobs == "always":
        report.add(
            "policy.reuse_generation_logprobs",
            "cannot be always with vLLM: its log-probabilities are not those of training to the bit; set it to auto",
            key,
        )
    if policy.kept_activations_gb:
        report.add(
            "policy.kept_activations_gb",
            f"is {policy.kept_activations_gb:g}, but vLLM keeps no activations for training: set it to null or 0",
            key,
        )


def _check_server(generation: GenerationConfig, report: Report) -> None:
    """The address, and what whoever started the server has said there."""
    url = generation.vllm_cfg.server_url
    if generation.vllm_cfg.python is not None:
        report.add(
            _SERVER,
            "is given beside policy.generation.vllm_cfg.python: set one of them to null, for the run joins a server or starts vLLM itself",
            _PYTHON,
        )
    if not _is_address(url):
        report.add(_SERVER, f"is {url}: expected http://HOST:PORT of a vLLM server")
    for name, value in _OF_THE_SERVER.items():
        section, _, last = name.rpartition(".")
        given = getattr(generation.vllm_cfg if section else generation, last)
        if given is not None and given != value:
            report.add(
                f"policy.generation.{name}",
                "is said where the server is started: leave it out here, and give it to the server",
                _SERVER,
            )


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and (parts.port or 1) > 0
            and not (parts.query or parts.fragment)
        )
    except ValueError:
        return False


def _check_temperatures(generation: GenerationConfig, report: Report, key: str) -> None:
    """vLLM draws with 0.01 where a lower temperature is given, while log-probabilities of training are of the given one."""
    for name, greedy in (("temperature", ""), ("val_temperature", ", or to 0 for greedy responses")):
        value = getattr(generation, name)
        if value is not None and 0 < value < _LEAST_TEMPERATURE:
            report.add(
                f"policy.generation.{name}",
                f"is {value:g}, which vLLM would raise to {_LEAST_TEMPERATURE:g}: set it to {_LEAST_TEMPERATURE:g} or more{greedy}",
                key,
            )


def check_vllm_run(config: TrainMasterConfig, report: Report) -> None:
    """What a run with vLLM needs of its cluster: one training process, on the CPU if the run starts the server."""
    generation, cluster = config.policy.generation, config.cluster
    if not generation.runs_vllm:
        return
    key = _PYTHON if generation.vllm_cfg.server_url is None else _SERVER
    if generation.expose_http_server:
        report.add(
            "policy.generation.expose_http_server",
            f"is true, but the server is one of the native engine, and vLLM generates: set it to false, or {key} to null",
            key,
        )
    if cluster.has_workers:
        report.add(
            "cluster.executor",
            f"is {cluster.executor_text}, but vLLM gets its weights from one training process: {cluster.one_process_text}, or set {key} to null",
            key,
        )
    if cluster.device != "cpu" and generation.vllm_cfg.server_url is None:
        report.add(
            "cluster.device",
            f"is {cluster.device}, but a vLLM that the run starts gets its weights through the memory of a machine without GPUs: set it to cpu, "
            f"or {_PYTHON} to null and {_SERVER} to a server on another GPU",
            _PYTHON,
        )


def check_vllm_evaluation(generation: GenerationConfig, report: Report) -> None:
    """An evaluation has no trainer that sends weights."""
    for name in ("python", "server_url"):
        if getattr(generation.vllm_cfg, name) is not None:
            report.add(
                f"generation.vllm_cfg.{name}",
                "is for training: an evaluation generates with native or hf; set it to null",
                "generation.backend",
            )


def check_resources(config: TrainMasterConfig, report: Report) -> None:
    """Engines with workers of their own need workers, and leave some for training."""
    generation, cluster = config.policy.generation, config.cluster
    if generation.colocated.enabled:
        return
    if cluster.executor == "in_process":
        report.add(
            f"{_COLOCATED}.enabled",
            "is false, which gives generation processes of its own, and cluster.executor is in_process: set it to processes or ray, or "
            "enabled to true",
            "cluster.executor",
        )
    if not cluster.has_workers or cluster.executor == "auto":  # folded, and said
        return
    if _leaves_nothing(config, report):
        report.add(
            _RESOURCES,
            f"takes {engines_of(config)} of the cluster's {cluster.processes} workers (num_nodes * gpus_per_node), which leaves none for "
            "training: take fewer, or raise the cluster's",
            "cluster.gpus_per_node",
        )
    if (slices := config.policy.tensor_parallel(max(trainers_of(config), 1))) > 1:
        report.add(
            config.policy.tensor_parallel_key("policy"),
            f"is {slices}, but engines with processes of their own have whole models, which trainers with slices do not send: set it to 1, or "
            f"{_COLOCATED}.enabled to true",
            f"{_COLOCATED}.enabled",
        )
    if config.policy.kept_activations_gb:
        report.add(
            "policy.kept_activations_gb",
            f"is {config.policy.kept_activations_gb:g}, but engines with processes of their own keep no activations for training: set it to "
            "0 or null",
            f"{_COLOCATED}.enabled",
        )


def _leaves_nothing(config: TrainMasterConfig, report: Report) -> bool:
    """Whether the sizes are there, but leave nothing for training. On one machine its workers are counted, on several whole ones."""
    resources, cluster = config.policy.generation.colocated.resources, config.cluster
    own, unit = ("gpus_per_node", "workers") if cluster.num_nodes == 1 else ("num_nodes", "nodes")
    wanted, there = getattr(resources, own), getattr(cluster, own)
    if wanted is None:
        report.add(
            f"{_RESOURCES}.{own}", f"is missing: of the {there} {unit} (cluster.{own}) say how many only generate"
        )
    elif cluster.num_nodes == 1 and resources.num_nodes not in (None, 1):
        report.add(
            f"{_RESOURCES}.num_nodes",
            f"is {resources.num_nodes}, and the cluster has one node: set it to 1 or null",
            "cluster.num_nodes",
        )
    elif cluster.num_nodes > 1 and resources.gpus_per_node not in (None, cluster.gpus_per_node):
        report.add(
            f"{_RESOURCES}.gpus_per_node",
            f"is {resources.gpus_per_node}, but of several nodes generation takes whole ones, of {cluster.gpus_per_node} workers: set it to "
            "that or null",
            "cluster.gpus_per_node",
        )
    else:
        return wanted >= there
    return False


def check_serving(config: TrainMasterConfig, report: Report) -> None:
    """The server needs the native engine in this process: it reads the weights where training writes them."""
    generation, cluster = config.policy.generation, config.cluster
    _check_agents(config, report)
    if not generation.expose_http_server:
        return
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        report.add(EXPOSED, f"is true, which needs the package {' and '.join(missing)}: run `pip install 'nemo-rl-cpp[serve]'`, or set it to false")  # fmt: skip
    variable = generation.http_server.api_key_variable
    if variable is not None and not os.environ.get(variable):
        report.add("policy.generation.http_server.api_key_variable", f"is {variable}, but that variable is not set: set it, or write null for a new key")  # fmt: skip
    if config.policy.backend == "hf":
        report.add(EXPOSED, "is true, but the server is one of the native engine and policy.backend is hf: set one of the two the other way", "policy.backend")  # fmt: skip
    if cluster.has_workers:
        report.add(EXPOSED, f"is true, but the server needs the model in this process and cluster.executor is {cluster.executor_text}: set it to in_process", "cluster.executor")  # fmt: skip
    if cluster.device == "cuda":
        report.add(EXPOSED, "is true, but the server has been tested on CPUs only and cluster.device is cuda: set it to cpu", "cluster.device")  # fmt: skip


def _check_agents(config: TrainMasterConfig, report: Report) -> None:
    """Agents need the server, and count their turns themselves."""
    default = config.data.default or DatasetDefaults()
    sets = [d for split in ("train", "validation") for _, d in datasets_of(getattr(config.data, split), split)]
    agents = [name for name in dict.fromkeys(d.env_name or default.env_name for d in sets) if name in _AGENTS]
    if not agents:
        return
    if not config.policy.generation.expose_http_server:
        report.add(EXPOSED, f"is false, but the agent of env.{agents[0]} asks the policy over HTTP: set it to true")
    if config.loop.max_rollout_turns != 1:
        instead = "env.verifiers.max_turns" if agents[0] == "verifiers" else "the agent itself"
        report.add(
            f"{config.algorithm}.max_rollout_turns",
            f"is {config.loop.max_rollout_turns}, but the agent of env.{agents[0]} makes as many turns as it likes: leave it at 1, and set the "
            f"limit in {instead}",
        )
