"""Run user code in the thread that started the run, on one event loop that lives as long as the thread.

A reward function, an environment, an agent, a loss, an estimator, a callback or a data processor runs as in a script:
signals work (`signal.alarm`, math-verify's time limits), and a client, lock or semaphore created once works at every
step. To allow this, `serve` moves the training loop to another thread. The thread that started the run (a program's
main thread) makes the calls that the training loop requests with `call_user`: functions one after the other,
coroutines concurrently. After each call `_ProcessState` restores the process, so that user code changes neither the
run's results nor where its files are written."""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import inspect
import os
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

from nemo_rl_cpp.interrupts import GRACE_SECONDS, Ended, restore_signal_handlers

_CANCEL_SECONDS = 1.0  # time for coroutines of an interrupted run to end


def call_user(function: Callable[..., object], /, *args: object, **kwargs: object) -> Any:
    """Call the user's `function` in the thread that started the run, and return its result, awaited if necessary.

    Raise what the function raises. Outside a run (see `serve`) the current thread makes the call."""
    return begin_user(function, *args, **kwargs)()


def begin_user(function: Callable[..., object], /, *args: object, **kwargs: object) -> Callable[[], Any]:
    """Begin a call like that of `call_user`, and return a function that waits for its result. The coroutines of calls
    that have begun run concurrently. Outside a run, the call is made by the returned function."""
    call = partial(function, *args, **kwargs)
    serving = _serving[-1] if _serving else None
    if serving is None or serving.is_here:
        return partial(_caller().run, call)
    return serving.ask(call)


def call_any(function: Callable[..., object], /, *args: object, **kwargs: object) -> Any:
    """Call a function or method: with `call_user` if it is user code, directly if it belongs to this package."""
    if is_users(getattr(function, "__self__", function)):
        return call_user(function, *args, **kwargs)
    return function(*args, **kwargs)


def is_users(thing: object) -> bool:
    """Return whether `thing` is user code: a function, or an instance of a class, defined outside this package."""
    module = getattr(thing, "__module__", None) or type(thing).__module__
    return module.partition(".")[0] != __name__.partition(".")[0]


def runs_here() -> bool:
    """Return whether the current thread is the one that calls user code."""
    return bool(_serving) and _serving[-1].is_here


def serve(work: Callable[[], object]) -> Any:
    """Run `work()` in a new thread and return its result, while the current thread makes the calls that it requests
    with `call_user`. Calls may be nested. Raise what `work` raises. KeyboardInterrupt or SystemExit of a signal ends
    `work`, too."""
    return _caller().serve(work)


class _Caller:
    """A thread that calls user code, and its event loop for the user's async functions."""

    def __init__(self) -> None:
        self._thread = threading.current_thread()
        self._calls: deque[tuple[Future, Callable[[], object]]] = deque()
        self._tasks: set[asyncio.Task] = set()
        self._loop = asyncio.new_event_loop()
        self._waits = False  # whether the thread waits in `run_forever` for the next call
        self._lock = threading.Lock()  # guards `_depth` and `_ended`: a call comes before the end or after it
        self._depth = 0  # nesting depth of `serve`
        self._ended = False  # set by a signal

    @property
    def is_here(self) -> bool:
        return threading.current_thread() is self._thread

    def run(self, call: Callable[[], object]) -> object:
        """Make the call `call` in the current thread, and return its result, awaited if necessary."""
        with _outside_event_loop(), _ProcessState():
            result = self._called(call)
            return self._loop.run_until_complete(result) if inspect.isawaitable(result) else result

    def ask(self, call: Callable[[], object]) -> Callable[[], object]:
        """Let the thread of this `_Caller` make the call `call`. Return a function that waits for the result."""
        torch = sys.modules.get("torch")
        if torch is not None and hasattr(torch, "is_grad_enabled"):
            # torch keeps the gradient mode per thread, and a loss, for instance, needs gradients
            call = torch.set_grad_enabled(torch.is_grad_enabled())(call)
        future = Future()
        with self._lock:
            if self._ended:
                raise KeyboardInterrupt
            if serves := self._depth > 0:  # otherwise the run has ended in the meantime
                self._calls.append((future, call))
        if not serves:
            return partial(_caller().run, call)
        self._wake()
        return future.result

    def serve(self, work: Callable[[], object]) -> object:
        done = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
                done.set_exception(error)
            self._wake()

        # the new thread sees the caller's context variables, as a direct call would
        thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name="run", daemon=True)
        state = _ProcessState()
        with self._lock:
            self._ended = False
            self._depth += 1
        _serving.append(self)
        try:
            with _outside_event_loop():
                thread.start()
                self._make_calls(done, state)
        except BaseException:
            self._end(thread)
            raise
        finally:
            _serving.remove(self)
        return done.result()

    def _make_calls(self, done: Future, state: _ProcessState) -> None:
        """Make the requested calls until `done` is set and no thread waits for a call already started. The event loop
        does not run during a function call, because the function may run its own."""
        while True:
            with self._lock:
                if not self._calls and done.done() and (self._depth > 1 or not self._tasks):
                    self._depth -= 1
                    return
            if self._calls:
                self._begin(*self._calls.popleft(), state)
            else:
                self._wait()

    def _wait(self) -> None:
        """Run the event loop until `_stop_waiting` is called, but at most a second: a signal that arrives just before
        the selector blocks is handled only at the next event."""
        beat = self._loop.call_later(1.0, self._loop.stop)
        self._waits = True
        try:
            self._loop.run_forever()
        except SystemExit as error:  # `sys.exit` in a coroutine: raised in its caller
            if isinstance(error, Ended):
                raise
        finally:
            self._waits = False
            beat.cancel()

    def _begin(self, future: Future, call: Callable[[], object], state: _ProcessState) -> None:
        try:
            with state:
                result = self._called(call)
        except BaseException as error:
            future.set_exception(error)
            if isinstance(error, (KeyboardInterrupt, Ended)):
                raise
            return
        if not inspect.isawaitable(result):
            future.set_result(result)
            return
        task = self._loop.create_task(_finish(result, future, state))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda task: self._stop_waiting())

    def _called(self, call: Callable[[], object]) -> object:
        if self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)  # asyncio.run in user code leaves the thread without a loop
        return call()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # user code has closed the loop; once it returns, calls are handled
            self._loop.call_soon_threadsafe(self._stop_waiting)

    def _stop_waiting(self) -> None:
        if self._waits:  # otherwise user code runs the loop
            self._loop.stop()

    def _end(self, thread: threading.Thread) -> None:
        """End the thread of the training loop and the pending coroutines after a signal."""
        with self._lock:
            self._ended = True
            self._depth -= 1
        ident, error = ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, error)
        while self._calls:
            self._calls.popleft()[0].set_exception(KeyboardInterrupt())
        for task in self._tasks:
            task.cancel()
        if self._tasks and not self._loop.is_running():
            with _outside_event_loop():
                self._loop.run_until_complete(asyncio.wait(set(self._tasks), timeout=_CANCEL_SECONDS))
        thread.join(GRACE_SECONDS)


_serving: list[_Caller] = []  # nested callers, innermost last
_of_thread = threading.local()


def _caller() -> _Caller:
    """Return the current thread's `_Caller`, which runs the user's functions. Its event loop lives as long as the
    thread, so an async client that the user's code opens in one run works in the next, too."""
    if not hasattr(_of_thread, "caller"):
        _of_thread.caller = _Caller()
    return _of_thread.caller


async def _finish(result: Awaitable[object], future: Future, state: _ProcessState) -> None:
    try:
        with state:
            value = await result
    except BaseException as error:
        future.set_exception(error)
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
    else:
        future.set_result(value)


@contextmanager
def _outside_event_loop() -> Iterator[None]:
    """A context manager in which the current thread may run another event loop; the one that is running, such as a
    notebook's, waits until the end of the `with` block."""
    running = asyncio._get_running_loop()
    if running is None:
        yield
        return
    task = asyncio.current_task(running)
    if task is not None:
        asyncio.tasks._leave_task(running, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(running)
        asyncio.set_event_loop(running)
        if task is not None:
            asyncio.tasks._enter_task(running, task)


class _ProcessState(AbstractContextManager):
    """The process state that user code may change, recorded at construction and restored on exit.

    It covers the working directory, the handlers of the signals that end a run, and torch's default dtype and device,
    gradient mode, thread count, deterministic mode and precision of float32 matrix products. Random generators are not
    restored, because all sampling in a run uses separate generators. Neither are environment variables, which user code
    sets once for its later calls, and which the package reads when a run starts."""

    def __init__(self) -> None:
        self._folder, self._torch = _folder(), _torch_state()

    def __exit__(self, *exc: object) -> None:
        if self._folder is not None and _folder() != self._folder:
            with suppress(OSError):  # the folder was deleted
                os.chdir(self._folder)
        now = _torch_state()
        for names, value in self._torch.items():
            if now.get(names) != value:
                getattr(sys.modules["torch"], names[1])(value)
        restore_signal_handlers()


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None


_TORCH_STATE = (  # getter and setter functions
    ("get_default_dtype", "set_default_dtype"),
    ("is_grad_enabled", "set_grad_enabled"),
    ("get_num_threads", "set_num_threads"),
    ("get_default_device", "set_default_device"),
    ("are_deterministic_algorithms_enabled", "use_deterministic_algorithms"),
    ("get_float32_matmul_precision", "set_float32_matmul_precision"),
)


def _torch_state() -> dict[tuple[str, str], Any]:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_device"):  # not loaded, or being loaded
        return {}
    return {names: getattr(torch, names[0])() for names in _TORCH_STATE}
