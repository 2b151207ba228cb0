"""Rollouts with the package NeMo Gym: its agents, tools and resource servers call this run's policy.

NeMo Gym runs in a separate Python interpreter (`nemo_gym_servers.py`). Its model server calls the policy's server,
which identifies a rollout by the field `rollout_key` of its requests and keeps the sampled tokens."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from nemo_rl_cpp.config.base import as_model
from nemo_rl_cpp.config.env import NemoGymEnvConfig
from nemo_rl_cpp.data.interfaces import ServerAddress
from nemo_rl_cpp.environments.agents import AgentEnvironment, AgentResult, AgentTask
from nemo_rl_cpp.errors import last_lines

_END_SECONDS = 60.0  # for NeMo Gym to end its servers
_SAMPLING = ("temperature", "top_p", "top_k")  # the policy's server samples as `policy.generation` says


class NemoGymEnvironment(AgentEnvironment):
    """An environment that sends each row to the NeMo Gym agent that the row names. The reward, or its components
    `reward_components`, come from NeMo Gym's resource server. Rollouts flagged with `mask_sample` count in their
    group's baseline, but are not trained on, unless `env.should_mask_flagged_samples` is false. Metrics: each number
    NAME in an agent's result, as AGENT/NAME."""

    def __init__(self, cfg: Mapping[str, object]) -> None:
        self._config = as_model(cfg, NemoGymEnvConfig, "env.nemo_gym")
        self._python = interpreter(self._config.python)
        super().__init__(self._config.max_concurrency, self._config.timeout_s)
        self._servers: _Servers | None = None

    async def _all(self, tasks: Sequence[AgentTask]) -> list[AgentResult]:
        if self._servers is None and tasks:
            self._servers = _Servers(self._python, gym_config(self._config, tasks[0].address))
        return await super()._all(tasks)

    async def roll_out(self, task: AgentTask) -> AgentResult:
        row = json.loads(str(task.info["nemo_gym_row"]))
        params = {name: value for name, value in row["responses_create_params"].items() if name not in _SAMPLING}
        metadata = dict(params.get("metadata") or {})
        body = json.loads(metadata.get("extra_body") or "{}") | {"rollout_key": task.key}
        row["responses_create_params"] = params | {"metadata": metadata | {"extra_body": json.dumps(body)}}
        result = await asyncio.wrap_future(self._servers.run(row))
        agent = (result.get("agent_ref") or row.get("agent_ref") or {}).get("name", "nemo_gym")
        public = {key: value for key, value in result.items() if not key.startswith("_")}
        numbers = {key: v for key, v in public.items() if isinstance(v, (int, float)) and math.isfinite(v)}
        return AgentResult(
            result.get("reward_components") or result["reward"],
            metrics={f"{agent}/{key}": float(value) for key, value in numbers.items()},
            trained=not (result.get("mask_sample") and self._config.should_mask_flagged_samples),
        )

    def shutdown(self) -> None:
        if self._servers is not None:
            self._servers.end()
            self._servers = None


def interpreter(python: str | None) -> str:
    """Return the path of the Python interpreter `python` (None: this one). Raise ValueError if it lacks nemo-gym."""
    python = os.path.expanduser(python or sys.executable)
    try:
        found = subprocess.run([python, "-c", "import nemo_gym"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ValueError(f"env.nemo_gym.python is {python}, which cannot be started: {error.strerror}") from None
    if found.returncode != 0:
        said = found.stderr.strip().splitlines()[-1:]
        raise ValueError(
            f"env.nemo_gym.python is {python}, which cannot import nemo_gym ({' '.join(said)}): install nemo-gym in an "
            "environment of Python 3.13, and name its interpreter"
        )
    return python


class _Servers:
    """The process that runs NeMo Gym (`nemo_gym_servers.py`). The constructor waits until its servers are ready."""

    def __init__(self, python: str, config: dict[str, object]) -> None:
        handle, log = tempfile.mkstemp(prefix="nemo_gym_", suffix=".log")
        self._log = Path(log)
        print(f"NeMo Gym starts its servers (log: {self._log})", flush=True)
        # a separate session, so that Ctrl-C reaches only the run, which then ends NeMo Gym
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name("nemo_gym_servers.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=handle, text=True, start_new_session=True,
        )  # fmt: skip
        os.close(handle)
        self._asked: dict[int, Future[dict[str, Any]]] = {}
        self._count = 0
        self._ended = False
        try:
            self._write(config)
            if not self._process.stdout.readline():
                raise RuntimeError(self._last_words())
        except BaseException:
            self.end()
            raise
        threading.Thread(target=self._read, daemon=True, name="nemo gym").start()

    def run(self, row: Mapping[str, object]) -> Future[dict[str, Any]]:
        """Start the rollout of a row. The returned future yields the agent's result, or raises NeMo Gym's error."""
        self._count += 1
        future = self._asked[self._count] = Future()
        if self._ended:
            self._fail_all()
        else:
            self._write({"id": self._count, "row": row})
        return future

    def _write(self, thing: object) -> None:
        try:
            print(json.dumps(thing), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise RuntimeError(self._last_words()) from None

    def _read(self) -> None:
        for line in self._process.stdout:
            reply = json.loads(line)
            future = self._asked.pop(reply["id"])
            if future.set_running_or_notify_cancel():  # false: the rollout has reached its time limit
                if "error" in reply:
                    future.set_exception(RuntimeError(f"NeMo Gym: {reply['error']}"))
                else:
                    future.set_result(reply["result"])
        self._ended = True
        self._fail_all()

    def _fail_all(self) -> None:
        """Fail all rollouts that have no result yet. Two threads may call this at the same time, because each future is
        taken by only one of them."""
        while self._asked:
            with contextlib.suppress(KeyError):
                _, future = self._asked.popitem()
                if future.set_running_or_notify_cancel():
                    future.set_exception(RuntimeError(self._last_words()))

    def _last_words(self) -> str:
        return f"NeMo Gym has ended (log: {self._log}): {' | '.join(last_lines(self._log)) or 'it printed nothing'}"

    def end(self) -> None:
        """Close the standard input of NeMo Gym's process, which then ends its servers. Kill the process after 60
        seconds."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def gym_config(config: NemoGymEnvConfig, address: ServerAddress) -> dict[str, object]:
    """Return NeMo Gym's configuration: its keys of `env.nemo_gym`, and the policy's address."""
    own = copy.deepcopy(config.model_extra or {})
    policy = own.setdefault("policy_model", {})
    # the policy's server keeps the token ids, so NeMo Gym need not ask for them
    policy.setdefault("responses_api_models", {}).setdefault("vllm_model", {})["return_token_id_information"] = False
    ports = {"port_range_low": config.port_range_low, "port_range_high": config.port_range_high}
    head = {"host": "127.0.0.1", "port": _free_port(config.port_range_low, config.port_range_high)}
    return own | ports | {
        "config_paths": config.config_paths, "policy_base_url": address.base_url, "policy_api_key": address.api_key,
        "policy_model_name": address.model, "default_host": "127.0.0.1", "head_server": head,
    }  # fmt: skip


def _free_port(low: int, high: int) -> int:
    for port in range(low, high + 1):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ValueError(f"env.nemo_gym.port_range_low to port_range_high: no port from {low} to {high} is free")
