"""What lives in a worker, whoever started it: objects by number, and the calls of their methods."""

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from nemo_rl_cpp.errors import in_user_code

if TYPE_CHECKING:
    from nemo_rl_cpp.distributed.ranks import Ranks


class Answer(NamedTuple):
    """How a call ended: with a value, or with an error, its traceback as text, and the sentence about it where it arose in the
    user's code."""

    value: object = None
    error: BaseException | None = None
    trace: str = ""
    told: str | None = None


class WorkerObjects:
    """The objects of one worker. Arguments come pickled; an exception belongs to the one who asked."""

    def __init__(self) -> None:
        self._objects: dict[int, object] = {}
        self._ranks: Ranks | None = None

    def join(self, threads: int, **meeting: object) -> Answer:
        """Meets the other ranks, see `ranks.connect`; this worker computes on so many threads."""
        return self.answer(lambda: self._join(threads, meeting))

    def call(self, target: int, method: str, payload: bytes, event: str | None = None, tell: Callable | None = None) -> Answer:  # fmt: skip
        """Calls `method` of object `target` with a pickled (args, kwargs); `__create__` makes the object by a builder. `tell` gets
        what the call hands to its argument `event`. What is no method is read."""
        return self.answer(lambda: self._call(target, method, payload, event, tell))

    def _join(self, threads: int, meeting: dict) -> None:
        import torch

        from nemo_rl_cpp.distributed.ranks import connect

        torch.set_num_threads(threads)
        self._ranks = connect(**meeting)

    def _call(self, target: int, method: str, payload: bytes, event: str | None, tell: Callable | None) -> object:
        args, kwargs = pickle.loads(payload)
        if method == "__create__":
            self._objects[target] = args[0](self._ranks)
            return None
        if event is not None:
            kwargs[event] = tell
        found = getattr(self._objects[target], method)
        return found(*args, **kwargs) if callable(found) else found

    @staticmethod
    def answer(make: Callable[[], object]) -> Answer:
        """Calls `make`; what it raises is part of the answer."""
        try:
            return Answer(make())
        except BaseException as error:
            told = in_user_code(error)  # the place in the user's code is known here alone
            trace = "".join(traceback.format_exception(error))
            return Answer(None, picklable(error), trace, None if told is None else str(told))


def worker_environment(threads: int) -> dict[str, str]:
    """Environment variables of a worker: it finds the modules that this process finds, and computes on so many threads."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}


def picklable(error: BaseException) -> BaseException:
    """The exception, or its text alone where it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")  # its text alone
