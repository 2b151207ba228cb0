"""Environments as Ray actors: the same class, in processes of its own on any node of the cluster.

A handle looks like one of Ray's: `ray.get(env.step.remote(logs, metadata))`. Behind it are one or several actors. An environment
whose answers follow from the conversation alone (`can_be_asked_again`) is started again when an actor is lost, by Ray, which then
asks it again. What other environments know is lost with them: then the call raises, and so does every later one.
"""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nemo_rl_cpp.config.base import Section
from nemo_rl_cpp.config.cluster import ClusterConfig
from nemo_rl_cpp.distributed.actor_watch import START_SECONDS, STARTED_BY, ActorWatch, Beat
from nemo_rl_cpp.distributed.futures import as_raised
from nemo_rl_cpp.distributed.ray_session import enter_folder, hold_ray, let_ray_go, ray_in_use
from nemo_rl_cpp.distributed.worker_objects import picklable, worker_environment
from nemo_rl_cpp.errors import in_user_code

if TYPE_CHECKING:
    from nemo_rl_cpp.environments.interfaces import EnvironmentReturn

_CALLS_KEPT = 256  # calls since the last pop_metrics that can be made again; nobody who makes more asks for metrics
_END_SECONDS = 10.0  # for an environment to end its own processes


@dataclass(frozen=True)
class ActorSettings:
    """How the actors of environments are kept.

    Attributes:
        silence: seconds without a sign of life after which an actor counts as lost.
        deadline: seconds that one answer may take.
        restarts: how often an actor is started again.
        cpus: of a Ray that is started here.
    """

    silence: float
    deadline: float
    restarts: int
    cpus: int = 1

    @classmethod
    def of(cls, cluster: ClusterConfig) -> ActorSettings:
        """From the section `cluster`."""
        cpus = cluster.processes * (cluster.cpus_per_worker or 1)
        return cls(cluster.worker_timeout_s, cluster.communication_timeout_s, cluster.environment_restarts, cpus)


class EnvironmentActor:
    """What runs in an actor: one environment, made when it is first asked for, so that a restarted actor is there at once, and is
    missed at once where it is stopped. `make` is what makes it, pickled: the modules of the environment are imported then, too.

    Its calls come with how many were made before them since the last `pop_metrics`. Where the numbers differ, this is not the
    process that answered those calls: they are made again before metrics are given, so that counts are as if it had been.
    """

    def __init__(self, make: bytes, folder: str) -> None:
        enter_folder(folder)
        self._make, self._environment, self._calls = make, None, 0

    def beat(self) -> Beat:
        """A sign of life; answered beside a call that lasts."""
        import ray

        return Beat(os.getpid(), ray.get_runtime_context().get_node_id())

    def start(self) -> None:
        """Makes the environment, if it has not been made; raises what its constructor raises."""
        if self._environment is None:
            self._environment = _told(lambda: pickle.loads(self._make)())

    def step(self, arguments: tuple[tuple, dict]) -> EnvironmentReturn:
        """`step` of the environment with (args, kwargs)."""
        self._calls += 1
        return self.call("step", *arguments)

    def call(self, method: str, args: tuple, kwargs: Mapping[str, object]) -> object:
        """Any method of the environment."""
        self.start()
        return _told(lambda: getattr(self._environment, method)(*args, **kwargs))

    def pop_metrics(self, steps: Sequence | None) -> dict[str, float]:
        """The metrics since the last call; `steps`: the arguments of the calls that were made since, None if they are not known."""
        if steps is not None and self._calls != len(steps):
            import ray

            self.end()
            for arguments in steps:
                self.step(ray.get(arguments, timeout=START_SECONDS))
        self._calls = 0
        return self.call("pop_metrics", (), {})

    def joined(self, *parts: EnvironmentReturn) -> EnvironmentReturn:
        """The answers to consecutive parts of a batch as one."""
        return joined(parts)

    def added(self, *metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics of several actors as one environment's."""
        return {
            name: sum(each.get(name, 0) for each in metrics) for name in dict.fromkeys(k for m in metrics for k in m)
        }

    def end(self) -> None:
        """Ends the environment's own processes."""
        environment, self._environment = self._environment, None
        if environment is not None and hasattr(environment, "shutdown"):
            _told(environment.shutdown)


def _told(call: Callable[[], Any]) -> Any:
    """What the call gives. An exception leaves the process with the sentence about the user's code, whose place is known here
    alone, and its traceback."""
    try:
        return call()
    except BaseException as error:
        sentence = in_user_code(error)
        # an actor that SystemExit leaves would end
        sent = picklable(error) if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
        sent.told = None if sentence is None else str(sentence)
        sent.trace = "".join(traceback.format_exception(error))
        raise sent from None


def joined(parts: Sequence[EnvironmentReturn]) -> EnvironmentReturn:
    """The answers to consecutive parts of a batch as one; a part without rows says nothing."""
    import torch

    parts = [part for part in parts if len(part.metadata)] or list(parts[:1])
    first = parts[0]
    if len(parts) == 1:
        return first

    def listed(name: str) -> list:
        return [value for part in parts for value in getattr(part, name)]

    if isinstance(first.rewards, dict):
        rewards = copy(first.rewards)  # with its weights, where it is `WeightedParts`
        rewards.update({name: torch.cat([part.rewards[name] for part in parts]) for name in first.rewards})
    else:
        rewards = torch.cat([part.rewards for part in parts])
    return first._replace(
        observations=listed("observations"),
        metadata=listed("metadata"),
        next_stop_strings=listed("next_stop_strings"),
        rewards=rewards,
        terminateds=torch.cat([part.terminateds for part in parts]),
        answers=None if first.answers is None else listed("answers"),
    )


class RayMethod:
    """A method of a `RayEnvironment`: start it with `.remote(...)`, or call it and wait."""

    def __init__(self, environment: RayEnvironment, name: str) -> None:
        self._environment, self._name = environment, name

    def remote(self, *args: object, **kwargs: object) -> object:
        """A reference of Ray's to the result."""
        return self._environment._start(self._name, args, kwargs)

    def __call__(self, *args: object, **kwargs: object) -> object:
        import ray

        return ray.get(self.remote(*args, **kwargs), timeout=self._environment.deadline)


class RayEnvironment:
    """A handle on an environment in actors. It can be sent to other actors; the one who made it ends them by `close`.

    Rows of a batch are dealt to several actors in consecutive parts, as NeMo RL's environments deal them to their workers.
    """

    def __init__(self, cls: type, actors: list, settings: ActorSettings, watch: ActorWatch | None = None) -> None:
        self._cls, self._actors, self._settings, self._watch = cls, actors, settings, watch
        self._steps: list[list] | None = [[] for _ in actors]
        self._held = watch is not None

    def __reduce__(self) -> tuple:
        return RayEnvironment, (self._cls, self._actors, self._settings)

    def __repr__(self) -> str:
        return f"RayEnvironment({self._cls.__name__}, {len(self._actors)} actors)"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        value = getattr(self._cls, name)
        return RayMethod(self, name) if callable(value) else value

    @property
    def deadline(self) -> float:
        """Seconds that one answer may take."""
        return self._settings.deadline

    @property
    def pids(self) -> list[int]:
        """The processes of its actors, where this is the handle that made them."""
        return [] if self._watch is None else self._watch.pids

    def _start(self, name: str, args: tuple, kwargs: dict[str, object]) -> object:
        if name == "step":
            return self._step(args, kwargs)
        if name == "pop_metrics":
            return self._pop()
        if name == "shutdown":
            ends = [actor.end.remote() for actor in self._actors]
            return ends[0] if len(ends) == 1 else self._actors[0].added.remote(*({} for _ in ends))
        return self._actors[0].call.remote(name, args, kwargs)

    def _step(self, args: tuple, kwargs: dict[str, object]) -> object:
        if len(self._actors) == 1:
            return self._ask(0, args, kwargs)
        (logs, infos), rest = args[:2], args[2:]
        size = max(1, -(-len(logs) // len(self._actors)))
        parts = [
            self._ask(i, (logs[begin : begin + size], infos[begin : begin + size], *rest), kwargs)
            for i, begin in enumerate(range(0, max(1, len(logs)), size))
        ]
        return parts[0] if len(parts) == 1 else self._actors[0].joined.remote(*parts)

    def _ask(self, i: int, args: tuple, kwargs: dict[str, object]) -> object:
        import ray

        arguments = ray.put((args, kwargs))
        if self._steps is not None:
            self._steps[i].append(arguments)
            if len(self._steps[i]) > _CALLS_KEPT:
                self._steps = None
        return self._actors[i].step.remote(arguments)

    def _pop(self) -> object:
        steps = self._steps if self._steps is not None and self._cls.can_be_asked_again else [None] * len(self._actors)
        self._steps = [[] for _ in self._actors]
        popped = [actor.pop_metrics.remote(made) for actor, made in zip(self._actors, steps)]
        return popped[0] if len(popped) == 1 else self._actors[0].added.remote(*popped)

    def close(self, patience: float | None = None) -> None:
        """Ends the environment's processes and its actors, and Ray where nobody else holds it. May be called again."""
        if not self._held:
            return
        self._held = False
        ray = ray_in_use()
        try:
            if ray is not None:
                ends = [actor.end.remote() for actor in self._actors]
                ray.wait(ends, num_returns=len(ends), timeout=_END_SECONDS if patience is None else patience)
        finally:
            if ray is not None:
                self._watch.end_all()
            let_ray_go()


def ray_environment(cls: type, args: tuple, kwargs: dict[str, object], settings: ActorSettings | None = None, options: dict[str, object] | None = None) -> RayEnvironment:  # fmt: skip
    """An environment of this class in actors: as many as `num_workers` of its section says, where its answers and metrics can be put
    together again (`can_be_asked_again`, `metrics_add_up`), else one.

    `options` are Ray's own for its actors. Raises what the constructor raises.
    """
    settings = ActorSettings.of(ClusterConfig()) if settings is None else settings
    ray = hold_ray(settings.cpus)
    actors: list = []
    watch = None
    try:
        again = bool(cls.can_be_asked_again)
        count, args = _dealt(cls, args, int(ray.cluster_resources().get("CPU", 1)))
        made = {
            "num_cpus": 0,
            "max_restarts": settings.restarts if again else 0,
            # restarts are what is counted: of a node that dies, Ray tries a call several times before it starts the actor elsewhere
            "max_task_retries": -1 if again else 0,
            "runtime_env": {"env_vars": worker_environment(1) | STARTED_BY},
            "scheduling_strategy": "SPREAD" if count > 1 else "DEFAULT",
        }
        kind = ray.remote(concurrency_groups={"beat": 1})(EnvironmentActor)
        make = ray.cloudpickle.dumps(_Maker(cls, args, kwargs))
        actors = [kind.options(**_with(made, options or {}, i, count)).remote(make, os.getcwd()) for i in range(count)]
        watch = ActorWatch(ray, actors, settings.silence)
        _await_start(ray, actors, cls)
        return RayEnvironment(cls, actors, settings, watch)
    except BaseException as error:
        if watch is not None:
            watch.end_all()
        let_ray_go()
        raise as_raised(error) from None


def _await_start(ray: ModuleType, actors: list, cls: type) -> None:
    try:
        ray.get([actor.start.remote() for actor in actors], timeout=START_SECONDS)
    except ray.exceptions.GetTimeoutError:
        raise TimeoutError(
            f"no answer from an actor of {cls.__name__} within {START_SECONDS:.0f} s of its start: its constructor hangs, or it found no "
            "place in the cluster. Look for ray::EnvironmentActor among the processes, or set cluster.executor=processes, which needs no actor"
        ) from None


def _with(made: dict[str, Any], options: dict[str, Any], i: int, count: int) -> dict[str, Any]:
    """The options of actor i of `count`: the caller's before ours, both of environment variables, names that differ."""
    both = {**made, **options}
    given = options.get("runtime_env") or {}
    variables = {**(given.get("env_vars") or {}), **made["runtime_env"]["env_vars"]}
    both["runtime_env"] = {**given, "env_vars": variables}
    if "name" in options and i:
        both["name"] = f"{options['name']}_{i}"
    return both


@dataclass(frozen=True)
class _Maker:
    cls: type
    args: tuple
    kwargs: dict[str, object]

    def __call__(self) -> Any:
        return self.cls(*self.args, **self.kwargs)


def _dealt(cls: type, args: tuple, cpus: int) -> tuple[int, tuple]:
    """How many actors, and the arguments of each: its `num_workers` is 1 where there are several."""
    section = args[0] if args else None
    wanted = section["num_workers"] if isinstance(section, (Mapping, Section)) and "num_workers" in section else 1
    if not (cls.can_be_asked_again and cls.metrics_add_up) or not isinstance(wanted, int) or wanted < 2:
        return 1, args
    one = {"num_workers": 1}
    alone = section.model_copy(update=one) if isinstance(section, Section) else {**section, **one}
    return min(wanted, max(2, cpus)), (alone, *args[1:])


__all__ = ["ActorSettings", "EnvironmentActor", "RayEnvironment", "RayMethod", "joined", "ray_environment"]
