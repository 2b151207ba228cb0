"""Collection of a step's rollouts: during the step itself, or while earlier steps train.

Both collectors return batches in the same order. The content of a batch does not depend on timing:

    SyncCollector   batch k is generated during step k, with version k of the weights.
    AsyncCollector  batch k is generated with version max(0, k - A), while steps before k train. A is
                    `max_trajectory_age_steps`. With in-flight weight updates, a batch k >= A switches to version
                    k - A + 1 in the middle of its responses, after a number of tokens that the configuration fixes."""

import copy
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from nemo_rl_cpp.algorithms.dynamic_sampling import GroupSampler
from nemo_rl_cpp.algorithms.train_state import TrainState
from nemo_rl_cpp.data.interfaces import LLMMessageLogType, tokens_of
from nemo_rl_cpp.distributed.worker_calls import WorkerLostError
from nemo_rl_cpp.files.plain_state import check_state
from nemo_rl_cpp.metrics.timer import Timer
from nemo_rl_cpp.models.generation.interfaces import GenerationInterface, Pause, WeightChange, finished_on_error
from nemo_rl_cpp.rollouts.batches import DatumBatch, Rollouts
from nemo_rl_cpp.rollouts.rollout_metrics import Round, round_metrics, version_metrics
from nemo_rl_cpp.rollouts.rollouts import PromptSource
from nemo_rl_cpp.weight_sync import WeightSynchronizer

_SAVED = ("rollout_metrics", "sampler_metrics", "finished_epochs", "weight_version")
CollectedState = dict[str, object]
"""A `Collected` as a checkpoint saves it: a dictionary of all fields but `metrics` and `seconds`."""


@dataclass
class Collected:
    """The rollouts of one step, and statistics of their collection."""

    samples: Rollouts
    # metrics of engine and environments, over all rollouts, including those that were filtered out
    rollout_metrics: dict[str, float]
    sampler_metrics: dict[str, float]  # metrics of dynamic sampling
    finished_epochs: int  # how many epochs of the data ended while the prompts were drawn
    weight_version: int  # the version of the weights that generated the rollouts
    # metrics of the weight sync, and of the wait for asynchronous rollouts
    metrics: dict[str, float | str | None] = field(default_factory=dict)
    # durations of those stages of the collection that ran outside the step
    seconds: dict[str, float] = field(default_factory=dict)

    def state_dict(self) -> CollectedState:
        return {"samples": dict(self.samples.data)} | {name: getattr(self, name) for name in _SAVED}


@dataclass
class RolloutCollector(AbstractContextManager["RolloutCollector"]):
    """The base class of collectors, which generate and score the rollouts of a step."""

    generation: GenerationInterface
    refit: WeightSynchronizer  # copies the policy's weights to the engine
    prompts: PromptSource  # yields the next prompts, each repeated once per response
    # generates responses to prompts and has the environments score them (`run_multi_turn_rollout`)
    roll_out: Callable[[DatumBatch], tuple[DatumBatch, dict[str, float]]]
    sampler: GroupSampler  # gathers rollouts until there are enough for a step
    state: TrainState
    # scales and shapes the rewards of one round of generation
    shape_rewards: Callable[[Rollouts], Rollouts] = lambda rollouts: rollouts
    # changes `total_reward` of finished rollouts and returns metrics (`grpo.length_penalty`)
    change_rewards: Callable[[Rollouts], dict[str, float]] = lambda rollouts: {}
    failures_left: int = 0  # how many failed rounds of generation or scoring may still be repeated in this run
    # for in-flight weight updates (`AsyncCollector`): the point at which generation of a batch waits for new weights.
    # None: one version of the weights generates the whole batch.
    pause: Pause | None = None

    @abstractmethod
    def collect(self, timer: Timer) -> Collected:
        """Copy the current weights to the engine, and return the rollouts of the next step."""

    def settle(self) -> None:
        """Wait until no generation is in flight, before a validation or checkpoint. Re-raise errors of generation."""

    def state_dict(self) -> list[CollectedState]:
        """Return the batches that are ready for later steps, as checkpoints store them. Call `settle` first."""
        return []

    @abstractmethod
    def load_state_dict(self, state: list[CollectedState]) -> None:
        """Restore the batches that `state_dict` returned."""

    def close(self, wait: bool = False) -> None:
        """Accept no new work. If `wait`, wait for the work in flight. Further calls do nothing."""

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close(wait=not isinstance(error, KeyboardInterrupt))

    def refresh(self, timer: Timer) -> dict[str, float | str | None]:
        """Copy the current weights to the engine, prepare it for generation, and return the metrics of the copy."""
        with timer("prepare_for_generation/total"):
            metrics = self.refit.sync_weights(timer=timer)
            self.generation.prepare_for_generation()
        return metrics

    def make(self, weight_version: int, timer: Timer) -> Collected:
        """Generate rounds of rollouts (several with dynamic sampling) until a step has enough. Add `raw_reward` float32
        [B], as the environments returned it, and `weight_version` int64 [B]: the argument, or with in-flight weight
        updates the oldest version that sampled any token of the row."""
        rounds: list[Round] = []
        while not self.sampler.full:
            prompts = self.prompts.next()
            with timer("generation"):
                while True:
                    tried = copy.deepcopy(prompts) if self.failures_left else prompts  # rollouts append to them
                    try:
                        finished, metrics = self.roll_out(tried)
                        break
                    except Exception as error:
                        self._count_failure(error)
                rollouts = Rollouts(finished.data)
                rollouts.raw_reward = rollouts.total_reward.clone()
                metrics |= self.change_rewards(rollouts)
                rollouts.weight_version = oldest_versions(rollouts.message_log, weight_version)
                if self.pause is not None:
                    metrics |= version_metrics(rollouts.message_log, weight_version)
                metrics["total_rollout_tokens"] = sum(map(tokens_of, rollouts.message_log))
                rounds.append((metrics, rollouts.raw_reward.tolist(), rollouts.group_id.tolist()))
            with timer("reward_calculation"):
                rollouts = self.shape_rewards(rollouts)
            with timer("dynamic_sampling"):
                self.sampler.add(rollouts)  # raises an error after the allowed number of rounds
        samples = self.sampler.take()
        epochs, self.prompts.finished_epochs = self.prompts.finished_epochs, 0
        return Collected(samples, round_metrics(rounds), self.sampler.metrics, epochs, weight_version)

    def _count_failure(self, error: Exception) -> None:
        """Count a failed round of rollouts. Raise `error` if no more may fail, or if a retry would fail, too."""
        if isinstance(error, (WorkerLostError, GenerationEndedError)) or self.failures_left == 0:
            raise error
        self.failures_left -= 1
        said = f"{type(error).__name__}: {error}"
        print(f"a round of rollouts failed and is done again ({said}); {self.failures_left} more may fail", flush=True)

    def leave_out(self, batches: list[CollectedState], why: str) -> None:
        """Drop the batches of a checkpoint, and print why. Count the epochs that ended while their prompts were drawn,
        because the data loader is past these prompts."""
        many = "1 batch" if len(batches) == 1 else f"{len(batches)} batches"
        print(f"Dropped {many} of rollouts that the checkpoint had generated ahead, because {why}.")
        for _ in range(sum(saved["finished_epochs"] for saved in batches)):
            self.state.next_epoch()


def oldest_versions(logs: list[LLMMessageLogType], version: int) -> torch.Tensor:
    """Return int64 [B]: for each conversation the oldest version of the weights that sampled one of its tokens. The
    default is `version`."""
    of_messages = [[int(m["token_versions"].min()) for m in log if len(m.get("token_versions", ()))] for log in logs]
    return torch.tensor([min(versions, default=version) for versions in of_messages])


class SyncCollector(RolloutCollector):
    """A collector that generates the rollouts of a step during that step."""

    def collect(self, timer: Timer) -> Collected:
        metrics = self.refresh(timer)
        with finished_on_error(self.generation):
            collected = self.make(self.state.step, timer)
        with timer("data_processing"):
            self.generation.finish_generation()
        collected.metrics = metrics
        return collected

    def load_state_dict(self, state: list[CollectedState]) -> None:
        """Drop the batches that a run with asynchronous rollouts had generated ahead, if any, and print a note."""
        if state:
            self.leave_out(state, "each step of this run generates its own rollouts")


@dataclass
class Meeting:
    """The point at which the generation of one batch pauses, with responses unfinished, until there are new weights."""

    # a future of True once the generation waits here, or of False if the batch ended without waiting
    reached: Future[bool] = field(default_factory=Future)
    # a future that the trainer completes once the engines have the new weights
    given: Future[None] = field(default_factory=Future)

    def wait(self) -> None:
        """Wait for the new weights, in the thread that generates. Raise GenerationEndedError if the run ends."""
        self.reached.set_result(True)
        self.given.result()

    def pass_by(self) -> None:
        """Record that the generation of the batch has ended without a pause, so that the trainer does not wait for
        one."""
        if not self.reached.done():
            self.reached.set_result(False)


class GenerationEndedError(RuntimeError):
    """Raised in a generation that is waiting for new weights when the run ends."""


@dataclass
class AsyncCollector(RolloutCollector):
    """A collector that generates the batches of later steps while the current step trains. The engine holds a separate
    copy of the weights.

    In step s (from 0), before training, the collector waits until all generation has ended or paused, copies version s
    to the engine and starts the batch of step s + A, where A is `age`. Step 0 starts the batches of steps 0 to A. So
    from step A on, a batch is A versions old when it is trained on. Results are bit-identical at any speed of
    generation and training. Finished batches wait in order, and checkpoints contain them."""

    age: int = 1  # `max_trajectory_age_steps`, at least 1
    # whether checkpoints are written. If so, the first batch is checked: a column that cannot be saved in a checkpoint
    # raises an error in step 1.
    keeps: bool = False
    # (prompts per step, responses per prompt), which a checkpoint's batches must match; None: any
    groups: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self._meetings: deque[Meeting | None] = deque()  # one for each entry of _batches
        self._threads: ThreadPoolExecutor | None = None
        self._batches: deque[Future[Collected | None]] = deque()  # for steps state.step, state.step + 1, ...
        self._epochs_drawn = self.state.current_epoch  # epochs of the data after all these batches
        self._generates = False

    def collect(self, timer: Timer) -> Collected:
        """Return the rollouts of this step, and start the generation of a later step's. The timer's label
        `exposed_generation` has the time that training waits."""
        with timer("exposed_generation"):
            paused = self._until_weights_may_change()
            if paused is None:
                self._finish()
        ready = sum(batch.done() and batch.result() is not None for batch in self._batches)
        version = self.state.step
        metrics = self.refresh(timer)
        if paused is not None:
            paused.given.set_result(None)
        while len(self._batches) <= self.age:
            self._generates = True
            step = version + len(self._batches)
            # `collect` gives a pause its weights in the next step, so the batches that are needed before have none
            meeting = self._make_meeting() if self.pause is not None and step == version + self.age else None
            self._meetings.append(meeting)
            self._batches.append(self._submit(lambda step=step, at=meeting: self._batch_of(step, version, at)))
        with timer("exposed_generation"):
            self._meetings.popleft()
            collected = self._batches.popleft().result()
        if collected is None:
            raise RuntimeError(f"step {version + 1} has no prompts: the data ended before it")
        for label, seconds in collected.seconds.items():
            timer.record(label, seconds)
        age = version - collected.weight_version
        collected.metrics = metrics | {"avg_trajectory_age": age, "buffer_size": ready}
        return collected

    _make_meeting: ClassVar = Meeting  # this and the next method decide in which order the threads run

    def _submit(self, job: Callable[[], Collected | None]) -> Future[Collected | None]:
        """Start a job, which generates one batch, after all earlier jobs, and return its future."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        return self._threads.submit(job)

    def _batch_of(self, step: int, version: int, meeting: Meeting | None) -> Collected | None:
        """Generate and return the batch of the training step `step` (from 0), or return None if the run ends before
        this step. If `meeting` is given, generation pauses there once for new weights. Called in the order of steps."""
        state, timer = self.state, Timer()
        steps_end = state.max_num_steps is not None and step >= state.max_num_steps
        epochs_end = state.max_num_epochs is not None and self._epochs_drawn >= state.max_num_epochs
        try:
            if steps_end or epochs_end:
                return None
            if meeting is not None:
                self.generation.change = WeightChange(self.pause, meeting.wait)
            collected = self.make(version, timer)
        finally:
            if meeting is not None:
                self.generation.change = None
                meeting.pass_by()
        if self.keeps:
            check_state(collected.state_dict(), "rollouts")
            self.keeps = False
        self._epochs_drawn += collected.finished_epochs
        collected.seconds = timer.sums()
        return collected

    def _until_weights_may_change(self) -> Meeting | None:
        """Wait until all batches have ended and return None, or until the last one pauses and return its `Meeting`."""
        for batch, meeting in zip(self._batches, self._meetings, strict=True):
            if meeting is not None and meeting.reached.result() and not meeting.given.done():
                return meeting
            batch.result()
        return None

    def settle(self) -> None:
        """Wait for all batches and end generation. If a batch is paused until there are new weights, first copy the
        current weights, which this step has already trained, to the engine."""
        if (paused := self._until_weights_may_change()) is not None:
            self.refresh(Timer())
            paused.given.set_result(None)
            self._until_weights_may_change()
        self._finish()

    def _finish(self) -> None:
        if self._generates:
            self.generation.finish_generation()
            self._generates = False

    def state_dict(self) -> list[CollectedState]:
        ready = [batch.result() for batch in self._batches]
        return [batch.state_dict() for batch in ready if batch is not None]

    def load_state_dict(self, state: list[CollectedState]) -> None:
        """Queue the batches of a checkpoint, in order, even if there are more than `age` now allows. If a batch does
        not have the numbers of prompts and of responses per prompt in `groups`, drop all batches with a note."""
        ids = [saved["samples"]["group_id"] for saved in state if "group_id" in saved["samples"]]
        expected = None if self.groups is None else [self.groups[1]] * self.groups[0]
        if expected is not None and any(torch.bincount(each).tolist() != expected for each in ids):
            self.leave_out(state, f"this run trains on {self.groups[0]} prompts with {self.groups[1]} responses each")
            self._epochs_drawn = self.state.current_epoch
            return
        for saved in state:
            batch: Future[Collected | None] = Future()
            batch.set_result(Collected(**(saved | {"samples": Rollouts(saved["samples"])})))
            self._batches.append(batch)
            self._meetings.append(None)
            self._epochs_drawn += saved["finished_epochs"]

    def close(self, wait: bool = False) -> None:
        """Accept no new work, and end a generation that waits for new weights with an error. Wait for all other batches
        if `wait`, otherwise cancel those that have not begun."""
        for meeting in self._meetings:
            if meeting is not None and not meeting.given.done():
                meeting.given.set_exception(GenerationEndedError("the run ended"))
        if self._threads is not None:
            self._threads.shutdown(wait=wait, cancel_futures=not wait)
            self._threads = None
