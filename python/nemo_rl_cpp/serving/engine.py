"""The thread that runs the engine. It takes requests as token ids and returns token ids and log-probabilities."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_rl_cpp._native import C
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch
from nemo_rl_cpp.models.policy.micro_batches import RowBatch, wanted_tokens

STOP_TOKEN, STOP_STRING, LENGTH = 1, 2, 3
"""The reasons for which a sequence ended, by their numbers in csrc/generation/sequence.h; 0: it has not ended."""
FINISH_REASONS = {STOP_TOKEN: "stop", STOP_STRING: "stop", LENGTH: "length"}  # OpenAI's names of these reasons
Likeliest = tuple[tuple[int, float], ...]
"""The likeliest tokens at a position with their log-probabilities, in descending order."""


class ServingError(RuntimeError):
    """Raised if a request fails because of the state of the server, not because the request is invalid."""


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of a request, and the conditions that end its response. Temperature 0 is greedy. For each
    sampled token, the `num_likeliest` most likely tokens at its position are returned, too."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    num_likeliest: int = 0


@dataclass(frozen=True)
class Draw:
    """The seed of a request's sampling. A response depends only on this seed, the prompt and the sampling parameters.
    `number` is the request's index among the requests of its rollout with the same prompt; `draw_id` was computed from
    `number`."""

    seed: int
    stream: int = 2  # "eval", csrc/common/random.h
    draw_id: int = 0
    number: int = 0


@dataclass
class Sample:
    """Tokens of one response with their log-probabilities: all so far, or only the new ones. `reason` is why the
    response ended, a key of `FINISH_REASONS`, or 0. `likeliest` has the most likely tokens at each position."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: int = 0
    likeliest: list[Likeliest] = field(default_factory=list)

    @property
    def finish_reason(self) -> str | None:
        """The finish reason in OpenAI's terms, or None while the response is incomplete."""
        return FINISH_REASONS.get(self.reason)

    def extend(self, part: Sample) -> None:
        """Append the next tokens, `part`, of the same response."""
        self.token_ids += part.token_ids
        self.logprobs += part.logprobs
        self.likeliest += part.likeliest
        self.reason = part.reason


class Progress(NamedTuple):
    """New tokens (`part`) of the response with the index `sample` in a request, or the error with which the whole
    request failed."""

    sample: int = 0
    part: Sample | None = None
    error: Exception | None = None


@dataclass(eq=False)
class PendingRequest:
    """A request that the engine has not finished."""

    prompt_ids: list[int]
    sampling: Sampling
    draw: Draw
    # callback, called in the engine's thread: after every step if `every_token`, otherwise once per complete response
    tell: Callable[[Progress], None]
    samples: int = 1  # the number of responses to the prompt; they share its prefill
    every_token: bool = False
    version: int | None = None  # the version of the weights that generate the responses; None until the request starts
    answers: list[Sample] = field(default_factory=list)
    first: int = -1  # the number that the engine gave the first sample


@dataclass(frozen=True)
class EngineState:
    """An engine's numbers of waiting and running requests and of KV-cache blocks, tokens generated since the start,
    whether it is open, and the version of its weights."""

    waiting: int
    running: int
    used_blocks: int
    num_blocks: int
    generated_tokens: int
    is_open: bool
    version: int


class EngineThread:
    """A thread that generates the responses to requests with an engine, which `make_engine` returns. While it is
    closed, new requests wait for `open`. `close` first lets running requests finish, so that one version of the weights
    generates each response, and then frees the KV cache."""

    step_seconds = 600.0  # the longest time that a step may take

    def __init__(self, make_engine: Callable[[], C.ResidentEngine], version: int = 0, is_open: bool = True) -> None:
        self._make_engine = make_engine
        self._engine: C.ResidentEngine | None = None
        self._changed = threading.Condition()
        self.model_lock = threading.Lock()  # held by what computes with the model: a step, or another engine
        self._new: deque[PendingRequest] = deque()
        self._leaving: list[PendingRequest] = []
        self._running: dict[int, PendingRequest] = {}
        self._version, self._open, self._ends = version, is_open, False
        self._drop_running: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self.is_alive = self._thread.is_alive
        self._thread.start()

    # ---- from any thread

    def submit(self, *requests: PendingRequest) -> None:
        """Add requests to the batch at the next step, together, so that one version of the weights answers them. The
        callback `tell` of an invalid request receives a ValueError. Raise ServingError if the server is shutting
        down."""
        with self._changed:
            if self._ends:
                raise ServingError("the server is ending")
            self._new.extend(requests)
            self._changed.notify_all()

    def cancel(self, request: PendingRequest) -> None:
        """Drop a request: `tell` is no longer called, and its KV-cache blocks are freed after the current step."""
        with self._changed:
            if request in self._new:
                self._new.remove(request)
            else:
                self._leaving.append(request)
            self._changed.notify_all()

    def open(self, version: int) -> None:
        """Start answering requests with the current weights, whose version is `version`."""
        with self._changed:
            self._version, self._open = version, True
            self._changed.notify_all()

    def close(self, patience: float) -> None:
        """Wait at most `patience` seconds for running requests, then fail those that remain. New requests wait until
        `open`. Raise RuntimeError if the thread has died, or if its current step does not end."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: not self._running, patience):
                self._drop_running = ServingError(
                    "the weights changed before the answer was complete, and the time for that is over: ask again"
                )
                self._changed.notify_all()
                self._changed.wait_for(lambda: not (self._running and self.is_alive()), self.step_seconds)
            if self._running:
                why = f"made no step within {self.step_seconds:g} s" if self.is_alive() else "has ended"
                raise RuntimeError(f"the server's engine {why}: its requests cannot be ended before the weights change")
            if self._engine is not None:
                self._engine.release_cache()

    def shut_down(self, patience: float = 10.0) -> None:
        """End the thread, wait at most `patience` seconds for it, and fail its requests. Further calls do nothing."""
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

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._ends or self._leaving or self._drop_running or self._running or (self._open and self._new)
                    )
                )
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
            temperature = 1.0 if greedy else s.temperature
            rule = C.SamplingRule(temperature=temperature, top_p=s.top_p, top_k=s.top_k, greedy=greedy)
            request.first = self._engine.submit(
                request.prompt_ids, rule=rule, max_new_tokens=s.max_new_tokens, stop_token_ids=list(s.stop_token_ids),
                stop_strings=[text.encode() for text in s.stop_strings], samples=request.samples, seed=d.seed, stream=d.stream,
                draw_id=d.draw_id, first_sample=0, num_likeliest=s.num_likeliest,
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001 - reported to the client
            request.tell(Progress(error=error))
            return
        request.version = self._version
        request.answers = [Sample() for _ in range(request.samples)]
        self._running |= {request.first + k: request for k in range(request.samples)}

    def _step(self) -> None:
        try:
            with self.model_lock:
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


def score_sequence(trainer: C.Trainer, ids: list[int], out: Tensor) -> Tensor:
    """Write the log-probability of each token of a sequence, except the first, to `out` [tokens], and return `out`."""
    if len(ids) > 1:
        trainer.forward(_one_row(ids), [0], 1.0, True, False, False, out)
    return out


def likeliest_of_sequence(trainer: C.Trainer, ids: list[int], count: int) -> list[Likeliest]:
    """Return the `count` most likely tokens at each position of a sequence, except at the first."""
    found = torch.zeros((len(ids), count), dtype=torch.int64)
    logprobs = torch.zeros(found.shape, dtype=trainer.out_dtype)
    if len(ids) > 1 and count:
        trainer.likeliest(_one_row(ids), [0], 1.0, True, found, logprobs)
    rows = zip(found[1:].tolist(), logprobs[1:].tolist())
    return [(), *(tuple(zip(*row)) for row in rows)]


def _one_row(ids: list[int]) -> RowBatch:
    batch = RaggedBatch(torch.tensor([0, len(ids)]), {"input_ids": torch.tensor(ids)}, {})
    return RowBatch(batch, wanted_tokens(batch))
