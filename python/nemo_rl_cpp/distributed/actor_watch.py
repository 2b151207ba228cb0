"""Looks whether Ray actors live. Ray notices an actor whose process has ended, but not one that is stopped or hangs."""

import contextlib
import os
import signal
import socket
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

BEAT_SECONDS = 1.0  # between two questions to an actor
START_SECONDS = 300.0  # until an actor's process must have answered for the first time
STARTED_BY = {"NEMO_RL_STARTED_BY": f"{socket.gethostname()}:{os.getpid()}"}
"""An environment variable of the actors that this process starts: tells their processes from all others before they have answered."""


class Beat(NamedTuple):
    """What an actor answers to `beat`: the number of its process and the node that it is on."""

    pid: int
    node: str


class Clock:
    """Seconds that actors have been silent. Time in which this very process was stopped does not count: their signs of life
    wait to be read."""

    def __init__(self, names: list[int], gap: float) -> None:
        self._gap, self._looked = gap, time.monotonic()
        self._heard = dict.fromkeys(names, self._looked)

    def heard(self, name: int) -> None:
        """A sign of life has come."""
        self._heard[name] = time.monotonic()

    def silence(self, name: int) -> float:
        """Seconds since the last one."""
        now = time.monotonic()
        if now - self._looked > self._gap:
            self._heard = dict.fromkeys(self._heard, now)
        self._looked = now
        return now - self._heard[name]


@dataclass
class _Watched:
    """An actor, the question that is on its way, and where it was when it last answered (None: it is starting)."""

    actor: object
    asked: object = None
    place: Beat | None = None
    gone: bool = False


class ActorWatch:
    """Asks every actor for its `beat` (a method of a concurrency group "beat"), on a thread, and kills one that is silent for
    `silence` seconds. Ray then starts it again, or answers its calls with an error, as it was made."""

    def __init__(self, ray: ModuleType, actors: list, silence: float) -> None:
        self._ray, self._silence = ray, silence
        self._watched = [_Watched(actor) for actor in actors]
        self._clock = Clock(list(range(len(actors))), 4 * BEAT_SECONDS)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=_watch, args=(weakref.ref(self), self._ended), daemon=True)
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        """Processes of the actors that have answered, in their order."""
        return [each.place.pid for each in self._watched if each.place is not None]

    def look(self) -> None:
        """One look at every actor."""
        for i, each in enumerate(self._watched):
            if each.gone:
                continue
            if each.asked is not None and self._ray.wait([each.asked], timeout=0)[0]:
                self._hear(i, each)
            if each.asked is None and not each.gone:
                each.asked = each.actor.beat.options(concurrency_group="beat", max_task_retries=0).remote()
            limit, silence = self._silence, self._clock.silence(i)
            if each.place is None:
                if silence > limit:
                    kill_stopped()
                limit = max(limit, START_SECONDS)
            if silence > limit:
                self._clock.heard(i)
                self._kill(each)

    def _hear(self, i: int, each: _Watched) -> None:
        errors, reference, each.asked = self._ray.exceptions, each.asked, None
        try:
            each.place = Beat(*self._ray.get(reference, timeout=BEAT_SECONDS))
            self._clock.heard(i)
        except errors.ActorUnavailableError:  # it is being started again, which may take a while
            if each.place is not None:
                each.place = None
                self._clock.heard(i)
        except (errors.RayActorError, errors.GetTimeoutError):
            each.gone = True

    def _kill(self, each: _Watched) -> None:
        place, each.place, each.asked = each.place, None, None
        if place is None:
            each.gone = True
            self._ray.kill(each.actor)
        else:
            kill_process(self._ray, place)

    def end_all(self) -> None:
        """Ends all actors, wherever they are, and looks no more."""
        self._ended.set()
        self._thread.join(4 * BEAT_SECONDS)
        for each in self._watched:
            self._ray.kill(each.actor)
            if each.place is not None:
                kill_process(self._ray, each.place)


def _watch(watch: weakref.ref[ActorWatch], ended: threading.Event) -> None:
    while not ended.wait(BEAT_SECONDS):
        watched = watch()
        if watched is None:
            return
        try:
            watched.look()
        except Exception:  # Ray has been shut down under it
            if not watched._ray.is_initialized():
                return
        del watched


def started_here() -> list[int]:
    """The processes of this machine that carry `STARTED_BY`."""
    (mark,) = (f"{name}={value}".encode() for name, value in STARTED_BY.items())
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or somebody else's
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


def kill_stopped() -> None:
    """Kills those that are stopped (SIGSTOP): such an actor never answers."""
    for pid in started_here():
        with contextlib.suppress(OSError):  # gone meanwhile
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                os.kill(pid, signal.SIGKILL)


def kill_process(ray: ModuleType, place: Beat) -> None:
    """Kills a process on any node of the cluster. Ray itself asks a process to end, which one that is stopped does not hear."""
    if place.node == ray.get_runtime_context().get_node_id():
        with contextlib.suppress(ProcessLookupError):
            os.kill(place.pid, signal.SIGKILL)
        return
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(place.node, soft=False)
    ray.remote(_kill_here).options(num_cpus=0, scheduling_strategy=there).remote(place.pid)


def _kill_here(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
