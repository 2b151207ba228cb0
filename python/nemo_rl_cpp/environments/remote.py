"""`Class.remote(...)`: an object whose methods can also be called as `method.remote(...)`.

Where this program has started or joined Ray, the object lives in Ray actors (`RayEnvironment`), and `ray.get` waits for a
result. Else it lives in this process: the calls of one object run one after another, as an actor's do. Those of the user's class
run where the user's code runs (`user_code.py`). An environment of this package has a thread, so that several work at the same
time. `nemo_rl_cpp.distributed.get` waits for either.

An actor runs its calls in the main thread of its process, one after another, since a user's code may set signals there. So it has
neither concurrency groups nor async methods, with which Ray would run them in other threads. An environment whose answers follow
from the conversation alone (`can_be_asked_again`) is started again when an actor is lost, by Ray, which then asks it again.
"""

from __future__ import annotations

import pickle
import queue
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nemo_rl_cpp.config.base import Section
from nemo_rl_cpp.config.cluster import ClusterConfig
from nemo_rl_cpp.distributed.futures import Future, as_raised, get, picklable
from nemo_rl_cpp.distributed.ray_workers import enter, hold_ray, let_ray_go, ray_in_use, surroundings
from nemo_rl_cpp.distributed.worker import worker_environment
from nemo_rl_cpp.distributed.worker_calls import WorkerLostError
from nemo_rl_cpp.errors import in_user_code
from nemo_rl_cpp.user_code import call_any, call_user, is_users, runs_here

if TYPE_CHECKING:
    from nemo_rl_cpp.environments.interfaces import EnvironmentReturn

START_SECONDS = 300.0  # until an actor has made its environment
_END_SECONDS = 10.0  # for an environment to end its own processes


@dataclass(frozen=True)
class ActorSettings:
    """How the actors of environments are kept.

    Attributes:
        deadline: seconds that one answer may take.
        restarts: how often an actor is started again.
        cpus: of a Ray that is started here.
    """

    deadline: float
    restarts: int
    cpus: int = 1

    @classmethod
    def of(cls, cluster: ClusterConfig) -> ActorSettings:
        """From the section `cluster`."""
        cpus = cluster.processes * (cluster.cpus_per_worker or 1)
        return cls(cluster.communication_timeout_s, cluster.environment_restarts, cpus)


class EnvironmentActor:
    """What runs in an actor: one environment, made when it is first asked for, so that what its constructor raises is an answer.
    `make` is what makes it, pickled: the modules of the environment are imported then, too."""

    def __init__(self, make: bytes, folder: str, variables: Mapping[str, str]) -> None:
        enter(folder, variables)
        self._make, self._environment = make, None

    def start(self) -> None:
        """Makes the environment, if it has not been made; raises what its constructor raises."""
        if self._environment is None:
            self._environment = _told(lambda: pickle.loads(self._make)())

    def call(self, method: str, args: tuple, kwargs: Mapping[str, object]) -> object:
        """Any method of the environment."""
        self.start()
        return _told(lambda: getattr(self._environment, method)(*args, **kwargs))

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
    """Return the result of a call of the user's code. An exception leaves the process with the sentence about that code, whose
    place is known here alone, and its traceback."""
    try:
        return call_user(call)
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

    def __init__(self, cls: type, actors: list, settings: ActorSettings, held: bool = False) -> None:
        self._cls, self._actors, self._settings, self._held = cls, actors, settings, held

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

    def _start(self, name: str, args: tuple, kwargs: dict[str, object]) -> object:
        if name == "step":
            return self._step(args, kwargs)
        if name == "pop_metrics":
            popped = [actor.call.remote(name, args, kwargs) for actor in self._actors]
            return popped[0] if len(popped) == 1 else self._actors[0].added.remote(*popped)
        if name == "shutdown":
            ends = [actor.end.remote() for actor in self._actors]
            return ends[0] if len(ends) == 1 else self._actors[0].added.remote(*({} for _ in ends))
        return self._actors[0].call.remote(name, args, kwargs)

    def _step(self, args: tuple, kwargs: dict[str, object]) -> object:
        if len(self._actors) == 1:
            return self._actors[0].call.remote("step", args, kwargs)
        (logs, infos), rest = args[:2], args[2:]
        size = max(1, -(-len(logs) // len(self._actors)))
        parts = [
            actor.call.remote("step", (logs[begin : begin + size], infos[begin : begin + size], *rest), kwargs)
            for actor, begin in zip(self._actors, range(0, max(1, len(logs)), size))
        ]
        return parts[0] if len(parts) == 1 else self._actors[0].joined.remote(*parts)

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
                _end_all(ray, self._actors)
            let_ray_go()


def ray_environment(cls: type, args: tuple, kwargs: dict[str, object], settings: ActorSettings | None = None, options: dict[str, object] | None = None) -> RayEnvironment:  # fmt: skip
    """An environment of this class in actors: as many as `num_workers` of its section says, where its answers and metrics can be put
    together again (`can_be_asked_again`, `metrics_add_up`), else one.

    `options` are Ray's own for its actors. Raises what the constructor raises.
    """
    settings = ActorSettings.of(ClusterConfig()) if settings is None else settings
    ray = hold_ray(settings.cpus)
    actors: list = []
    try:
        again = bool(cls.can_be_asked_again)
        count, args = _dealt(cls, args, int(ray.cluster_resources().get("CPU", 1)))
        made = {
            "num_cpus": 0,
            "max_restarts": settings.restarts if again else 0,
            # restarts are what is counted: of a node that dies, Ray tries a call several times before it starts the actor elsewhere
            "max_task_retries": -1 if again else 0,
            "runtime_env": {"env_vars": worker_environment(1)},
            "scheduling_strategy": "SPREAD" if count > 1 else "DEFAULT",
        }
        kind = ray.remote(EnvironmentActor)
        make = ray.cloudpickle.dumps(_Maker(cls, args, kwargs))
        for i in range(count):
            actors.append(kind.options(**_with(made, options or {}, i, count)).remote(make, *surroundings()))
        _await_start(ray, actors, cls)
        return RayEnvironment(cls, actors, settings, held=True)
    except BaseException as error:
        _end_all(ray, actors)
        let_ray_go()
        raise as_raised(error) from None


def _end_all(ray: ModuleType, actors: list) -> None:
    for actor in actors:
        ray.kill(actor)


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


DEADLINE_S = 1800.0  # of an answer of an actor that somebody else has made


class RemoteMethod:
    """A method of a `LocalActor`: call it, or start it with `.remote(...)`."""

    def __init__(self, actor: LocalActor, method: Callable[..., object]) -> None:
        self._actor = actor
        self._method = method

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.remote(*args, **kwargs).result()

    def remote(self, *args: object, **kwargs: object) -> Future:
        """Starts the call and returns at once."""
        return self._actor._submit(partial(self._method, *args, **kwargs))


class LocalActor:
    """A handle on an object of this process that looks like a Ray actor's.

    Its thread starts with the first `.remote` call and is a daemon: it never keeps the program from ending.
    """

    def __init__(self, instance: object) -> None:
        self._instance = instance
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        weakref.finalize(self, self._calls.put, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self._instance, name)
        return RemoteMethod(self, value) if callable(value) else value

    def __repr__(self) -> str:
        return f"LocalActor({self._instance!r})"

    def _submit(self, call: Callable[[], object]) -> Future:
        future = Future()
        if is_users(type(self._instance)):
            call = partial(call_user, call)
        # an object that calls itself must not wait for itself, nor a thread for the calls that it makes itself
        if threading.current_thread() is self._thread or runs_here():
            future.run(call)
            return future
        with self._lock:
            if self._thread is None:
                # the thread must not keep the actor alive, hence no bound method
                self._thread = threading.Thread(target=_work, args=(self._calls,), daemon=True)
                self._thread.start()
        self._calls.put((future, call))
        return future


def _work(calls: queue.SimpleQueue) -> None:
    while (entry := calls.get()) is not None:
        future, call = entry
        future.run(call)
        del future, call, entry


class Remotable:
    """Gives a class `Class.remote(...)` and `Class.options(...).remote(...)`, as Ray's decorator does."""

    @classmethod
    def remote(cls, *args: object, **kwargs: object) -> LocalActor | RayEnvironment:
        """Constructs an object behind a handle whose methods have `.remote(...)`: in Ray actors where Ray is in use, else here."""
        return _Options(cls, {}).remote(*args, **kwargs)

    @classmethod
    def options(cls, **options: object) -> _Options:
        """The class with Ray's options for its actors. Without Ray there is one process, and nothing to place.

        Raises ValueError for an option that asks for GPUs without Ray: this process cannot set them aside.
        """
        if options.get("num_gpus") and ray_in_use() is None:
            raise ValueError(
                f"{cls.__name__}.options(num_gpus={options['num_gpus']}): environments of this process run without GPUs; start Ray "
                "(ray.init) for environments with GPUs of their own"
            )
        return _Options(cls, options)


class _Options:
    """A class with Ray's options."""

    def __init__(self, cls: type, options: dict[str, object]) -> None:
        self._cls, self._options = cls, options

    def remote(self, *args: object, **kwargs: object) -> LocalActor | RayEnvironment:
        """See `Remotable.remote`."""
        if ray_in_use() is None:
            return LocalActor(self._cls(*args, **kwargs))
        return ray_environment(self._cls, args, kwargs, options=self._options)


class EnvironmentLostError(WorkerLostError):
    """The actor of an environment has ended for good, or gives no answer; the message names the environment."""


def call_remote(handle: object, method: str, *args: object, **kwargs: object) -> object:
    """Start `handle.method(...)`, and return a future or a reference of Ray's where the method has `.remote`, else the value."""
    function = getattr(handle, method)
    if hasattr(function, "remote"):
        return function.remote(*args, **kwargs)
    return call_any(function, *args, **kwargs)


def answer_of(handle: object, result: object, name: str) -> Any:
    """Waits for what `call_remote` gave. `name` is that of the environment, for messages.

    Raises what the method raised, and EnvironmentLostError where an actor is gone or does not answer within its deadline
    (`cluster.communication_timeout_s`). A call in this process has no deadline: it is the user's own code, at work.
    """
    ray = ray_in_use()
    if ray is None or not isinstance(result, ray.ObjectRef):
        return get(result)
    deadline = handle.deadline if isinstance(handle, RayEnvironment) else DEADLINE_S
    try:
        return get(result, deadline)
    except ray.exceptions.GetTimeoutError:
        raise EnvironmentLostError(
            f"the environment {name} ({handle!r}) gave no answer for {deadline:g} s (cluster.communication_timeout_s)"
        ) from None
    except ray.exceptions.RayActorError as error:
        raise EnvironmentLostError(
            f"the environment {name} ({handle!r}) is lost: {str(error).splitlines()[0]}; {_why_for_good(handle)}"
        ) from None


def _why_for_good(handle: object) -> str:
    if getattr(handle, "can_be_asked_again", False) is True:
        return "it was started again as often as cluster.environment_restarts allows"
    return "it is not started again, since what it knew of its conversations is lost (its class does not set can_be_asked_again)"


def shut_down(handle: object, patience: float | None = None) -> None:
    """Ends an environment's processes, and its actors. Raises TimeoutError where it does not answer for `patience` seconds; in this
    process None waits for as long as it takes."""
    if isinstance(handle, RayEnvironment):
        handle.close(patience)
        return
    if hasattr(handle, "shutdown"):
        result = call_remote(handle, "shutdown")
        get(result, patience if isinstance(result, Future) or patience is not None else _END_SECONDS)
