"""The engine's thread, and what a request asks of it: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from nemo_rl_cpp._native import C

STOP_TOKEN, STOP_STRING, LENGTH = 1, 2, 3
"""Why a sequence ended, as csrc/generation/sequence.h numbers it; 0: it goes on."""
FINISH_REASONS = {STOP_TOKEN: "stop", STOP_STRING: "stop", LENGTH: "length"}
"""The same in OpenAI's words."""


class ServingError(RuntimeError):
    """A request that gets no answer: the server's state is the reason, not the request."""


Likeliest = tuple[tuple[int, float], ...]
"""The likeliest tokens at a place, with their log-probabilities, likeliest first."""


@dataclass(frozen=True)
class Sampling:
    """How a request is sampled and where it stops. Greedy: the likeliest token each time.

    `num_likeliest`: tokens that are told beside each sampled one.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    num_likeliest: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True)
class Draw:
    """The key of a request's random draws: what it samples follows from this, its prompt and its sampling alone.

    `number`: of the rollout's requests with this prompt, from which `draw_id` was made.
    """

    seed: int
    stream: int = 2  # "eval", csrc/common/random.h
    draw_id: int = 0
    first_sample: int = 0
    number: int = 0


@dataclass
class Sample:
    """The tokens that one answer to a request has so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: int = 0
    likeliest: list[Likeliest] = field(default_factory=list)

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's word; None while it goes on."""
        return FINISH_REASONS.get(self.reason)


@dataclass(frozen=True)
class Progress:
    """What a request's owner is told: the new tokens of one of its answers, or that all of them have failed.

    Attributes:
        sample: which of the answers.
        reason: 0 while it goes on.
        error: why there is no answer; the other fields then say nothing.
    """

    sample: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    reason: int = 0
    error: Exception | None = None
    likeliest: tuple[Likeliest, ...] = ()

    def part(self) -> Sample:
        return Sample(list(self.token_ids), list(self.logprobs), self.reason, list(self.likeliest))


@dataclass(eq=False)
class PendingRequest:
    """A request on its way through the engine.

    Attributes:
        samples: answers to the one prompt, whose computation they share.
        tell: is called from the engine's thread, after each step with `every_token`, else once an answer is complete.
        version: of the weights that answer; None before it has begun.
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
    left: int = 0  # samples that go on


@dataclass(frozen=True)
class EngineState:
    """What the engine is at: requests that wait for it and that run, blocks of its cache, tokens since the start."""

    waiting: int
    running: int
    used_blocks: int
    num_blocks: int
    generated_tokens: int
    is_open: bool
    version: int


class EngineThread:
    """Steps a `C.ResidentEngine` while it is open and has work.

    Closed, it answers nothing and its cache is given back; requests wait. What runs when it is closed ends first, so each answer
    comes from one version of the weights.

    Args:
        make_engine: makes the engine, in its thread, when it is first needed.
        version: of the weights, until `open` says another.
        is_open: whether it begins open.
    """

    step_seconds = 600.0
    """Longest time that a step may take."""

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

    def submit(self, *tickets: PendingRequest) -> None:
        """Lets requests join the batch at the next step, together, so that one version of the weights answers them. Their owners are told
        what comes of them, mistakes in them included (ValueError)."""
        with self._changed:
            if self._ends:
                raise ServingError("the server is ending")
            self._new.extend(tickets)
            self._changed.notify_all()

    def cancel(self, ticket: PendingRequest) -> None:
        """Takes a request out, whose owner is told nothing more; its blocks are free after the present step."""
        with self._changed:
            if ticket in self._new:
                self._new.remove(ticket)
            else:
                self._leaving.append(ticket)
            self._changed.notify_all()

    def open(self, version: int) -> None:
        """The weights are in place, and of this version: requests are answered."""
        with self._changed:
            self._version, self._open = version, True
            self._changed.notify_all()

    def close(self, patience: float) -> None:
        """Waits until nothing runs, at most `patience` seconds; what still runs then fails. New requests wait from now on."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
            if not self._changed.wait_for(self._is_idle, patience):
                self._drop_running = ServingError(
                    "the weights changed before the answer was complete, and the time for that is over: ask again"
                )
                self._changed.notify_all()
                self._wait_for_the_step()
            if self._engine is not None:
                self._engine.release_cache()

    def _wait_for_the_step(self) -> None:
        """Until nothing runs. RuntimeError where the thread has died, or its step does not end."""
        end = time.monotonic() + self.step_seconds
        while not self._changed.wait_for(self._is_idle, min(1.0, self.step_seconds)):
            if not self._thread.is_alive() or time.monotonic() > end:
                why = "made no step within " + f"{self.step_seconds:g} s" if self._thread.is_alive() else "has ended"
                raise RuntimeError(f"the server's engine {why}: its requests cannot be ended before the weights change")

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """The engine makes no step meanwhile: another one computes with the same model."""
        with self._weights:
            yield

    def shut_down(self, patience: float = 10.0) -> None:
        """Ends the thread; requests that it has fail. Safe to call twice."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._thread.join(patience)

    @property
    def state(self) -> EngineState:
        with self._changed:
            engine = self._engine
            used, total, tokens = (
                (0, 0, 0) if engine is None else (engine.used_blocks, engine.num_blocks, engine.generated_tokens)
            )
            return EngineState(
                len(self._new),
                len(set(map(id, self._running.values()))),
                used,
                total,
                tokens,
                self._open,
                self._version,
            )

    # ---- in the engine's thread

    def _is_idle(self) -> bool:
        return not self._running

    def _has_something(self) -> bool:
        runs = bool(self._running)
        return (
            self._ends
            or bool(self._leaving)
            or self._drop_running is not None
            or runs
            or (self._open and bool(self._new))
        )

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_something)
                if self._ends:
                    break
                self._take_out()
                if self._open and self._new:
                    self._take_in()
                self._changed.notify_all()
            if self._running:
                self._step()
        with self._changed:
            self._fail([*self._new, *self._distinct()], ServingError("the server is ending"))
            self._new.clear()
            self._changed.notify_all()

    def _distinct(self) -> list[PendingRequest]:
        return list({id(ticket): ticket for ticket in self._running.values()}.values())

    def _take_out(self) -> None:
        for ticket in self._leaving:
            self._forget(ticket)
        self._leaving.clear()
        if self._drop_running is not None:
            self._fail(self._distinct(), self._drop_running)
            self._drop_running = None

    def _forget(self, ticket: PendingRequest) -> None:
        for number in range(ticket.first, ticket.first + ticket.samples):
            if self._running.get(number) is ticket:
                self._engine.cancel(number)
                del self._running[number]

    def _take_in(self) -> None:
        while self._new:
            ticket = self._new.popleft()
            s, d = ticket.sampling, ticket.draw
            try:
                if self._engine is None:
                    self._engine = self._make_engine()
                rule = C.SamplingRule(
                    temperature=1.0 if s.greedy else s.temperature, top_p=s.top_p, top_k=s.top_k, greedy=s.greedy
                )
                ticket.first = self._engine.submit(
                    ticket.prompt_ids, rule=rule, max_new_tokens=s.max_new_tokens, stop_token_ids=list(s.stop_token_ids),
                    stop_strings=[text.encode() for text in s.stop_strings], samples=ticket.samples, seed=d.seed, stream=d.stream,
                    draw_id=d.draw_id, first_sample=d.first_sample, num_likeliest=s.num_likeliest,
                )  # fmt: skip
            except Exception as error:  # noqa: BLE001 - the owner's to report
                ticket.tell(Progress(error=error))
                continue
            ticket.version, ticket.left = self._version, ticket.samples
            ticket.answers = [Sample() for _ in range(ticket.samples)]
            self._running |= {ticket.first + k: ticket for k in range(ticket.samples)}

    def _step(self) -> None:
        try:
            with self._weights:
                drawn = self._engine.step()
        except Exception as error:  # noqa: BLE001 - the engine has given all its sequences up
            failed = ServingError(f"the engine failed: {error}")
            with self._changed:
                self._fail(self._distinct(), failed)
                self._changed.notify_all()
            return
        for number, token, logprob, reason, likeliest in zip(*drawn):
            ticket = self._running.get(number)
            if ticket is None:
                continue
            k = number - ticket.first
            answer = ticket.answers[k]
            answer.token_ids.append(token)
            answer.logprobs.append(logprob)
            answer.likeliest.append(likeliest)
            answer.reason = reason
            if ticket.every_token:
                ticket.tell(Progress(k, (token,), (logprob,), reason, likeliest=(likeliest,)))
            elif reason:
                told = (tuple(answer.token_ids), tuple(answer.logprobs), reason)
                ticket.tell(Progress(k, *told, likeliest=tuple(answer.likeliest)))
            if reason:
                ticket.left -= 1
                with self._changed:
                    self._running.pop(number, None)
                    self._changed.notify_all()

    def _fail(self, tickets: list[PendingRequest], error: Exception) -> None:
        for ticket in tickets:
            self._forget(ticket)
            ticket.tell(Progress(error=error))


def longest_in_cache(runner: C.ModelRunner, cache_bytes: int) -> int:
    """Tokens of the longest sequence whose keys and values a cache of that size holds; below 2 it can answer nothing.

    The engine counts ceil(length / block) blocks, and one more where a copied prompt ends within a block.
    """
    blocks = cache_bytes // max(runner.bytes_per_block(), 1)
    return max((blocks - 1) * runner.block_size() + 1, 0)


def engine_maker(
    runner: C.ModelRunner, *, max_batch_size: int, prefill_chunk_tokens: int, max_model_len: int, cache_bytes: int,
    token_bytes: Callable[[], list[bytes]],
) -> Callable[[], C.ResidentEngine]:  # fmt: skip
    """Makes the engine of an `EngineThread`; `token_bytes` gives the bytes on which stop strings are matched."""
    return lambda: C.ResidentEngine(
        runner, max_batch_size=max_batch_size, prefill_chunk_tokens=prefill_chunk_tokens, max_model_len=max_model_len,
        max_cache_bytes=cache_bytes, token_bytes=token_bytes(),
    )  # fmt: skip
