"""The thread that owns all models. It runs the requests of each model in order. Between requests it samples tokens:
samplers with requests in flight take turns of several steps each."""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

from nemo_rl_cpp._native import C
from nemo_rl_cpp.serving.engine import Sample
from nemo_rl_cpp.tinker.adapters import AdaptedModel

_TURN_STEPS = 32  # steps of a sampler before the next sampler's turn; its KV cache is kept until its next turn
_TURN_OVER_SWITCH = 10  # a turn lasts at least this multiple of the time that loading the sampler's weights takes
_GAP_SECONDS = 60.0  # how long a request waits for a missing earlier one
_MOST_RETRIEVED = 256  # retrieved results that are kept for repeated requests


T = TypeVar("T")


class APIFuture(Future, Generic[T]):
    """A result that is available later: `result()` waits for it in a thread, `await future` in an event loop."""

    def __await__(self) -> Generator[object, None, T]:
        return asyncio.wrap_future(self).__await__()

    async def result_async(self, timeout: float | None = None) -> T:
        """Wait for the result and return it. Raise TimeoutError after `timeout` seconds."""
        return await asyncio.wait_for(asyncio.wrap_future(self), timeout)


@dataclass(eq=False)
class Job:
    """A call to make in the worker's thread, and the future for its result. If `is_short`, the call gets the future as
    its argument and only queues a request for samples, so it may run in a sampler's turn; the sampler later sets the
    future's result."""

    run: Callable[..., object]
    future: Future
    is_short: bool = False
    since: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class Turns:
    """The order of a model's requests: the number of the next one to run, and those that have arrived early."""

    id: str
    next_seq: int = 0
    waiting: dict[int, Job] = field(default_factory=dict)


@dataclass(eq=False)
class Answers:
    """An unfinished request for samples. When all its samples are complete, `finish` converts them to the result."""

    future: Future
    finish: Callable[[list[Sample]], object]
    samples: list[Sample]


class Sampler:
    """The weights of a LoRA model from which tokens are sampled, and the unfinished requests for samples. `path` is the
    checkpoint's tinker:// path, if the weights are from one; `snapshot_of` is the id of the model, if they are a copy
    of its current weights."""

    def __init__(
        self, adapted: AdaptedModel, adapter: Tensor, path: str | None = None, snapshot_of: str | None = None
    ) -> None:
        self.adapted, self.adapter, self.path, self.snapshot_of = adapted, adapter, path, snapshot_of
        self._engine: C.ResidentEngine | None = None
        self.running: dict[int, tuple[Answers, int]] = {}  # by the engine's number: a request, and the sample's index

    def submit(self, answers: Answers, prompt: list[int], **how: object) -> None:
        """Add a request, which is processed from the next step on. `how`: arguments of the engine's `submit`."""
        if self._engine is None:
            self._engine = self.adapted.engine()
        try:
            first = self._engine.submit(prompt, samples=len(answers.samples), **how)
            self.running |= {first + k: (answers, k) for k in range(len(answers.samples))}
        finally:
            self._return_idle_engine()

    def cancel(self, future: Future) -> None:
        """Remove the unfinished request whose result `future` would receive."""
        for number in [n for n, (answers, _) in self.running.items() if answers.future is future]:
            self._engine.cancel(number)
            del self.running[number]
        self._return_idle_engine()

    def _return_idle_engine(self) -> None:
        if not self.running and self._engine is not None:
            self.adapted.return_engine(self._engine)
            self._engine = None

    def step(self) -> None:
        """Sample one token for each running request; complete those whose samples ended. The adapter must be loaded."""
        try:
            drawn = zip(*self._engine.step())
        except Exception as error:  # noqa: BLE001 - the engine has given all its sequences up
            failed = {id(answers): answers for answers, _ in self.running.values()}
            self.running.clear()
            self._engine = None
            for answers in failed.values():
                answers.future.set_exception(error)
            return
        for number, token, logprob, reason, likeliest in drawn:
            answers, k = self.running[number]
            answers.samples[k].extend(Sample([token], [logprob], reason, [likeliest]))
            if not reason:
                continue
            del self.running[number]
            if all(each.reason for each in answers.samples):
                try:
                    answers.future.set_result(answers.finish(answers.samples))
                except Exception as error:  # noqa: BLE001 - the client's to hear
                    answers.future.set_exception(error)
        self._return_idle_engine()


class Worker:
    """A thread that runs jobs one after the other and, between them, steps the busy samplers in round-robin order."""

    gap_seconds = _GAP_SECONDS

    def __init__(self) -> None:
        self.futures: dict[str, Future] = {}
        self._retrieved: deque[str] = deque()
        self._changed = threading.Condition()
        self._ready: deque[Job] = deque()
        self._busy: deque[Sampler] = deque()
        self._steps, self._until = 0, 0.0  # the turn of the first busy sampler: steps so far, and when it may end
        self._out_of_turn: set[Turns] = set()
        self._ends = False
        self._thread = threading.Thread(target=self._work, name="models", daemon=True)
        self._thread.start()
        self.is_alive = self._thread.is_alive

    # ---- from any thread

    def submit(self, request_id: str, run: Callable[..., object], *, is_short: bool = False) -> Future:
        """Run `run` once as a job, and return its future, which is stored under `request_id` for repeated requests."""
        with self._changed:
            if request_id not in self.futures:
                self.futures[request_id] = self._enqueue(Job(run, APIFuture(), is_short))
            return self.futures[request_id]

    def submit_in_turn(self, model: Turns, seq: int, run: Callable[[], object]) -> str:
        """Run request number `seq` of a model once, after those with lower numbers, and return the request's id."""
        request_id = f"{model.id}:{seq}"
        with self._changed:
            if request_id in self.futures:
                return request_id
            job = Job(run, APIFuture())
            self.futures[request_id] = job.future
            if seq < model.next_seq:
                job.future.set_exception(ValueError(f"request {seq} of {model.id} has run, and its result is gone"))
                return request_id
            model.waiting[seq] = job
            while (following := model.waiting.pop(model.next_seq, None)) is not None:
                model.next_seq += 1
                self._enqueue(following)
            if model.waiting:
                self._out_of_turn.add(model)
        return request_id

    def do(self, run: Callable[..., object], *, is_short: bool = False) -> APIFuture:
        """Queue a call of `run` in the worker's thread, and return its future, which is not stored (see `Job`)."""
        with self._changed:
            return self._enqueue(Job(run, APIFuture(), is_short))

    def cancel(self, sampler: Sampler, future: Future) -> None:
        """Cancel a request for samples. Its `future` then raises ValueError, unless the result was already set."""

        def run() -> None:
            sampler.cancel(future)
            if not future.done():
                future.set_exception(ValueError("the request was cancelled"))

        self.do(run)

    def join_in(self, sampler: Sampler) -> None:
        """Mark `sampler` as busy, because it has a new request. Only the worker's thread may call it."""
        if sampler not in self._busy:
            self._busy.append(sampler)

    def was_retrieved(self, request_id: str) -> None:
        """Record that a client has received a result, which is kept until enough later ones are retrieved."""
        self._retrieved.append(request_id)
        if len(self._retrieved) > _MOST_RETRIEVED:
            self.futures.pop(self._retrieved.popleft(), None)

    def shut_down(self) -> None:
        """End the thread after its current job. Jobs that have not started fail."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._thread.join(10.0)

    def _enqueue(self, job: Job) -> Future:
        if self._ends:
            raise RuntimeError("the thread of the models has ended: make a new ServiceClient")
        self._ready.append(job)
        self._changed.notify_all()
        return job.future

    # ---- in the thread

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._busy:
                    self._changed.wait_for(lambda: self._ready or self._ends, timeout=1.0)
                if self._ends:
                    self._give_up_all()
                    return
                self._give_up_gaps()
                job = self._ready.popleft() if self._ready else None
            if job is not None:
                self._run(job)
            if job is None or not job.is_short or not self._ready:  # waiting requests join the sampler together
                self._let_sample()

    def _run(self, job: Job) -> None:
        if not job.future.set_running_or_notify_cancel():
            return
        try:
            result = job.run(job.future) if job.is_short else job.run()
        except Exception as error:  # noqa: BLE001 - the client's to hear
            if not isinstance(error, ValueError):
                traceback.print_exception(error)
            job.future.set_exception(error)
            return
        if not job.is_short:
            job.future.set_result(result)

    def _let_sample(self) -> None:
        """Step the sampler whose turn it is, until it is idle, its turn ends, or a new request for samples arrives."""
        if not self._busy:
            return
        sampler, begin = self._busy[0], time.monotonic()
        sampler.adapted.show(sampler.adapter)
        if self._steps == 0:
            now = time.monotonic()
            self._until = now + _TURN_OVER_SWITCH * (now - begin)
        while sampler.running:
            sampler.step()
            self._steps += 1
            if self._ends or (self._ready and self._ready[0].is_short):
                return
            is_over = self._steps >= _TURN_STEPS and time.monotonic() > self._until
            if is_over and (len(self._busy) > 1 or self._ready):
                break
        self._steps = 0
        self._busy.popleft()
        if sampler.running:
            self._busy.append(sampler)

    def _give_up_all(self) -> None:
        sampled = [answers.future for sampler in self._busy for answers, _ in sampler.running.values()]
        for future in [job.future for job in self._ready] + sampled:
            if not future.done():
                future.set_exception(RuntimeError("the thread of the models has ended"))

    def _give_up_gaps(self) -> None:
        """Fail requests that have waited too long for an earlier one, which the client or a restarted server lost."""
        for model in list(self._out_of_turn):
            if model.waiting and time.monotonic() - min(j.since for j in model.waiting.values()) > self.gap_seconds:
                for seq, job in model.waiting.items():
                    job.future.set_exception(ValueError(
                        f"request {seq} of {model.id} came, but {model.next_seq} did not. If the server was started again, what it did "
                        "behind the last checkpoint is lost: make a new client by create_training_client_from_state_with_optimizer"
                    ))  # fmt: skip
                model.waiting.clear()
            if not model.waiting:
                self._out_of_turn.discard(model)
