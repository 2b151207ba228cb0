"""Workers as Ray actors, on one machine or on many: one actor a device, in a placement group."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from nemo_rl_cpp.distributed.actor_watch import STARTED_BY, Clock, kill_stopped
from nemo_rl_cpp.distributed.process_workers import meeting_place
from nemo_rl_cpp.distributed.ray_session import enter_folder, hold_ray, let_ray_go
from nemo_rl_cpp.distributed.worker_calls import Patience, WorkerCall, WorkerLostError, Workers, values_of
from nemo_rl_cpp.distributed.worker_objects import Answer, WorkerObjects, worker_environment

_SLICE = 0.5  # seconds of one wait
_BEAT_SECONDS = 2.0  # between two questions whether an actor lives
_PLACES_SECONDS = 60.0  # until a cluster has room for all workers, and then until all have started


class ActorWorker:
    """What runs in an actor. `beat` is answered beside a call that lasts."""

    def __init__(self) -> None:
        self._objects = WorkerObjects()

    def place(self) -> Answer:
        """(where other nodes reach this one, the number of its process)."""
        import ray

        return Answer((ray.util.get_node_ip_address(), os.getpid()))

    def join(self, options: dict) -> Answer:
        """See `WorkerObjects.join`; `folder` becomes the working folder."""
        enter_folder(options.pop("folder"))
        silent = options.pop("silent")
        if options["rank"] > 0 or silent:
            sys.stdout = open(os.devnull, "w")  # what all ranks would say is said once
        return self._objects.join(**options)

    def call(self, target: int, method: str, payload: bytes) -> Answer:
        """See `WorkerObjects.call`."""
        return self._objects.call(target, method, payload)

    def beat(self) -> int:
        """The number of its process."""
        return os.getpid()


class RayWorkers(Workers):
    """The actors of a cluster.

    Joins the Ray cluster of RAY_ADDRESS where that is set; else one is started on this machine, and ended with the workers.

    Args:
        count: how many ranks.
        threads: of each; as many CPUs of the cluster are taken.
        silence: seconds without a sign of life after which a worker counts as lost.
        deadline: seconds that a call between ranks may take.
        role: what messages call a worker.
        all_workers: of all clusters of the run, for which a Ray that is started here has CPUs; None: `count`.
        backend: what connects the ranks, see `ranks.connect`; with "nccl" each takes a GPU of the cluster.

    Raises ValueError where the cluster has no room for all workers.
    """

    tells_events = False

    def __init__(
        self, count: int, threads: int, silence: float, deadline: float, role: str = "rank", all_workers: int | None = None,
        backend: str = "gloo",
    ) -> None:  # fmt: skip
        self._silence, self._count, self._role = silence, count, role
        self._actors, self._calls, self._places = [], {}, None
        self.pids, self._here = [], []  # numbers of all processes, and of those on this node
        self._ray = ray = hold_ray(max(count, all_workers or 0) * threads)
        self._holds_ray = True
        try:
            gpus = int(backend == "nccl")
            self._places = self._room(count, threads, gpus)
            self._actors = [self._actor(rank, threads, gpus) for rank in range(count)]
            self.host = host = ray.util.get_node_ip_address()
            self._store = meeting_place(host, deadline)
            meeting = {
                "size": count, "host": host, "port": self._store.port, "deadline": deadline, "threads": threads, "backend": backend,
                "folder": os.getcwd(),
            }  # fmt: skip
            places = self._all_started()
            addresses, self.pids = [address for address, _ in places], [pid for _, pid in places]
            self._here = [pid for pid, address in zip(self.pids, addresses) if address == host]
            self.wait([
                self._started(rank, "meeting the other ranks", actor.join.remote({"rank": rank, "address": addresses[rank], "silent": role != "rank", **meeting}))
                for rank, actor in enumerate(self._actors)
            ])  # fmt: skip
        except BaseException:
            kill_stopped()
            self.kill()
            raise

    def _all_started(self) -> list[tuple[str, int]]:
        """Each actor's `place`. WorkerLostError, which names the first that has ended or does not answer."""
        calls = [self._started(rank, "starting", actor.place.remote()) for rank, actor in enumerate(self._actors)]
        self._ray.wait([self._calls[call] for call in calls], num_returns=len(calls), timeout=_PLACES_SECONDS)
        for call in calls:
            self._look_at(call)
            if not call.done():
                call.set(
                    None,
                    self._lost(
                        call, f"has not answered for {_PLACES_SECONDS:.0f} s: it is stopped, or gets no processor"
                    ),
                )
        return values_of(calls, self)

    def _room(self, count: int, threads: int, gpus: int):
        ray = self._ray
        bundle = {"CPU": threads, "GPU": gpus} if gpus else {"CPU": threads}
        places = ray.util.placement_group([bundle] * count, strategy="PACK")
        if not places.wait(timeout_seconds=_PLACES_SECONDS):
            there = ray.cluster_resources()
            ray.util.remove_placement_group(places)
            each = " and ".join(f"{n} {kind}s" for kind, n in bundle.items())
            found = " and ".join(f"{there.get(kind, 0):.0f} {kind}s" for kind in bundle)
            raise ValueError(
                f"the Ray cluster has no room for {count} workers of {each} within {_PLACES_SECONDS:.0f} s: it has {found} in all; "
                "lower cluster.gpus_per_node, cluster.num_nodes or cluster.cpus_per_worker"
            )
        return places

    def _actor(self, rank: int, threads: int, gpus: int):
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return (
            self._ray.remote(concurrency_groups={"beat": 1})(ActorWorker)
            .options(
                num_cpus=threads,
                num_gpus=gpus or None,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._places, placement_group_bundle_index=rank),
                runtime_env={"env_vars": {**worker_environment(threads), **STARTED_BY}},
            )
            .remote()
        )

    def __len__(self) -> int:
        return self._count

    def call(
        self, rank: int, target: int, method: str, payload: bytes, event: str | None = None, on_event: Callable[..., None] | None = None
    ) -> WorkerCall:  # fmt: skip
        """See `Workers.call`; it cannot tell of an event."""
        if event is not None:
            raise ValueError(f"{method}: an actor tells of nothing before its call has ended (tells_events is False)")
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
        """See `Workers.wait`."""
        patience, beats = Patience(calls), _Beats(self._ray, self._actors, [call.rank for call in calls])
        while (waiting := [call for call in calls if not call.done()]) and not patience.is_over():
            self._ray.wait([self._calls[call] for call in waiting], num_returns=len(waiting), timeout=_SLICE)
            for call in waiting:
                self._look_at(call)
            for call in waiting:
                if not call.done() and (silent := beats.silence(call.rank)) > self._silence:
                    call.set(
                        None, self._lost(call, f"gave no sign of life for {silent:.0f} s (cluster.worker_timeout_s)")
                    )
        return values_of(calls, self)

    def _look_at(self, call: WorkerCall) -> None:
        ready, _ = self._ray.wait([self._calls[call]], timeout=0)
        if not ready:
            return
        try:
            call.end(self._ray.get(self._calls.pop(call), timeout=_PLACES_SECONDS))
        except self._ray.exceptions.RayActorError as error:
            call.set(None, self._lost(call, f"is gone ({str(error).splitlines()[0]})"))

    def _lost(self, call: WorkerCall, how: str) -> WorkerLostError:
        pid = f" (process {self.pids[call.rank]})" if self.pids else ""
        return WorkerLostError(f"{call.who}{pid} {how}; it was doing: {call.what}")

    def kill(self) -> None:
        """See `Workers.kill`."""
        ray, self._calls = self._ray, {}
        if not ray.is_initialized() or not self._holds_ray:
            return
        for actor in self._actors:
            ray.kill(actor)
        for pid in self._here:  # Ray asks a process to end; one that is stopped does not hear it
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._actors, self._here = [], []
        if self._places is not None:
            ray.util.remove_placement_group(self._places)
            self._places = None
        self._holds_ray = False
        let_ray_go()


class _Beats:
    """How long the actors have been silent, asked every few seconds."""

    def __init__(self, ray: ModuleType, actors: list, ranks: list[int]) -> None:
        self._ray, self._actors, self._asked = ray, actors, {}
        self._clock = Clock(ranks, 4 * _SLICE + _BEAT_SECONDS)

    def silence(self, rank: int) -> float:
        """Seconds since the last sign of life; 0 where this process did not look for a while, since it was stopped."""
        if (asked := self._asked.get(rank)) is not None and self._ray.wait([asked], timeout=0)[0]:
            self._clock.heard(rank)
            del self._asked[rank]
        silent = self._clock.silence(rank)
        if rank not in self._asked and silent > _BEAT_SECONDS:
            self._asked[rank] = self._actors[rank].beat.options(concurrency_group="beat").remote()
        return silent
