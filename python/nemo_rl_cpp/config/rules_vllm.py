"""Rules of vLLM as the generator (`policy.generation.vllm_cfg.python` or `server_url`): what it needs, and what cannot be beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from .errors import Report

if TYPE_CHECKING:
    from nemo_rl_cpp.config.generation import GenerationConfig
    from nemo_rl_cpp.config.master import TrainMasterConfig
    from nemo_rl_cpp.config.policy import PolicyConfig

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
