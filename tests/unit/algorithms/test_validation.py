import math
import threading
from types import SimpleNamespace

import pytest
from fakes import ByteTokenizer, EchoEnvironment, FakeGeneration, prompts
from nemo_rl_cpp.algorithms.collector import SyncCollector
from nemo_rl_cpp.algorithms.train_state import TrainState
from nemo_rl_cpp.algorithms.validation import Validator, reached_target
from nemo_rl_cpp.api.model import TextWriter
from nemo_rl_cpp.config.generation import GenerationConfig
from nemo_rl_cpp.metrics.timer import Timer
from nemo_rl_cpp.models.generation import interfaces

TOKENIZER = ByteTokenizer()


class OneTurn(EchoEnvironment):
    """An environment of one turn with reward 1 if the response equals the answer, else 0."""

    def step(self, message_log_batch, metadata):
        answer = super().step(message_log_batch, [{"turns": 1}] * len(metadata))
        said = [log[-1]["content"] for log in message_log_batch]
        answer.rewards[:] = answer.rewards.new_tensor(
            [float(text == info["answer"]) for text, info in zip(said, metadata)]
        )
        return answer._replace(metadata=metadata)


def loop(**changes):
    values = dict(
        section_name="grpo", val_period=2, val_start_at=-1, val_at_start=False, val_at_end=False, max_val_samples=5, val_batch_size=2,
        val_num_generations_per_prompt=1, max_rollout_turns=1, stop_at_validation_metric=None, stop_at_validation_threshold=None,
    )  # fmt: skip
    return SimpleNamespace(**values | changes)


def policy(val_temperature=1.0):
    return SimpleNamespace(max_total_sequence_length=64, generation=SimpleNamespace(val_temperature=val_temperature))


def batches(count, size=2):
    """Return batches of `count` prompts. The response to prompt i, its own text, is correct if i is even."""
    rows = [prompts([f"{i}"], ["t"], [{"answer": str(i) if i % 2 == 0 else "no"}]) for i in range(count)]
    joined = [rows[i : i + size] for i in range(0, count, size)]
    return [type(rows[0]).from_batches(part) for part in joined]


def validator(engine=None, **options):
    loop_changes = {k: v for k, v in options.items() if hasattr(loop(), k)}
    engine = engine or FakeGeneration(respond=lambda prompt, key: prompt)
    return Validator(engine, batches(options.get("count", 8)), TOKENIZER, {"t": OneTurn()}, loop(**loop_changes),
                     policy(options.get("val_temperature", 1.0)))  # fmt: skip


@pytest.mark.parametrize("limit, expected", [(5, 5), (1, 1), (8, 8), (100, 8), (None, 8), (2, 2)])
def test_validation_uses_only_the_first_max_val_samples_prompts(limit, expected):
    metrics = validator(max_val_samples=limit).run(step=0).metrics
    assert metrics["num_samples"] == expected
    # even prompts are right: 0, 2, 4, ...
    assert metrics["accuracy"] == pytest.approx(math.ceil(expected / 2) / expected)


def test_validation_pass_at_k_is_the_share_of_prompts_with_any_correct_response():
    # sample 1 of each prompt is wrong, sample 0 right for even prompts
    engine = FakeGeneration(respond=lambda prompt, key: prompt if key[2] == 0 else "x")
    metrics = validator(engine, val_num_generations_per_prompt=2, max_val_samples=4).run(step=3).metrics
    assert metrics["accuracy"] == pytest.approx(2 / 8)
    assert metrics["pass_k"] == pytest.approx(2 / 4)
    assert metrics["num_samples"] == 4


def test_validation_sampling_is_seeded_by_the_prompt_index_and_is_the_same_at_every_step():
    engine = FakeGeneration(respond=lambda prompt, key: prompt)
    checked = validator(engine, max_val_samples=5)
    checked.run(step=1)
    first = [call["draw_ids"].tolist() for call in engine.calls]
    assert [i for ids in first for i in ids] == [0, 1, 2, 3, 4]
    assert all(stream == "val" for call in engine.calls for stream in call["stream"])
    engine.calls.clear()
    checked.run(step=9)
    assert [call["draw_ids"].tolist() for call in engine.calls] == first


@pytest.mark.parametrize("temperature, greedy", [(0, True), (0.0, True), (0.7, False)])
def test_validation_is_greedy_if_val_temperature_is_zero(temperature, greedy):
    seen = []

    class Engine(FakeGeneration):
        def generate(self, data, greedy=False):
            seen.append(greedy)
            return super().generate(data, greedy)

    validator(Engine(respond=lambda p, k: p), val_temperature=temperature).run(step=0)
    assert set(seen) == {greedy}


def test_validation_is_due_every_val_period_steps_and_at_the_end():
    checked = validator(val_period=3, val_start_at=6)
    assert [s for s in range(1, 13) if checked.due(s, is_last=False)] == [6, 9, 12]
    assert not checked.due(7, is_last=True)
    assert validator(val_at_end=True, val_period=0).due(7, is_last=True)
    assert not any(validator(val_period=0).due(s, is_last=False) for s in range(1, 20))


def test_validation_accuracy_has_no_confidence_interval_if_rewards_are_outside_0_to_1():
    class Big(OneTurn):
        def step(self, log, metadata):
            answer = super().step(log, metadata)
            return answer._replace(rewards=answer.rewards * 5)

    checked = Validator(FakeGeneration(respond=lambda p, k: p), batches(4), TOKENIZER, {"t": Big()}, loop(), policy())
    assert "accuracy_ci95_low" not in checked.run(step=0).metrics


def test_run_stops_when_the_validation_metric_reaches_its_threshold():
    stop = loop(stop_at_validation_metric="accuracy", stop_at_validation_threshold=0.9)
    assert reached_target({"accuracy": 0.9}, stop)
    assert not reached_target({"accuracy": 0.89}, stop)
    assert not reached_target(None, stop)
    assert not reached_target({"accuracy": 1.0}, loop())
    assert not reached_target({"other": 1.0}, stop)


class Watched(FakeGeneration):
    """A fake engine that counts how often it is open. Generation raises `error`, and closing it raises `second`."""

    def __init__(self, error=None, second=None):
        super().__init__(respond=self.answer)
        self.error, self.second, self.open, self.finished = error, second, 0, 0

    def answer(self, prompt, key):
        if self.error is not None:
            raise self.error
        return prompt

    def prepare_for_generation(self):
        self.open += 1

    def finish_generation(self):
        self.open, self.finished = self.open - 1, self.finished + 1
        if self.second is not None:
            raise self.second


def asked(engine):
    writer = TextWriter()
    writer.generation, writer.tokenizer, writer.limit_name = engine, TOKENIZER, "the limit"
    return writer.generate("1", True)


def collected(engine):
    collector = SyncCollector(engine, None, None, None, None, TrainState())
    collector.refresh = lambda timer: engine.prepare_for_generation() or {}
    collector.make = lambda version, timer: engine.answer("1", None)
    return collector.collect(Timer())


@pytest.mark.parametrize(
    "use", [lambda engine: validator(engine).run(step=0), asked, collected], ids=["validation", "writer", "collector"]
)
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_failing_run_closes_the_generation_engine_and_raises_the_first_error(use, error):
    engine = Watched(error("the first"), RuntimeError("the second"))
    engine.config, engine.seed, engine.max_model_len = GenerationConfig(), 1, 64
    with pytest.raises(error, match="the first") as caught:
        use(engine)
    assert (engine.open, engine.finished) == (0, 1) and "RuntimeError: the second" in caught.value.__notes__[0]


def test_error_while_closing_the_generation_engine_is_raised_if_the_run_succeeded():
    with pytest.raises(RuntimeError, match="alone"):
        validator(Watched(second=RuntimeError("alone"))).run(step=0)


def test_ctrl_c_ends_a_run_whose_generation_engine_hangs_while_closing(monkeypatch):
    monkeypatch.setattr(interfaces, "_AT_ONCE_SECONDS", 0.01)
    engine, free = Watched(KeyboardInterrupt()), threading.Event()
    engine.finish_generation = free.wait
    with pytest.raises(KeyboardInterrupt):
        validator(engine).run(step=0)
    free.set()


class Noting(OneTurn):
    """An environment with the metric `right`, the mean reward of the responses that it has scored."""

    def step(self, message_log_batch, metadata):
        answer = super().step(message_log_batch, metadata)
        for reward in answer.rewards.tolist():
            self._means.add("right", reward)
        return answer


def test_validation_metric_of_an_environment_is_the_mean_over_the_responses_that_it_scored():
    """Of prompts 0 to 5, task b has 3, 4 and 5: one in the first batch of four, two in the second."""
    rows = [prompts([f"{i}"], ["b" if i > 2 else "a"], [{"answer": str(i) if i % 2 == 0 else "no"}]) for i in range(6)]
    run = validator(max_val_samples=None)
    run.loader = [type(rows[0]).from_batches(part) for part in (rows[:4], rows[4:])]
    run.task_to_env = {"a": Noting(), "b": Noting()}
    metrics = run.run(step=0).metrics
    assert (metrics["a/right"], metrics["b/right"]) == pytest.approx((2 / 3, 1 / 3))
    assert (metrics["a/num_responses"], metrics["b/num_responses"]) == (3, 3)
