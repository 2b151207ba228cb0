"""What happens between two steps: validation, logs, the report, checkpoints, and the decision to stop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nemo_rl_cpp.algorithms.checkpointing import check_metric_name, check_weights, metric_of, save_if_due
from nemo_rl_cpp.algorithms.validation import ValidationResult, mean_word, reached_target
from nemo_rl_cpp.telemetry.performance import performance_metrics

if TYPE_CHECKING:
    from nemo_rl_cpp.algorithms.run import TrainingRun
    from nemo_rl_cpp.algorithms.step_metrics import Metrics


@dataclass
class StepReport:
    """What a step hands over to be observed.

    Attributes:
        metrics: logged under `train/`.
        table: columns of train_data_step<N>.jsonl.
        histograms: name -> values, logged as `train/<name>/histogram`.
        generated_tokens: tokens of all responses of the step, those filtered out included.
        rollout_names: names of the metrics that rollouts and environments gave; validation has these too.
    """

    metrics: Metrics
    table: dict[str, list[object]] = field(default_factory=dict)
    histograms: dict[str, list[float]] = field(default_factory=dict)
    generated_tokens: float | None = None
    rollout_names: frozenset[str] = frozenset()


def observe_start(run: TrainingRun) -> None:
    """Validates before the first step of a new run, when the configuration says so."""
    run.services.timeout.start_iterations()
    if run.validator is not None and run.validator.due_at_start(run.state.step) and not run.state.finished:
        result = validate_now(run)
        log_validation(run, result)
        check_metric_name(run, None, result.metrics)
        run.services.callbacks.validation(run, result.metrics)


def observe(run: TrainingRun, report: StepReport) -> None:
    """Everything that follows the step which made `state.step` what it is.

    The order makes a killed run whole: metrics are on the disk before the checkpoint that they belong to appears, and a
    run that resumes from a checkpoint cuts off whatever was logged after it. Times come last, because saving takes time.
    """
    services, state, loop = run.services, run.state, run.config.loop
    services.timeout.mark_iteration()
    interrupted, timed_out = services.stop.requested, services.timeout.check_save()
    log_step(run, report)  # before what may wait for rollouts of later steps, which may have failed
    services.callbacks.step(run, report.metrics)
    validation = None
    if run.validator is not None and not interrupted and run.validator.due(state.step, is_last=state.finished):
        validation = validate_now(run)
    val_metrics = validation.metrics if validation else None
    target = reached_target(val_metrics, loop)
    if interrupted:
        state.stop(services.stop.reason)
    elif timed_out:
        state.stop("checkpoint_must_save_by")
    elif target:
        state.stop(f"{loop.stop_at_validation_metric} reached {loop.stop_at_validation_threshold}")
    if validation is not None:
        log_validation(run, validation)
        services.callbacks.validation(run, validation.metrics)
    if services.checkpoints is not None:
        check_metric_name(run, report, val_metrics)
        save_if_due(
            run, lambda: metric_of(run, report.metrics, val_metrics, quiet=interrupted),
            is_last=state.finished, early_stop=target, timeout=timed_out, interrupted=interrupted,
        )  # fmt: skip
    if state.finished and not services.saves:
        check_weights(run)
    log_times(run, report)


def validate_now(run: TrainingRun) -> ValidationResult:
    """One validation with the current weights."""
    state, timer = run.state, run.services.timer
    with timer("validation"):
        run.collection.settle()
        run.refit.sync_weights(timer=timer)
        result = run.validator.run(state.step)
    state.val_reward = float(result.metrics["accuracy"])
    state.note_metric(state.val_reward)
    return result


def log_validation(run: TrainingRun, result: ValidationResult) -> None:
    services, state = run.services, run.state
    services.validations.append({"step": state.step, **result.metrics})
    services.alerts.validation(state.step, result.metrics)
    if services.logger is not None:
        services.logger.log_metrics(result.metrics, state.step, prefix="validation")
        services.logger.log_metrics(result.timings, state.step, prefix="timing/validation")
    if services.progress is not None:
        accuracy, count = result.metrics["accuracy"], result.metrics["num_samples"]
        interval = ""
        if "accuracy_ci95_low" in result.metrics:
            interval = f" (95 % interval {result.metrics['accuracy_ci95_low']:.3f} to {result.metrics['accuracy_ci95_high']:.3f})"
        services.progress.print(
            f"validation after step {state.step}: {mean_word(result.metrics)} {accuracy:.3f}{interval} on {count} prompts"
        )


def log_step(run: TrainingRun, report: StepReport) -> None:
    services, step = run.services, run.state.step
    services.history.append({"step": step, **report.metrics})
    if services.logger is None:
        return
    services.logger.log_metrics(report.metrics, step, prefix="train")
    for name, values in report.histograms.items():
        services.logger.log_histogram(values, step, f"train/{name}/histogram")
    if report.table:
        services.logger.log_batched_dict_as_jsonl(report.table, f"train_data_step{step}.jsonl")


def log_times(run: TrainingRun, report: StepReport) -> None:
    """Seconds by stage, rates and memory: what differs between two runs that do the same."""
    services, step = run.services, run.state.step
    timing = services.timer.step_timing_metrics()
    performance = performance_metrics(
        timing,
        num_samples=len(report.table.get("rewards", ())) or 1,
        total_num_tokens=report.metrics.get("total_num_tokens", 0),
        num_generated_tokens=report.generated_tokens,
    )
    performance |= run.policy.performance()
    if services.logger is not None:
        services.logger.log_metrics(performance, step, prefix="performance")
        if services.memory is not None:
            services.logger.log_metrics(services.memory.step_metrics(), step, prefix="memory")
        services.logger.log_metrics(timing, step, prefix="timing/train", step_finished=True)
    services.history[-1] |= {"seconds": timing.get("total_step_time", 0.0), **performance}
    serious = services.alerts.step(step, report.metrics)
    if services.progress is not None:
        services.progress.step(step, report.metrics | performance)
        for line in serious:
            services.progress.print(line)
        if (starved := services.starvation.look()) is not None:
            services.progress.print(f"warning: {starved}")
    if services.report is not None:
        services.report.update()
