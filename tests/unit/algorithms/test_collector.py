"""Tests of asynchronous rollouts: every order in which the generating and the training thread can run gives the same
batches from the same versions of the weights."""

import threading
from concurrent.futures import Future
from contextlib import suppress

import pytest
import torch
from nemo_rl_cpp.algorithms.collector import AsyncCollector, Collected, GenerationEndedError, Meeting, SyncCollector
from nemo_rl_cpp.algorithms.train_state import TrainState
from nemo_rl_cpp.distributed.ragged_batch import BatchedDataDict
from nemo_rl_cpp.distributed.worker_calls import WorkerLostError
from nemo_rl_cpp.metrics.timer import Timer
from nemo_rl_cpp.models.generation.interfaces import Pause
from nemo_rl_cpp.rollouts.batches import Rollouts


class Ended(BaseException):
    """Raised in a waiting thread to end it when its test is over."""


class Turns:
    """A scheduler of two threads, "train" and "generate", of which only one runs at a time. At every gate it selects
    the next thread: the one with the index in `choices`, or the first that can run if there are no more choices.
    `options` records how many threads could run at each gate."""

    def __init__(self, choices):
        self.choices, self.options, self.moved = choices, [], threading.Condition(threading.RLock())
        self.turn, self.can_run = "train", ["train"]
        self.waits_for, self.jobs, self.errors = None, [], []

    def gate(self, me):
        with self.moved:
            self._pass_on()
            self._until_my_turn(me)

    def _pass_on(self):
        number = len(self.options)
        choice = self.choices[number] if number < len(self.choices) else 0
        self.options.append(len(self.can_run))
        self.turn = self.can_run[choice]
        self.moved.notify_all()

    def _until_my_turn(self, me):
        assert self.moved.wait_for(lambda: self.turn in (me, None), timeout=60), "both threads wait: a deadlock"
        if self.turn is None:
            raise Ended

    def end(self):
        """Raise `Ended` in a thread that still waits."""
        with self.moved:
            self.turn = None
            self.moved.notify_all()

    def submit(self, job):
        future = TurnFuture(self)
        with self.moved:
            self.jobs.append((job, future))
            if "generate" not in self.can_run:
                self.can_run.append("generate")
                threading.Thread(target=self._work, daemon=True).start()
        return future

    def _work(self):
        with suppress(Ended):
            self._do_jobs()

    def _do_jobs(self):
        with self.moved:
            self._until_my_turn("generate")
        while True:
            job, future = self.jobs.pop(0)
            try:
                future.set_result(job())
            except Exception as error:
                future.set_exception(error)
            with self.moved:
                if self.waits_for is future:
                    self.waits_for = None
                    self.can_run.insert(0, "train")
                if not self.jobs:
                    self.can_run.remove("generate")
                    self._pass_on()
                    return
                self._pass_on()
                self._until_my_turn("generate")

    def pause(self, reached):
        """Complete the future `reached`, and let the generating thread wait until `go_on` is called."""
        with self.moved:
            self.tell(reached, True)
            self.can_run.remove("generate")
            self._pass_on()
            self._until_my_turn("generate")

    def tell(self, future, result):
        """Complete a future for which the training thread may wait."""
        with self.moved:
            future.set_result(result)
            if self.waits_for is future:
                self.waits_for = None
                self.can_run.insert(0, "train")

    def go_on(self):
        with self.moved:
            self.can_run.append("generate")

    def wait_for(self, future):
        with self.moved:
            if not future.done():
                self.waits_for = future
                self.can_run.remove("train")
                self._pass_on()
                self._until_my_turn("train")


class TurnFuture(Future):
    def __init__(self, turns):
        super().__init__()
        self.turns = turns

    def result(self, timeout=None):
        self.turns.wait_for(self)
        return super().result(0)


class TurnMeeting(Meeting):
    """A `Meeting` of two threads that a `Turns` schedules."""

    def __init__(self, turns):
        super().__init__()
        self.turns, self.reached = turns, TurnFuture(turns)
        self.given.add_done_callback(lambda given: turns.go_on())

    def wait(self):
        self.turns.pause(self.reached)

    def pass_by(self):
        if not self.reached.done():
            self.turns.tell(self.reached, False)


class Maker:
    """A fake engine and trainer. The engine has the version of the last weight sync, and asserts throughout a
    generation that it has the expected version."""

    def __init__(self, turns, state, epochs=lambda number: 0):
        self.turns, self.state, self.generation, self.epochs = turns, state, self, epochs
        self.version, self.busy, self.number, self.change = None, False, 0, None

    def refresh(self, timer):
        assert not self.busy, "the engine got new weights in the middle of a generation"
        self.turns.gate("train")
        self.version = self.state.step
        return {"refit/version": float(self.version)}

    def make(self, weight_version, timer):
        self.busy, number, self.number = True, self.number, self.number + 1
        for _ in range(2):
            self.turns.gate("generate")
            assert self.version == weight_version
        self.busy = False
        if self.change is not None:
            self.change.wait()
            self.turns.gate("generate")
            assert self.version == weight_version + 1
        with timer("generation"):
            rows = Rollouts({"total_reward": torch.tensor([float(number)])})
        return Collected(rows, {}, {}, self.epochs(number), weight_version)

    def finish_generation(self):
        assert not self.busy
        return True


def collector_of(maker, state, turns=None, **options):
    """Return an AsyncCollector with the fake engine and trainer `maker`. If `turns` is given, it schedules the
    threads."""
    collector = AsyncCollector(maker, None, None, None, None, state, **options)
    if turns is not None:
        collector._submit, collector._make_meeting = turns.submit, lambda: TurnMeeting(turns)
    collector.refresh = lambda timer: maker.refresh(timer)
    collector.make = lambda version, timer: maker.make(version, timer)
    return collector


def run_model(choices, age, steps, save_after=None, resumed=None, begin=0, pause=None):
    """Return (batch number and weight version of each trained step, batches in a checkpoint, number of runnable threads
    at each gate)."""
    turns, state, saved = Turns(choices), TrainState(max_num_steps=steps, total_steps=begin), None
    maker = Maker(turns, state)
    collection = collector_of(maker, state, turns, age=age, keeps=True, pause=pause)
    if resumed is not None:
        collection.load_state_dict(resumed)
        maker.number = begin + len(resumed)
    trained = []
    while not state.finished:
        collected = collection.collect(Timer())
        trained.append((int(collected.samples.total_reward[0]), collected.weight_version))
        assert collected.metrics["avg_trajectory_age"] == state.step - collected.weight_version
        turns.gate("train")  # in the middle of training
        state.advance()
        if state.step == save_after:
            collection.settle()
            assert not maker.busy
            saved = collection.state_dict()
    collection.close()
    turns.end()
    return trained, saved, turns.options


def every_order(run):
    """Yield the result of `run(choices)` for every possible schedule of the two threads."""
    choices = []
    while choices is not None:
        *result, options = run(choices)
        yield result
        played = choices + [0] * (len(options) - len(choices))
        while played and played[-1] + 1 >= options[len(played) - 1]:
            played.pop()
        choices = [*played[:-1], played[-1] + 1] if played else None


@pytest.mark.slow
@pytest.mark.parametrize("pause", [None, Pause(2, False)], ids=["whole", "weights in flight"])
@pytest.mark.parametrize("age, steps", [(1, 4), (2, 3), (3, 3)])
def test_async_runs_train_the_same_batches_for_every_interleaving_of_generation_and_training(age, steps, pause):
    """With in-flight weight updates, the fake engine asserts that each batch k >= age continues with the version after
    its first one."""
    expected = [(k, max(0, k - age)) for k in range(steps)]
    orders = 0
    for trained, saved in every_order(lambda choices: run_model(choices, age, steps, save_after=2, pause=pause)):
        assert trained == expected
        assert [int(batch["samples"]["total_reward"][0]) for batch in saved] == list(range(2, min(2 + age, steps)))
        assert [batch["weight_version"] for batch in saved] == [max(0, k - age) for k in range(2, min(2 + age, steps))]
        orders += 1
    assert orders > 20, "the threads were not interleaved"


@pytest.mark.parametrize("pause", [None, Pause(2, False)], ids=["whole", "weights in flight"])
def test_resumed_async_run_trains_the_same_batches_as_the_uninterrupted_run(pause):
    whole, saved, _ = run_model([], age=2, steps=6, save_after=3, pause=pause)
    rest, _, _ = run_model([], age=2, steps=6, resumed=saved, begin=3, pause=pause)
    assert rest == whole[3:]


@pytest.mark.parametrize("pause", [None, Pause(2, False)], ids=["whole", "weights in flight"])
@pytest.mark.parametrize("age, versions", [(1, [3, 3, 4]), (2, [3, 3, 3])])
def test_async_run_that_resumes_without_batches_generates_its_first_batches_from_scratch(age, versions, pause):
    trained, _, _ = run_model([], age, steps=6, begin=3, resumed=[], pause=pause)
    assert trained == list(zip([3, 4, 5], versions, strict=True))


def test_async_run_generates_nothing_after_the_last_step_or_epoch():
    for age in (1, 2):
        turns, state = Turns([]), TrainState(max_num_epochs=2)
        maker = Maker(turns, state, epochs=lambda number: int(number % 2 == 1))  # two batches an epoch
        collection, ready = collector_of(maker, state, turns, age=age), []
        while not state.finished:
            collected = collection.collect(Timer())
            ready.append(collected.metrics["buffer_size"])
            for _ in range(collected.finished_epochs):
                state.next_epoch()
            state.advance()
        assert ready == [[0, 1, 1, 1], [0, 2, 2, 1]][age - 1]
        assert (state.step, maker.number, state.stop_reason) == (4, 4, "max_num_epochs")
        turns.end()


def test_async_generation_error_is_raised_in_the_training_step_that_needs_the_batch():
    turns, state = Turns([]), TrainState(max_num_steps=4)
    maker = Maker(turns, state)
    collection = collector_of(maker, state, turns, age=1)
    collection.collect(Timer())
    collection.settle()
    state.advance()

    def fail(weight_version, timer):
        raise OSError("the reward service is away")

    maker.make = fail
    collection.collect(Timer())  # the batch of step 2 was ready
    state.advance()
    with pytest.raises(OSError, match="the reward service is away"):
        collection.collect(Timer())
    turns.end()


class Runner:
    """A fake for `roll_out` that appends a response to each conversation, and raises the given errors in its first
    calls."""

    def __init__(self, errors):
        self.errors, self.given = list(errors), []

    def __call__(self, prompts):
        self.given.append([len(log) for log in prompts["message_log"]])
        for log in prompts["message_log"]:
            log.append({"content": "a response", "token_ids": torch.tensor([1, 2])})
        if self.errors and (error := self.errors.pop(0)) is not None:
            raise error
        return BatchedDataDict({**prompts.data, "total_reward": torch.zeros(1), "group_id": torch.zeros(1)}), {}


class Prompts:
    finished_epochs = 0

    def next(self):
        return BatchedDataDict(message_log=[[{"content": "a prompt", "token_ids": torch.tensor([0])}]])


class OneRound:
    full, metrics = False, {}

    def add(self, rollouts):
        self.rollouts, self.full = rollouts, True

    def take(self):
        self.full = False
        return self.rollouts


def maker_of(runner, failures_left):
    return SyncCollector(None, None, Prompts(), runner, OneRound(), None, failures_left=failures_left)


def test_failed_rollout_is_retried_with_the_same_prompts(capsys):
    runner = Runner([OSError("away"), None, OSError("away again"), None])
    maker = maker_of(runner, failures_left=2)
    for _ in range(2):
        (log,) = maker.make(0, Timer()).samples["message_log"]
        assert [message["content"] for message in log] == ["a prompt", "a response"]
    assert runner.given == [[1]] * 4
    assert "OSError: away again); 0 more may fail" in capsys.readouterr().out
    runner.errors = [OSError("once more")]
    with pytest.raises(OSError, match="once more"):
        maker.make(0, Timer())


@pytest.mark.parametrize("error", [WorkerLostError("engine worker 0 is gone"), GenerationEndedError("the run ended")])
def test_failed_rollout_is_not_retried_after_a_lost_worker_or_the_end_of_the_run(error):
    runner = Runner([error])
    with pytest.raises(type(error)):
        maker_of(runner, failures_left=5).make(0, Timer())
    assert len(runner.given) == 1


def test_rollout_batches_saved_in_a_checkpoint_are_dropped_if_the_batch_size_changed(capsys):
    state, groups = TrainState(max_num_epochs=3), torch.tensor([0, 0, 1, 1])
    kept = Collected(Rollouts({"group_id": groups}), {}, {}, finished_epochs=1, weight_version=0).state_dict()
    for wanted, number in (((2, 2), 1), ((1, 4), 0), ((2, 3), 0)):
        collection = AsyncCollector(*[None] * 5, state, age=1, groups=wanted)
        collection.load_state_dict([kept])
        assert len(collection.state_dict()) == number
    assert state.current_epoch == 2 and "this run trains on 2 prompts with 3 responses each" in capsys.readouterr().out


def test_closing_an_async_run_waits_for_unfinished_generation():
    ends, state = threading.Event(), TrainState(max_num_steps=9)
    maker = Maker(None, state)
    maker.refresh = lambda timer: {}
    maker.make = lambda version, timer: ends.wait(60) and Collected(Rollouts({}), {}, {}, 0, version)
    collection = collector_of(maker, state, age=1)
    threading.Timer(0.05, ends.set).start()
    collection.collect(Timer())
    collection.close(wait=True)
    assert len(collection.state_dict()) == 1, "the batch of the next step is whole"


def test_closing_an_async_run_stops_a_generation_that_waits_for_new_weights():
    state, ended = TrainState(max_num_steps=9), []
    maker = Maker(None, state)
    maker.refresh = lambda timer: {}

    def make(version, timer):
        try:
            if maker.change is not None:
                maker.change.wait()
        except GenerationEndedError as error:
            ended.append(error)
            raise
        return Collected(Rollouts({}), {}, {}, 0, version)

    maker.make = make
    collection = collector_of(maker, state, age=1, pause=Pause(2, False))
    collection.collect(Timer())
    collection.close(wait=True)
    assert len(ended) == 1 and maker.change is None


@pytest.mark.parametrize("epochs, many", [([1], "1 batch"), ([0, 1], "2 batches")])
def test_sync_run_resumed_from_an_async_checkpoint_drops_the_saved_rollout_batches(epochs, many, capsys):
    state = TrainState(current_epoch=1)
    SyncCollector(*[None] * 5, state).load_state_dict([{"finished_epochs": count} for count in epochs])
    assert state.current_epoch == 2, "the data is past these batches"
    said = "because each step of this run generates its own rollouts."
    assert capsys.readouterr().out == f"Dropped {many} of rollouts that the checkpoint had generated ahead, {said}\n"
