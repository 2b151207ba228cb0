"""The section `policy.generation.http_server` and its rules."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from nemo_rl_cpp.config.errors import Report

from .base import Int, Positive, Real, Section, key
from .data import DatasetDefaults, datasets_of

if TYPE_CHECKING:
    from nemo_rl_cpp.config.master import TrainMasterConfig

EXPOSED = "policy.generation.expose_http_server"
PACKAGES = ("starlette", "uvicorn")
_AGENTS = ("agent", "verifiers")  # environments that make their rollouts themselves


class HttpServerConfig(Section):
    """Where and within which limits the policy is served; read with expose_http_server."""

    host: str = key("127.0.0.1", "address to listen at; the default is reached from this machine only", min_length=1)
    port: Int = key(0, "0: a free one, which is printed", ge=0, le=65535)
    api_key_variable: str | None = key(
        None,
        "environment variable with the key that requests must carry; null: a new key for each run, which agents are told",
    )
    max_queue: Positive = key(1024, "answers under way or waiting; more are refused with status 503")
    max_batch_size: Positive = key(64, "answers that the server generates at the same time")
    max_body_mb: Real = key(8.0, "size of a request in MiB", gt=0)
    request_timeout_s: Real = key(600.0, "seconds for an answer, the wait for new weights included", gt=0)


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
