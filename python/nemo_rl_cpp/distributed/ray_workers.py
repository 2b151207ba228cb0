"""Workers as Ray actors on one or more machines, one actor per device, in a placement group. Ray is imported only if it
is configured; a cluster is started if none is running, and shut down after the last `let_ray_go`."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING

from nemo_rl_cpp.distributed.launch import rendezvous_store
from nemo_rl_cpp.distributed.worker import BEAT_SECONDS, WorkerObjects, answer, worker_environment
from nemo_rl_cpp.distributed.worker_calls import (
    WAIT_SECONDS,
    Answer,
    Listener,
    Patience,
    WorkerCall,
    WorkerLostError,
    Workers,
    values_of,
)

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_PLACES_SECONDS = 60.0  # timeout for the cluster to provide CPUs for all workers
_START_SECONDS = 300.0  # timeout for all workers to start
_BEATS = "signs of life of rank {}"  # the key in the store that counts a rank's heartbeats


# Variables that actors do not inherit from the run. All others are arguments of an actor, not part of its
# `runtime_env`, because Ray writes the `runtime_env` into logs and command lines, and the variables include API keys.
_OF_A_MACHINE = {
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "SHLVL", "HOSTNAME", "PWD", "OLDPWD", "_", "TMPDIR", "VIRTUAL_ENV",
    "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES",
}  # fmt: skip
_OF_A_PROCESS = ("RAY_", "SLURM_", "LD_")

_lock = threading.Lock()
_held = {"holders": 0, "ours": False}


def ray_module() -> ModuleType:
    """Import and return Ray. Under `uv run`, Ray would run each worker with `uv run` in a copy of the project; a
    variable set here prevents that."""
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # read when ray is imported
    import ray

    return ray


def ray_in_use() -> ModuleType | None:
    """Return the module `ray` if this program has started or joined a Ray cluster, otherwise None. Never import Ray."""
    ray = sys.modules.get("ray")
    return ray if ray is not None and hasattr(ray, "is_initialized") and ray.is_initialized() else None


def start_ray(cpus: int) -> bool:
    """Connect this process to the cluster of RAY_ADDRESS, otherwise to a new cluster on this machine with at least
    `cpus` CPUs, unless it is connected. Return whether this call started a cluster."""
    ray = ray_module()
    if ray.is_initialized():
        return False
    if os.environ.get("RAY_ADDRESS"):
        ray.init(address="auto", logging_level="warning")
        return False
    # "local": do not join a cluster that another user has started on this machine
    cpus = max(cpus, os.cpu_count() or 1)
    ray.init(address="local", num_cpus=cpus, include_dashboard=False, logging_level="warning")
    return True


def hold_ray(cpus: int) -> ModuleType:
    """Join or start a Ray cluster, and return the module `ray`. Each call needs one call of `let_ray_go`; Ray is not
    shut down before the last of these."""
    with _lock:
        started = start_ray(cpus)
        _held["ours"] = started or (_held["ours"] and _held["holders"] > 0)
        _held["holders"] += 1
    return ray_module()


def let_ray_go() -> None:
    """End one use of Ray that began with `hold_ray`. If it was the last one, shut Ray down, unless Ray already ran
    before the first call of `hold_ray`."""
    with _lock:
        _held["holders"] -= 1
        if _held["holders"] == 0 and _held["ours"]:
            _held["ours"] = False
            ray_module().shutdown()


def surroundings() -> tuple[str, dict[str, str]]:
    """Return (working directory, {name: value} of the environment variables), without variables that only concern this
    machine (such as PATH) or this process (such as RAY_...)."""
    kept = {name for name in os.environ if name not in _OF_A_MACHINE and not name.startswith(_OF_A_PROCESS)}
    return os.getcwd(), {name: os.environ[name] for name in sorted(kept)}


def enter(folder: str, variables: Mapping[str, str]) -> None:
    """Apply a run's working directory `folder` and environment `variables` in a Ray actor. Variables that Ray's
    `runtime_env` sets keep their values. If the node lacks the folder, print a warning and stay in the current one."""
    given = ray_module().get_runtime_context().runtime_env.get("env_vars", {})
    os.environ.update({name: value for name, value in variables.items() if name not in given})
    try:
        os.chdir(folder)
    except OSError as error:
        text = f"warning: this node has no working directory {folder} ({error.strerror}): relative paths lead elsewhere here"
        print(text, file=sys.stderr, flush=True)


class ActorWorker(WorkerObjects):
    """The objects of a worker in a Ray actor. Calls run in its main thread: a user's loss may set signal handlers."""

    def start(self, surroundings: tuple[str, dict[str, str]], host: str, port: int, rank: int) -> Answer:
        """Apply the run's working directory and environment variables (`surroundings`), and start to send heartbeats as
        rank `rank` to the TCP store at `host` and `port`.

        Return (the address at which other nodes reach this node, the process id)."""

        def make() -> tuple[str, int]:
            enter(*surroundings)
            import torch.distributed as dist

            timeout = timedelta(seconds=_PLACES_SECONDS)
            store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
            threading.Thread(target=_beat, args=(store, rank), daemon=True).start()
            return ray_module().util.get_node_ip_address(), os.getpid()

        return answer(make)

    def meet(self, options: dict, silent: bool) -> Answer:
        if options["rank"] > 0 or silent:
            sys.stdout = open(os.devnull, "w")  # rank 0 prints what all ranks would print
        return self.join(**options)


def _beat(store: TCPStore, rank: int) -> None:
    while True:
        with contextlib.suppress(RuntimeError):  # the run's process is stopped
            store.add(_BEATS.format(rank), 1)
        time.sleep(BEAT_SECONDS)


class RayWorkers(Workers):
    """The workers of a cluster, each in a Ray actor."""

    tells_events = False

    def __init__(
        self, count: int, threads: int, silence: float, deadline: float, role: str, all_workers: int, use_gpus: bool
    ) -> None:
        self._silence, self._count, self._role = silence, count, role
        self._gpus = int(use_gpus)  # of each worker; Ray shows an actor no other GPU than its own
        self._actors, self._calls, self._places = [], {}, None
        self.pids: list[int] = []
        self._ray = ray = hold_ray(all_workers * threads)
        self._holds_ray = True
        try:
            self._places = self._room(count, threads)
            self._actors = [self._actor(rank, threads) for rank in range(count)]
            self.host = host = ray.util.get_node_ip_address()
            self._store = rendezvous_store(host, deadline)
            backend = "nccl" if use_gpus else "gloo"
            meeting = {"size": count, "host": host, "port": self._store.port, "deadline": deadline, "backend": backend}
            places = self._all_started()
            self.pids = [pid for _, pid in places]
            calls = []
            for rank, (actor, (address, _)) in enumerate(zip(self._actors, places)):
                options = {"rank": rank, "address": address, "threads": threads, **meeting}
                joining = actor.meet.remote(options, role != "rank")
                calls.append(self._started(rank, "meeting the other ranks", joining))
            self.wait(calls)
        except BaseException:
            self.kill()
            raise

    def _all_started(self) -> list[tuple[str, int]]:
        """Wait until all actors have started; return their `start` results. Raise WorkerLostError if one has not."""
        given = (surroundings(), self.host, self._store.port)
        starting = [actor.start.remote(*given, rank) for rank, actor in enumerate(self._actors)]
        calls = [self._started(rank, "starting", reference) for rank, reference in enumerate(starting)]
        self._ray.wait([self._calls[call] for call in calls], num_returns=len(calls), timeout=_START_SECONDS)
        for call in calls:
            self._look_at(call)
            if not call.done():
                self._lose(call, f"has not answered for {_START_SECONDS:.0f} s: it is stopped, or gets no processor")
        return values_of(calls, self)

    def _room(self, count: int, threads: int):
        ray = self._ray
        need = {"CPU": threads} | ({"GPU": 1} if self._gpus else {})
        places = ray.util.placement_group([need] * count, strategy="PACK")
        if not places.wait(timeout_seconds=_PLACES_SECONDS):
            found = ray.cluster_resources()
            ray.util.remove_placement_group(places)
            each, here = (" and ".join(f"{of.get(name, 0):.0f} {name}s" for name in need) for of in (need, found))
            raise ValueError(
                f"the Ray cluster has no room for {count} workers of {each} within {_PLACES_SECONDS:.0f} s: it has {here} in all; lower "
                "cluster.gpus_per_node, cluster.num_nodes or cluster.cpus_per_worker"
            )
        return places

    def _actor(self, rank: int, threads: int):
        strategies = self._ray.util.scheduling_strategies
        place = strategies.PlacementGroupSchedulingStrategy(self._places, placement_group_bundle_index=rank)
        environment = {"env_vars": worker_environment(threads)}
        options = {"num_cpus": threads, "num_gpus": self._gpus, "max_restarts": 0}
        options |= {"scheduling_strategy": place, "runtime_env": environment}
        return self._ray.remote(ActorWorker).options(**options).remote()

    def call(self, rank: int, target: int, method: str, payload: bytes, listener: Listener | None = None) -> WorkerCall:
        """Start and return a call (see `Workers.call`). The listener is ignored: an actor reports no events."""
        what = method.strip("_")
        if not self._actors:
            call = WorkerCall(rank, self._count, what, role=self._role)
            call.set(None, WorkerLostError(f"the workers of this cluster have ended: {call.who} cannot do: {what}"))
            return call
        return self._started(rank, what, self._actors[rank].call.remote(target, method, payload))

    def _started(self, rank: int, what: str, reference: object) -> WorkerCall:
        call = WorkerCall(rank, self._count, what, role=self._role)
        self._calls[call] = reference
        return call

    def wait(self, calls: Sequence[WorkerCall]) -> list:
        patience, beats = Patience(calls), _Beats(self._store, [call.rank for call in calls])
        while (waiting := [call for call in calls if not call.done()]) and not patience.is_over():
            self._ray.wait([self._calls[call] for call in waiting], num_returns=len(waiting), timeout=WAIT_SECONDS)
            for call in waiting:
                self._look_at(call)
            for call in waiting:
                if not call.done() and (silent := beats.silence(call.rank)) > self._silence:
                    self._lose(call, f"gave no sign of life for {silent:.0f} s (cluster.worker_timeout_s)")
        return values_of(calls, self)

    def _look_at(self, call: WorkerCall) -> None:
        ready, _ = self._ray.wait([self._calls[call]], timeout=0)
        if not ready:
            return
        try:
            call.end(self._ray.get(self._calls.pop(call), timeout=_PLACES_SECONDS))
        except self._ray.exceptions.RayActorError as error:
            self._lose(call, f"is gone ({str(error).splitlines()[0]})")

    def _lose(self, call: WorkerCall, how: str) -> None:
        """End `call` with a WorkerLostError, in whose message `how` says what happened to the worker."""
        pid = f" (process {self.pids[call.rank]})" if self.pids else ""
        call.set(None, WorkerLostError(f"{call.who}{pid} {how}; it was doing: {call.what}"))

    def kill(self) -> None:
        ray, self._calls = self._ray, {}
        if not ray.is_initialized() or not self._holds_ray:
            return
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        if self._places is not None:
            ray.util.remove_placement_group(self._places)
            self._places = None
        self._holds_ray = False
        let_ray_go()


class _Beats:
    """A record of how many seconds each rank has been silent. Ranks count their heartbeats in the TCP store `store`."""

    def __init__(self, store: TCPStore, ranks: list[int]) -> None:
        self._store, self._counts, self._looked = store, {}, time.monotonic()
        self._heard = dict.fromkeys(ranks, self._looked)

    def silence(self, rank: int) -> float:
        """Return the seconds since a rank's last heartbeat."""
        now = time.monotonic()
        if now - self._looked > 4 * WAIT_SECONDS + BEAT_SECONDS:  # this process was stopped, and the store with it
            self._heard = dict.fromkeys(self._heard, now)
        self._looked = now
        count = self._store.add(_BEATS.format(rank), 0)
        if count != self._counts.get(rank):
            self._counts[rank], self._heard[rank] = count, now
        return now - self._heard[rank]
