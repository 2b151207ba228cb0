"""`Class.remote(...)` without Ray: an object whose methods can also be called as `method.remote(...)`.

The calls of one object run one after another on a thread of its own, as an actor's do, so that several environments
work at the same time. `nemo_rl_cpp.distributed.get` waits for a result.
"""

import queue
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from nemo_rl_cpp.distributed.futures import Future


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
        if threading.current_thread() is self._thread:  # an object that calls itself must not wait for itself
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
    def remote(cls, *args: object, **kwargs: object) -> LocalActor:
        """Constructs an object behind a handle whose methods have `.remote(...)`."""
        return LocalActor(cls(*args, **kwargs))

    @classmethod
    def options(cls, **options: object) -> type:
        """The class itself. Ray's scheduling options place an actor on a cluster; here there is one process.

        Raises ValueError for an option that asks for GPUs, which this process cannot set aside.
        """
        if options.get("num_gpus"):
            raise ValueError(
                f"{cls.__name__}.options(num_gpus={options['num_gpus']}): environments run without GPUs here"
            )
        return cls


def call_remote(handle: object, method: str, *args: object, **kwargs: object) -> object:
    """Starts `handle.method(...)`: a future where the method has `.remote`, else the value itself."""
    function = getattr(handle, method)
    return getattr(function, "remote", function)(*args, **kwargs)
