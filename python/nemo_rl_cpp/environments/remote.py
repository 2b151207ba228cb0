"""`Class.remote(...)`: an object whose methods can also be called as `method.remote(...)`.

Where this program has started or joined Ray, the object lives in Ray actors (`ray_environment.py`), and `ray.get` waits for a
result. Else it lives in this process: the calls of one object run one after another, as an actor's do. Those of the user's class
run where the user's code runs (`user_code.py`). An environment of this package has a thread, so that several work at the same
time. `nemo_rl_cpp.distributed.get` waits for either.
"""

import queue
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from nemo_rl_cpp.distributed.futures import Future, get
from nemo_rl_cpp.distributed.ray_workers import ray_in_use
from nemo_rl_cpp.distributed.worker_calls import WorkerLostError
from nemo_rl_cpp.environments.ray_environment import RayEnvironment, ray_environment
from nemo_rl_cpp.user_code import call_any, call_user, is_users, runs_here

DEADLINE_S = 1800.0  # of an answer of an actor that somebody else has made
_END_SECONDS = 10.0  # for an environment to end its own processes


class RemoteMethod:
    """A method of a `LocalActor`: call it, or start it with `.remote(...)`."""

    def __init__(self, actor: "LocalActor", method: Callable[..., object]) -> None:
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
    def remote(cls, *args: object, **kwargs: object) -> "LocalActor | RayEnvironment":
        """Constructs an object behind a handle whose methods have `.remote(...)`: in Ray actors where Ray is in use, else here."""
        return _Options(cls, {}).remote(*args, **kwargs)

    @classmethod
    def options(cls, **options: object) -> "_Options":
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

    def remote(self, *args: object, **kwargs: object) -> "LocalActor | RayEnvironment":
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
