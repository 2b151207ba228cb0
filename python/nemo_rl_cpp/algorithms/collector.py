"""Where the rollouts of a step come from: made in the step itself, or beside the training of earlier steps.

Both give the batches of a run in one order, and what a batch holds does not depend on how fast anything is:

    SyncCollector      batch k is generated in step k, under version k of the weights
    AsyncCollector  batch k is generated under version max(0, k - A) while steps before k train (A: `max_trajectory_age_steps`)
"""

import copy
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, Self

import torch

from nemo_rl_cpp.algorithms.dynamic_sampling import GroupSampler
from nemo_rl_cpp.algorithms.train_state import TrainState
from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_cpp.distributed.worker_calls import WorkerLostError
from nemo_rl_cpp.files.plain_state import check_state
from nemo_rl_cpp.metrics.timer import Timer
from nemo_rl_cpp.models.generation.interfaces import GenerationInterface, finished_on_error
from nemo_rl_cpp.rollouts.batches import Rollouts
from nemo_rl_cpp.rollouts.rollouts import PromptSource, RolloutRunner
from nemo_rl_cpp.weight_sync import WeightSynchronizer

_SAVED = ("rollout_metrics", "sampler_metrics", "finished_epochs", "weight_version")
CollectedState = dict[str, object]
"""`Collected` in a checkpoint: `samples`, as a dictionary, and these; without times."""


@dataclass
class Collected:
    """The rollouts of one step, and how they were come by.

    Attributes:
        rollout_metrics: of engine and environments, also of rollouts that are not among the samples.
        sampler_metrics: of dynamic sampling.
        finished_epochs: of the data, while the prompts were drawn.
        weight_version: which weights generated.
        metrics: of the refit, and of the wait for rollouts beside training.
        seconds: times of the stages, where they were measured beside the step.
    """

    samples: Rollouts
    rollout_metrics: dict[str, float]
    sampler_metrics: dict[str, float]
    finished_epochs: int
    weight_version: int
    metrics: dict[str, float | str | None] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def state_dict(self) -> CollectedState:
        return {"samples": dict(self.samples.data)} | {name: getattr(self, name) for name in _SAVED}

    @classmethod
    def from_state(cls, state: CollectedState) -> Self:
        return cls(**(state | {"samples": Rollouts(state["samples"])}))


@dataclass
class RolloutMaker:
    """The components that make the rollouts of a step.

    Attributes:
        failures_left: how many rounds of generation or scoring may still fail in this run; a failed one is done again.
    """

    generation: GenerationInterface
    refit: WeightSynchronizer
    prompts: PromptSource
    rollouts: RolloutRunner
    sampler: GroupSampler
    shape_rewards: Callable[[Rollouts], Rollouts]
    failures_left: int = 0

    def make(self, weight_version: int, timer: Timer) -> Collected:
        """Rounds of generation until a step can be taken: one, unless dynamic sampling asks for more."""
        while not self.sampler.full:
            prompts = self.prompts.next()
            with timer("generation"):
                rollouts = self._round(prompts, weight_version)
            with timer("reward_calculation"):
                rollouts = self.shape_rewards(rollouts)
            with timer("dynamic_sampling"):
                self.sampler.add(rollouts)  # the limit and its error live in the sampler
        samples = self.sampler.take(weight_version)
        return Collected(
            samples, self.rollouts.pop_metrics(), self.sampler.metrics, self.prompts.pop_finished_epochs(), weight_version
        )  # fmt: skip

    def _round(self, prompts: BatchedDataDict, weight_version: int) -> Rollouts:
        while True:
            tried = copy.deepcopy(prompts) if self.failures_left else prompts  # a rollout extends the conversations
            try:
                return self.rollouts.run(tried, weight_version)
            except WorkerLostError:
                raise  # it would not answer again
            except Exception as error:
                if self.failures_left == 0:
                    raise
                self.failures_left -= 1
                print(f"a round of rollouts failed and is done again ({type(error).__name__}: {error}); {self.failures_left} more may fail", flush=True)  # fmt: skip

    def refresh(self, timer: Timer) -> dict[str, float | str | None]:
        """The engine gets the present weights and is made ready."""
        with timer("prepare_for_generation/total"):
            metrics = self.refit.sync_weights(timer=timer)
            self.generation.prepare_for_generation()
        return metrics


def _leave_out(batches: list[CollectedState], state: TrainState, why: str) -> None:
    """Says that a checkpoint's batches are not trained. The data is past them, so their epochs count."""
    print(f"{len(batches)} batches that the checkpoint kept for later steps are left out: {why}.")
    for _ in range(sum(saved["finished_epochs"] for saved in batches)):
        state.next_epoch()


class RolloutCollector(Protocol):
    """Where the rollouts of a step come from."""

    def collect(self, timer: Timer) -> Collected:
        """The rollouts of the next step. The engine's weights are the present ones afterwards."""

    def settle(self) -> None:
        """Waits until nothing is generated: for a validation or a checkpoint. Raises what generation raised."""

    def state_dict(self) -> list[CollectedState]:
        """Batches that are ready for later steps; to be asked after `settle`."""

    def load_state_dict(self, state: list[CollectedState]) -> None:
        """Goes on where `state_dict` was taken."""

    def close(self, wait: bool = False) -> None:
        """Begins nothing more, and with `wait` waits for what has begun. Safe to call twice."""


class SyncCollector(RolloutCollector):
    """Generates a step's rollouts when the step asks for them."""

    def __init__(self, maker: RolloutMaker, state: TrainState) -> None:
        self.maker, self._state = maker, state

    def collect(self, timer: Timer) -> Collected:
        """As `RolloutCollector`."""
        metrics = self.maker.refresh(timer)
        with finished_on_error(self.maker.generation):
            collected = self.maker.make(self._state.step, timer)
        with timer("data_processing"):
            self.maker.generation.finish_generation()
        collected.metrics = metrics
        return collected

    def settle(self) -> None:
        """Nothing is generated between two steps."""

    def state_dict(self) -> list[CollectedState]:
        """Nothing is ready before its step."""
        return []

    def load_state_dict(self, state: list[CollectedState]) -> None:
        """Batches of a run that generated beside its training: they are said and left out."""
        if state:
            _leave_out(state, self._state, "rollouts are made in their own step now")

    def close(self, wait: bool = False) -> None:
        """Nothing runs beside."""


class AsyncCollector(RolloutCollector):
    """Generates the batches of later steps while the present one trains. The engine has weights of its own.

    In step s, before training, all generation has ended: the engine gets version s, and begins the batch of step s + A. So a
    batch is A versions old when it is trained, but for the first ones, which version 0 generates; and a run gives the same bits
    however long generation and training take. What is ready waits in order; a checkpoint holds it.

    Args:
        age: A, at least 1 (`max_trajectory_age_steps`).
        keeps: whether checkpoints will hold batches. Then the first one is tried, so that a column which no checkpoint can hold
            is said in step 1.
        groups: (prompts of a step, responses to each), which batches of a checkpoint must have; None: any.
        submit: starts a job beside and gives its future; None: in a thread. Jobs run one after the other.
    """

    def __init__(
        self, maker: RolloutMaker, state: TrainState, age: int, keeps: bool = False, groups: tuple[int, int] | None = None,
        submit: Callable[[Callable[[], Collected | None]], Future[Collected | None]] | None = None,
    ) -> None:  # fmt: skip
        self.maker, self._state, self._age, self._keeps, self._groups = maker, state, age, keeps, groups
        self._threads: ThreadPoolExecutor | None = None
        self._submit = submit or self._in_thread
        self._batches: deque[Future[Collected | None]] = deque()  # of steps state.step, state.step + 1, ...
        self._epochs_drawn = state.current_epoch  # of the data, when all these batches are trained
        self._generates = False

    def collect(self, timer: Timer) -> Collected:
        """As `RolloutCollector`. `exposed_generation` is the time that training waits for it."""
        with timer("exposed_generation"):
            self.settle()
        ready, version = len(self._batches), self._state.step
        metrics = self.maker.refresh(timer)
        while len(self._batches) <= self._age:
            self._begin(version + len(self._batches), version)
        with timer("exposed_generation"):
            collected = self._batches.popleft().result()
        if collected is None:
            raise RuntimeError(f"step {version + 1} has no prompts: the data ended before it")
        for label, seconds in collected.seconds.items():
            timer.record(label, seconds)
        age = version - collected.weight_version
        collected.metrics = metrics | {"avg_trajectory_age": age, "buffer_size": ready}
        return collected

    def _begin(self, step: int, version: int) -> None:
        self._generates = True
        self._batches.append(self._submit(lambda: self._make(step, version)))

    def _in_thread(self, job: Callable[[], Collected | None]) -> Future[Collected | None]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        return self._threads.submit(job)

    def _make(self, step: int, version: int) -> Collected | None:
        """The batch of a step, counted from 0; None where the run ends before it. Runs beside, in the order of steps."""
        state, timer = self._state, Timer()
        if state.max_num_steps is not None and step >= state.max_num_steps:
            return None
        if state.max_num_epochs is not None and self._epochs_drawn >= state.max_num_epochs:
            return None
        collected = self.maker.make(version, timer)
        if self._keeps:
            check_state(collected.state_dict(), "rollouts")
            self._keeps = False
        self._epochs_drawn += collected.finished_epochs
        collected.seconds = timer.sums()
        return collected

    def settle(self) -> None:
        """As `RolloutCollector`."""
        for batch in self._batches:
            batch.result()
        if self._generates:
            self.maker.generation.finish_generation()
            self._generates = False

    def state_dict(self) -> list[CollectedState]:
        """As `RolloutCollector`."""
        ready = [batch.result() for batch in self._batches]
        return [batch.state_dict() for batch in ready if batch is not None]

    def load_state_dict(self, state: list[CollectedState]) -> None:
        """As `RolloutCollector`. Where the run now allows a smaller age, the batches are trained all the same, in their order. Batches of
        another size than this run's are said and left out."""
        sizes = [
            torch.bincount(saved["samples"]["group_id"]).tolist() for saved in state if "group_id" in saved["samples"]
        ]
        if self._groups is not None and any(size != [self._groups[1]] * self._groups[0] for size in sizes):
            _leave_out(
                state, self._state, f"they are not of {self._groups[0]} prompts with {self._groups[1]} responses each"
            )
            self._epochs_drawn = self._state.current_epoch
            return
        for saved in state:
            batch: Future[Collected | None] = Future()
            batch.set_result(Collected.from_state(saved))
            self._batches.append(batch)
            self._epochs_drawn += saved["finished_epochs"]

    def close(self, wait: bool = False) -> None:
        """As `RolloutCollector`; what is being generated ends by itself, or with its workers."""
        if self._threads is not None:
            self._threads.shutdown(wait=wait, cancel_futures=not wait)
            self._threads = None
