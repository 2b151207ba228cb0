"""The thread that steps the engine: requests of token ids in, token ids and log-probabilities out."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from nemo_rl_cpp._native import C

STOP_TOKEN, STOP_STRING, LENGTH = 1, 2, 3
"""Why a sequence ended, as csrc/generation/sequence.h numbers it; 0: it has not ended."""
FINISH_REASONS = {STOP_TOKEN: "stop", STOP_STRING: "stop", LENGTH: "length"}
"""The same in OpenAI's words."""
Likeliest = tuple[tuple[int, float], ...]
"""The likeliest tokens at a place, with their log-probabilities, likeliest first."""


class ServingError(RuntimeError):
    """A request fails because of the server's state, not because of the request."""


@dataclass(frozen=True)
class Sampling:
    """How a request is sampled and where it stops. Temperature 0 is greedy.

    `num_likeliest`: likeliest tokens that are returned with each sampled one.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    num_likeliest: int = 0


@dataclass(frozen=True)
class Draw:
    """The key of a request's random draws: its samples follow from this, its prompt and its sampling alone.

    `number`: of the rollout's requests with this prompt, from which `draw_id` was made.
    """

    seed: int
    stream: int = 2  # "eval", csrc/common/random.h
    draw_id: int = 0
    number: int = 0


@dataclass
class Sample:
    """Tokens of one answer to a request: all of them so far, or the new ones. `reason` is 0 while the answer is incomplete."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: int = 0
    likeliest: list[Likeliest] = field(default_factory=list)

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's word; None while the answer is incomplete."""
        return FINISH_REASONS.get(self.reason)

    def extend(self, part: Sample) -> None:
        """Append the next tokens."""
        self.token_ids += part.token_ids
        self.logprobs += part.logprobs
        self.likeliest += part.likeliest
        self.reason = part.reason


class Progress(NamedTuple):
    """The new tokens of answer number `sample` of a request, or the error by which all of its answers failed."""

    sample: int = 0
    part: Sample | None = None
    error: Exception | None = None


@dataclass(eq=False)
class PendingRequest:
    """A request on its way through the engine.

    Attributes:
        samples: answers to the one prompt, whose computation they share.
        tell: is called from the engine's thread, after each step with `every_token`, else once an answer is complete.
        version: of the weights that answer; None before the request has begun.
    """

    prompt_ids: list[int]
    sampling: Sampling
    draw: Draw
    tell: Callable[[Progress], None]
    samples: int = 1
    every_token: bool = False
    version: int | None = None
    answers: list[Sample] = field(default_factory=list)
    first: int = -1  # the engine's number of the first sample


@dataclass(frozen=True)
class EngineState:
    """Requests that wait for the engine and that run, blocks of its cache, and tokens since the start."""

    waiting: int
    running: int
    used_blocks: int
    num_blocks: int
    generated_tokens: int
    is_open: bool
    version: int


class EngineThread:
    """Steps a `C.ResidentEngine` while it is open and has work.

    Closed, it answers nothing and gives its cache back; requests wait. Requests that run when it is closed end first, so each
    answer comes from one version of the weights.

    Args:
        make_engine: makes the engine, in its thread, when it is first needed.
        version: of the weights, until `open` sets another.
        is_open: whether it begins open.
    """

    step_seconds = 600.0
    """The longest time that a step may take."""

    def __init__(self, make_engine: Callable[[], C.ResidentEngine], version: int = 0, is_open: bool = True) -> None:
        self._make_engine = make_engine
        self._engine: C.ResidentEngine | None = None
        self._changed = threading.Condition()
        self._weights = threading.Lock()
        self._new: deque[PendingRequest] = deque()
        self._leaving: list[PendingRequest] = []
        self._running: dict[int, PendingRequest] = {}
        self._version, self._open, self._ends = version, is_open, False
        self._drop_running: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    # ---- from any thread

    def submit(self, *requests: PendingRequest) -> None:
        """Let requests join the batch at the next step, together, so that one version of the weights answers them. Mistakes in
        them reach their `tell` (ValueError)."""
        with self._changed:
            if self._ends:
                raise ServingError("the server is ending")
            self._new.extend(requests)
            self._changed.notify_all()

    def cancel(self, request: PendingRequest) -> None:
        """Drop a request, whose `tell` is not called any more; its blocks are free after the present step."""
        with self._changed:
            if request in self._new:
                self._new.remove(request)
            else:
                self._leaving.append(request)
            self._changed.notify_all()

    def open(self, version: int) -> None:
        """Answer requests from now on, with weights of this version."""
        with self._changed:
            self._version, self._open = version, True
            self._changed.notify_all()

    def close(self, patience: float) -> None:
        """Wait until nothing runs, at most `patience` seconds; then let the rest fail. New requests wait from now on.

        RuntimeError if the thread has died, or its step does not end.
        """
        with self._changed:
            self._open = False
            self._changed.notify_all()
            if not self._changed.wait_for(self._is_idle, patience):
                self._drop_running = ServingError(
                    "the weights changed before the answer was complete, and the time for that is over: ask again"
                )
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_idle() or not self.is_alive, self.step_seconds)
            if not self._is_idle():
                why = f"made no step within {self.step_seconds:g} s" if self.is_alive else "has ended"
                raise RuntimeError(f"the server's engine {why}: its requests cannot be ended before the weights change")
            if self._engine is not None:
                self._engine.release_cache()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Make no step inside: another engine computes with the same model."""
        with self._weights:
            yield

    def shut_down(self, patience: float = 10.0) -> None:
        """End the thread; its requests fail. Safe to call twice."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._thread.join(patience)

    @property
    def state(self) -> EngineState:
        with self._changed:
            e = self._engine
            numbers = (0, 0, 0) if e is None else (e.used_blocks, e.num_blocks, e.generated_tokens)
            return EngineState(len(self._new), len(self._distinct()), *numbers, self._open, self._version)

    # ---- in the engine's thread

    def _is_idle(self) -> bool:
        return not self._running

    def _has_work(self) -> bool:
        return bool(self._ends or self._leaving or self._drop_running or self._running or (self._open and self._new))

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                if self._ends:
                    break
                self._take_out()
                while self._open and self._new:
                    self._take_in(self._new.popleft())
                self._changed.notify_all()
            if self._running:
                self._step()
        with self._changed:
            self._fail([*self._new, *self._distinct()], ServingError("the server is ending"))
            self._new.clear()
            self._changed.notify_all()

    def _distinct(self) -> list[PendingRequest]:
        return list(dict.fromkeys(self._running.values()))

    def _take_out(self) -> None:
        for request in self._leaving:
            self._forget(request)
        self._leaving.clear()
        if self._drop_running is not None:
            self._fail(self._distinct(), self._drop_running)
            self._drop_running = None

    def _forget(self, request: PendingRequest) -> None:
        for number in range(request.first, request.first + request.samples):
            if self._running.get(number) is request:
                self._engine.cancel(number)
                del self._running[number]

    def _take_in(self, request: PendingRequest) -> None:
        s, d = request.sampling, request.draw
        greedy = s.temperature == 0
        try:
            if self._engine is None:
                self._engine = self._make_engine()
            rule = C.SamplingRule(
                temperature=1.0 if greedy else s.temperature, top_p=s.top_p, top_k=s.top_k, greedy=greedy
            )
            request.first = self._engine.submit(
                request.prompt_ids, rule=rule, max_new_tokens=s.max_new_tokens, stop_token_ids=list(s.stop_token_ids),
                stop_strings=[text.encode() for text in s.stop_strings], samples=request.samples, seed=d.seed, stream=d.stream,
                draw_id=d.draw_id, first_sample=0, num_likeliest=s.num_likeliest,
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001 - reported to the one who asked
            request.tell(Progress(error=error))
            return
        request.version = self._version
        request.answers = [Sample() for _ in range(request.samples)]
        self._running |= {request.first + k: request for k in range(request.samples)}

    def _step(self) -> None:
        try:
            with self._weights:
                drawn = self._engine.step()
        except Exception as error:  # noqa: BLE001 - the engine has given all its sequences up
            with self._changed:
                self._fail(self._distinct(), ServingError(f"the engine failed: {error}"))
                self._changed.notify_all()
            return
        for number, token, logprob, reason, likeliest in zip(*drawn):
            request = self._running.get(number)
            if request is None:
                continue
            k, new = number - request.first, Sample([token], [logprob], reason, [likeliest])
            request.answers[k].extend(new)
            if request.every_token or reason:
                request.tell(Progress(k, new if request.every_token else request.answers[k]))
            if reason:
                with self._changed:
                    self._running.pop(number, None)
                    self._changed.notify_all()

    def _fail(self, requests: list[PendingRequest], error: Exception) -> None:
        for request in requests:
            self._forget(request)
            request.tell(Progress(error=error))


def longest_in_cache(runner: C.ModelRunner, cache_bytes: int) -> int:
    """Return the tokens of the longest sequence whose keys and values a cache of that size holds; below 2 it can answer nothing.

    The engine counts ceil(length / block) blocks, and one more where a copied prompt ends within a block.
    """
    blocks = cache_bytes // max(runner.bytes_per_block(), 1)
    return max((blocks - 1) * runner.block_size() + 1, 0)
