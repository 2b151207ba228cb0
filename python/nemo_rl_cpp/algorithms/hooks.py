"""Hooks that the loop calls after each step: logs, validation, checkpoints, the progress line, the decision to stop.

A hook is called with the `StepResult` of the finished step. `TrainingRun.after_step` lists the hooks in call order;
`TrainingRun.before_training` lists those called before the first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl_cpp.algorithms.collector import RolloutCollector
from nemo_rl_cpp.algorithms.step_metrics import Metrics
from nemo_rl_cpp.algorithms.train_state import TrainState
from nemo_rl_cpp.algorithms.validation import ValidationResult, Validator, headline, reached_target
from nemo_rl_cpp.config.loop import LoopConfig
from nemo_rl_cpp.errors import short_path
from nemo_rl_cpp.interrupts import GracefulStop
from nemo_rl_cpp.loggers.logger import Logger
from nemo_rl_cpp.metrics.memory import PhaseMemory
from nemo_rl_cpp.metrics.timer import Devices, TimeoutChecker, Timer, performance_metrics
from nemo_rl_cpp.report.findings import Alerts
from nemo_rl_cpp.report.page import duration
from nemo_rl_cpp.report.progress import Progress

if TYPE_CHECKING:
    from nemo_rl_cpp.algorithms.build import TrainingRun

OUT_OF_TIME = "checkpoint_must_save_by"


@dataclass
class StepResult:
    """The results of a finished step, which each hook receives in turn. Hooks set fields that later hooks read."""

    state: TrainState  # the counters of the run; `state.step` is this step
    metrics: Metrics = field(default_factory=dict)  # logged under `train/`; empty before the first step
    table: dict[str, list[object]] = field(default_factory=dict)  # columns of train_data_step<N>.jsonl
    histograms: dict[str, list[float]] = field(default_factory=dict)  # name -> values of `train/<name>/histogram`
    rollout_names: frozenset[str] = frozenset()  # metrics of rollouts and environments; a validation has these, too
    interrupted: bool = False  # whether Ctrl-C or a signal has requested the end of the run
    timed_out: bool = False  # whether the run must save and end (`checkpointing.checkpoint_must_save_by`)
    reached_target: bool = False  # whether the validation reached `stop_at_validation_threshold`
    validation: ValidationResult | None = None  # the validation of this step, if there was one
    checkpoint: Path | None = None  # the checkpoint folder written after this step, if there was one
    performance: Metrics = field(default_factory=dict)  # rates, such as tokens per second

    @property
    def step(self) -> int:
        return self.state.step


Hook = Callable[[StepResult], None]


@dataclass
class Ending:
    """The hook that ends the run: after a signal, at the time limit, or when validation reaches its target."""

    stop: GracefulStop
    timeout: TimeoutChecker
    loop: LoopConfig

    def look(self, result: StepResult) -> None:
        self.timeout.mark_iteration()
        result.interrupted, result.timed_out = self.stop.requested, self.timeout.check_save()

    def decide(self, result: StepResult) -> None:
        state, validation = result.state, result.validation
        result.interrupted = self.stop.requested  # perhaps since `look`, during a callback or the validation
        result.reached_target = reached_target(validation.metrics if validation else None, self.loop)
        if result.interrupted:
            state.stop(self.stop.reason)
        elif result.timed_out and not state.finished:  # a finished run has reached a different limit
            state.stop(OUT_OF_TIME)
        elif result.reached_target:
            state.stop(f"{self.loop.stop_at_validation_metric} reached {self.loop.stop_at_validation_threshold}")


@dataclass
class Validation:
    """A hook that runs a validation if the configuration schedules one."""

    validator: Validator
    collector: RolloutCollector
    timer: Timer

    def at_start(self, result: StepResult) -> None:
        first = result.step == 0 and self.validator.loop.val_at_start and not result.state.finished
        if first or result.state.owes_validation:
            result.validation = self.run(result.state)

    def after_step(self, result: StepResult) -> None:
        if self.validator.due(result.step, is_last=result.state.finished):
            result.state.owes_validation = result.interrupted
            if not result.interrupted:
                result.validation = self.run(result.state)

    def run(self, state: TrainState) -> ValidationResult:
        """Validate the current weights, and record the result in `state` as the latest, and perhaps as the best."""
        state.owes_validation = False
        with self.timer("validation"):
            self.collector.settle()
            self.collector.refit.sync_weights(timer=self.timer)
            result = self.validator.run(state.step)
        word, state.val_reward = headline(result.metrics)
        state.note_metric(state.val_reward, higher_is_better=word != "loss")
        return result


@dataclass
class StepLog:
    """A log that writes the metrics of steps and validations to the loggers, and keeps them for `TrainResult`."""

    logger: Logger
    timer: Timer
    memory: PhaseMemory
    devices: Devices
    # a function that returns the metrics `performance/*` that the policy measures (`PolicyInterface.performance`)
    model_performance: Callable[[], dict[str, float]]
    # one dictionary per step that this process ran: `step`, its metrics, `seconds` and rates
    history: list[Metrics] = field(default_factory=list)
    # one dictionary per validation that this process ran: `step` and its metrics
    validations: list[Metrics] = field(default_factory=list)

    def metrics(self, result: StepResult) -> None:
        self.history.append({"step": result.step, **result.metrics})
        self.logger.log_metrics(result.metrics, result.step, prefix="train")
        for name, values in result.histograms.items():
            self.logger.log_histogram(values, result.step, f"train/{name}/histogram")
        if result.table:
            self.logger.log_batched_dict_as_jsonl(result.table, f"train_data_step{result.step}.jsonl")

    def validation(self, result: StepResult) -> None:
        if result.validation is None:
            return
        self.validations.append({"step": result.step, **result.validation.metrics})
        self.logger.log_metrics(result.validation.metrics, result.step, prefix="validation")
        self.logger.log_metrics(result.validation.timings, result.step, prefix="timing/validation")

    def times(self, result: StepResult) -> None:
        """Log seconds per stage, rates and memory use, which differ between identical runs."""
        timing = self.timer.step_timing_metrics()
        result.performance = performance_metrics(
            timing,
            num_samples=len(result.table.get("rewards", ())) or 1,
            total_num_tokens=result.metrics.get("total_num_tokens", 0),
            num_generated_tokens=result.metrics.get("total_generated_tokens"),
            num_rollout_tokens=result.metrics.get("total_rollout_tokens"),
            devices=self.devices,
        )
        result.performance |= self.model_performance()
        self.logger.log_metrics(result.performance, result.step, prefix="performance")
        self.logger.log_metrics(self.memory.step_metrics(), result.step, prefix="memory")
        self.logger.log_metrics(timing, result.step, prefix="timing/train", step_finished=True)
        self.history[-1] |= {"seconds": timing.get("total_step_time", 0.0), **result.performance}


@dataclass
class Terminal:
    """The run's output in the terminal: the progress line, validations, and serious alerts."""

    progress: Progress
    alerts: Alerts

    def validation(self, result: StepResult) -> None:
        if result.validation is None:
            return
        metrics = result.validation.metrics
        self.alerts.add(result.step, metrics, "validation")
        text = f"{_headline_text(metrics)} on {metrics['num_samples']} prompts"
        self.progress.print(f"validation after step {result.step}: {text}")

    def step(self, result: StepResult) -> None:
        serious = self.alerts.step(result.step, result.metrics)
        self.progress.step(result.step, result.metrics | result.performance)
        for line in serious:
            self.progress.print(line)


def _headline_text(metrics: Metrics) -> str:
    word, value = headline(metrics)
    text = f"{word} {value:.3f}"
    if "accuracy_ci95_low" in metrics:
        text += f" (95 % interval {metrics['accuracy_ci95_low']:.3f} to {metrics['accuracy_ci95_high']:.3f})"
    return text


# ---- the end of a run


def summary(run: TrainingRun, first_step: int, seconds: float) -> dict[str, str]:
    """Return the rows of the table at the end of a run, which trained for `seconds` from step `first_step` on."""
    state, history, validations = run.state, run.history, run.validations
    steps = state.step - first_step
    table: dict[str, str] = {
        "steps": f"{state.step}" + (f" ({steps} now, from step {first_step})" if first_step else "")
    }
    if state.stop_reason is not None:
        table["ended by"] = state.stop_reason
    table["time"] = duration(seconds) + (f", {seconds / steps:.2f} s a step" if steps else "")
    if rewards := [row["reward"] for row in history if "reward" in row]:
        table["reward"] = f"{rewards[0]:.3f} -> {rewards[-1]:.3f} (best {max(rewards):.3f})"
    elif history:
        table["loss"] = f"{history[0]['loss']:.3f} -> {history[-1]['loss']:.3f}"
    for row, name in ((validations[:1], "validation, first"), (validations[-1:], "validation, last")):
        if row:
            table[name] = _validation_text(row[0])
    table |= _health(history) | run.terminal.alerts.table()
    if run.checkpoints.enabled and state.step:
        latest = run.checkpoints.checkpoint_dir / f"step_{state.step}"
        if latest.is_dir():
            table["checkpoint"] = f"{short_path(latest)} (model: {short_path(latest / 'policy' / 'weights')})"
    table["logs"] = short_path(run.log_dir)
    if run.report is not None and run.report.path.is_file():
        table["report"] = short_path(run.report.path)
    return table


def _validation_text(row: Metrics) -> str:
    text = _headline_text(row)
    if "well_formed" in row and "accuracy_of_well_formed" in row:
        text += f", {row['accuracy_of_well_formed']:.3f} among the {100 * row['well_formed']:.0f} % well-formed answers"
    return f"{text} on {row['num_samples']} prompts after step {row['step']}"


def _health(history: list[Metrics]) -> dict[str, str]:
    def values(name: str) -> list[float]:
        return [row[name] for row in history if name in row]

    rows: dict[str, str] = {}
    if rates := values("tokens_per_sec"):
        rows["speed"] = f"{sum(rates) / len(rates):,.0f} tokens a second over whole steps"
    if explained := values("critic/explained_var"):
        rows["explained variance"] = f"{explained[0]:.3f} -> {explained[-1]:.3f} (best {max(explained):.3f})"
    if errors := values("token_mult_prob_error"):
        rows["generation against training"] = f"token_mult_prob_error at most {max(errors):.9g}"
        if gaps := values("max_logprob_gap"):
            rows["generation against training"] += f", largest log-probability gap {max(gaps):.3g}"
    return rows
