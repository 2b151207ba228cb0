"""`Class.remote(...)`, which makes an object whose methods can also be called as `method.remote(...)`.

If this program has started or joined Ray, the object is in a Ray actor (`RayEnvironment`), and `ray.get` waits for a
result. Otherwise it is in this process, and the calls of one object run one after another, as in an actor. Calls of a
custom class run in the thread of user code (`user_code.py`). An environment of this package has its own thread, so that
several run concurrently. `nemo_rl_cpp.distributed.get` waits for results of both kinds.

An actor runs its calls in the main thread of its process, one after another, because user code may set signal handlers
there. It has neither concurrency groups nor async methods, with which Ray would use other threads. If results depend
only on the arguments (`can_be_asked_again`), Ray restarts a lost actor and repeats the call."""

from __future__ import annotations

import pickle
import queue
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from nemo_rl_cpp.config.cluster import ClusterConfig
from nemo_rl_cpp.distributed.ray_workers import enter, hold_ray, let_ray_go, ray_in_use, surroundings
from nemo_rl_cpp.distributed.worker import worker_environment
from nemo_rl_cpp.distributed.worker_calls import Future, WorkerLostError, as_raised, get, picklable
from nemo_rl_cpp.errors import in_user_code
from nemo_rl_cpp.user_code import call_any, call_user, is_users, runs_here

START_SECONDS = 300.0  # for an actor to make its environment
DEADLINE_S = 1800.0  # for a call of an actor that another process made
_END_SECONDS = 10.0  # for an environment to end its processes


# ---- in a Ray actor


@dataclass(frozen=True)
class ActorSettings:
    """The settings of the Ray actors in which environments run."""

    deadline: float  # the maximum seconds per call
    restarts: int  # how often an actor may be restarted
    cpus: int = 1  # the number of CPUs of a Ray cluster that this process starts

    @classmethod
    def of(cls, cluster: ClusterConfig) -> ActorSettings:
        """Return the settings of actors that follow from the section `cluster` of the configuration."""
        cpus = cluster.processes * (cluster.cpus_per_worker or 1)
        return cls(cluster.communication_timeout_s, cluster.environment_restarts, cpus)


class EnvironmentActor:
    """The Ray actor that holds an environment. The first call makes the environment, so its caller gets the
    constructor's errors."""

    def __init__(self, make: bytes, folder: str, variables: Mapping[str, str]) -> None:
        """Change to the working directory `folder`, set the environment `variables`, and store `make`, the pickled
        function that makes the environment. Only `start` unpickles it and thus imports the modules."""
        enter(folder, variables)
        self._make, self._environment = make, None

    def start(self) -> None:
        """Make the environment, unless it exists. Raise the errors of its constructor."""
        if self._environment is None:
            self._environment = _told(lambda: pickle.loads(self._make)())

    def call(self, method: str, args: tuple, kwargs: Mapping[str, object]) -> object:
        self.start()
        return _told(lambda: getattr(self._environment, method)(*args, **kwargs))

    def end(self) -> None:
        environment, self._environment = self._environment, None
        if environment is not None and hasattr(environment, "shutdown"):
            _told(environment.shutdown)


def _told(call: Callable[[], Any]) -> Any:
    """Return the result of `call`, which runs user code. If it fails, raise an exception that can be pickled, with the
    attributes `trace` (the traceback as text) and `told` (a sentence that names the place in user code, or None)."""
    try:
        return call_user(call)
    except BaseException as error:
        sentence = in_user_code(error)
        # SystemExit would end the actor
        sent = picklable(error) if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
        sent.told = None if sentence is None else str(sentence)
        sent.trace = "".join(traceback.format_exception(error))
        raise sent from None


@dataclass(frozen=True)
class RemoteMethod:
    """A method of a handle: `.remote(...)` starts the call and returns an ObjectRef or future; a direct call waits."""

    remote: Callable[..., object]
    wait: Callable[[Any], object]

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.wait(self.remote(*args, **kwargs))


@dataclass(eq=False, repr=False)
class RayEnvironment:
    """A handle to an environment in a Ray actor. Only the original handle, not a pickled copy, ends the actor."""

    _cls: type
    _actor: Any
    deadline: float
    _held: bool = False

    def __reduce__(self) -> tuple:
        return RayEnvironment, (self._cls, self._actor, self.deadline)

    def __repr__(self) -> str:
        return f"RayEnvironment({self._cls.__name__})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        value, actor = getattr(self._cls, name), self._actor
        if not callable(value):
            return value
        call = actor.end.remote if name == "shutdown" else lambda *args, **kwargs: actor.call.remote(name, args, kwargs)
        return RemoteMethod(call, partial(get, timeout=self.deadline))

    def close(self, patience: float | None = None) -> None:
        """End the environment and its actor, and Ray if nothing else uses it. Wait at most `patience` seconds (None:
        10) for the environment's processes. Further calls do nothing."""
        if not self._held:
            return
        self._held = False
        ray = ray_in_use()
        try:
            if ray is not None:
                ray.wait([self._actor.end.remote()], timeout=_END_SECONDS if patience is None else patience)
        finally:
            if ray is not None:
                ray.kill(self._actor)
            let_ray_go()


def ray_environment(
    cls: type, args: tuple, kwargs: Mapping[str, object], settings: ActorSettings | None = None,
    options: Mapping[str, Any] | None = None,
) -> RayEnvironment:  # fmt: skip
    """Make an environment in an actor with Ray's `options`, and return a handle. Raise the errors of its constructor,
    and TimeoutError if the actor does not start."""
    settings = ActorSettings.of(ClusterConfig()) if settings is None else settings
    ray = hold_ray(settings.cpus)
    actor = None
    try:
        given = (options or {}).get("runtime_env") or {}
        variables = {**(given.get("env_vars") or {}), **worker_environment(1)}
        # only restarts are limited: if a node dies, Ray retries a call several times before it restarts the actor
        restarts, retries = (settings.restarts, -1) if cls.can_be_asked_again else (0, 0)
        made = {"num_cpus": 0, "max_restarts": restarts, "max_task_retries": retries, **(options or {})}
        made["runtime_env"] = {**given, "env_vars": variables}
        make = ray.cloudpickle.dumps(partial(cls, *args, **kwargs))
        actor = ray.remote(EnvironmentActor).options(**made).remote(make, *surroundings())
        try:
            ray.get(actor.start.remote(), timeout=START_SECONDS)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(
                f"no answer from an actor of {cls.__name__} within {START_SECONDS:.0f} s of its start: its constructor hangs, or it found no "
                "place in the cluster. Look for ray::EnvironmentActor among the processes, or set cluster.executor=processes, which needs no actor"
            ) from None
        return RayEnvironment(cls, actor, settings.deadline, _held=True)
    except BaseException as error:
        if actor is not None:
            ray.kill(actor)
        let_ray_go()
        raise as_raised(error) from None


# ---- in this process


class LocalActor:
    """A handle to an object in this process, used like the handle of a Ray actor. A daemon thread runs the calls in
    order."""

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
        return RemoteMethod(partial(self._submit, value), get) if callable(value) else value

    def __repr__(self) -> str:
        return f"LocalActor({self._instance!r})"

    def _submit(self, method: Callable[..., object], *args: object, **kwargs: object) -> Future:
        future, call = Future(), partial(method, *args, **kwargs)
        if is_users(type(self._instance)):
            call = partial(call_user, call)
        # an object that calls itself must not wait for its own thread
        if threading.current_thread() is self._thread or runs_here():
            future.run(call)
            return future
        with self._lock:
            if self._thread is None:
                # a bound method would keep the actor alive as long as the thread
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
    """A base class that adds `Class.remote(...)` and `Class.options(...).remote(...)`, as Ray's decorator does."""

    @classmethod
    def remote(cls, *args: object, **kwargs: object) -> LocalActor | RayEnvironment:
        """Make an object of this class, in an actor if Ray is in use, otherwise in this process; return a handle."""
        return cls.options().remote(*args, **kwargs)

    @classmethod
    def options(cls, **options: object) -> SimpleNamespace:
        """Return an object with a method `remote` like that of this class, which makes the actor with Ray's
        `options`."""

        def remote(*args: object, **kwargs: object) -> LocalActor | RayEnvironment:
            if ray_in_use() is None:
                return LocalActor(cls(*args, **kwargs))
            return ray_environment(cls, args, kwargs, options=options)

        return SimpleNamespace(remote=remote)


# ---- calls of both kinds


class EnvironmentLostError(WorkerLostError):
    """Raised if an environment's actor does not answer, or has ended and is not restarted."""


def call_remote(handle: object, method: str, *args: object, **kwargs: object) -> object:
    """Call `method` of `handle` and return the result, or a future or ObjectRef of it if the method has `.remote`."""
    function = getattr(handle, method)
    if hasattr(function, "remote"):
        return function.remote(*args, **kwargs)
    return call_any(function, *args, **kwargs)


def answer_of(handle: object, result: object, name: str) -> Any:
    """Wait for a result of `call_remote`. Raise EnvironmentLostError, with `name`, if an actor is lost or misses its
    deadline (`cluster.communication_timeout_s`). Calls in this process have no deadline."""
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
        why = "it is not started again, since what it knew of its conversations is lost (its class does not set can_be_asked_again)"
        if getattr(handle, "can_be_asked_again", False) is True:
            why = "it was started again as often as cluster.environment_restarts allows"
        raise EnvironmentLostError(
            f"the environment {name} ({handle!r}) is lost: {str(error).splitlines()[0]}; {why}"
        ) from None


def shut_down(handle: object, patience: float | None = None) -> None:
    """End an environment, waiting at most `patience` seconds for its answer. If `patience` is None, wait without limit
    for an environment in this process, and 10 seconds for an actor. Raise TimeoutError if it does not answer in time,
    unless it is a `RayEnvironment`, whose actor is killed in any case."""
    if isinstance(handle, RayEnvironment):
        handle.close(patience)
        return
    if hasattr(handle, "shutdown"):
        result = call_remote(handle, "shutdown")
        get(result, patience if isinstance(result, Future) or patience is not None else _END_SECONDS)
