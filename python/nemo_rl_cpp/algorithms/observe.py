"""What happens between two steps: validation, logs, the report, checkpoints, and the decision to stop."""

from dataclasses import dataclass, field
from typing import Any

from nemo_rl_cpp.algorithms.checkpointing import check_metric_name, check_weights, metric_of, save_if_due
from nemo_rl_cpp.algorithms.train_state import TrainState
from nemo_rl_cpp.algorithms.validation import ValidationResult, reached_target
from nemo_rl_cpp.utils.step_metrics import performance_metrics


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

    metrics: dict[str, Any]
    table: dict[str, list[Any]] = field(default_factory=dict)
    histograms: dict[str, list[float]] = field(default_factory=dict)
    generated_tokens: float | None = None
    rollout_names: frozenset[str] = frozenset()


def observe_start(parts: Any, state: TrainState) -> None:
    """Validates before the first step of a new run, when the configuration says so."""
    parts.run.timeout.start_iterations()
    if parts.validator is not None and parts.validator.due_at_start(state.step) and not state.finished:
        result = validate_now(parts, state)
        log_validation(parts, state, result)
        check_metric_name(parts, None, result.metrics)


def observe(parts: Any, config: Any, loop: Any, state: TrainState, report: StepReport) -> None:
    """Everything that follows the step which made `state.step` what it is. `loop` is the section `grpo` or `ppo`.

    The order makes a killed run whole: metrics are on the disk before the checkpoint that they belong to appears, and a
    run that resumes from a checkpoint cuts off whatever was logged after it. Times come last, because saving takes time.
    """
    run, step = parts.run, state.step
    run.timeout.mark_iteration()
    interrupted, timed_out = run.stop.requested, run.timeout.check_save()
    validation = None
    if parts.validator is not None and not interrupted and parts.validator.due(step, is_last=state.finished):
        validation = validate_now(parts, state)
    target = reached_target(validation.metrics if validation else None, loop)
    if interrupted:
        state.stop(run.stop.reason)
    elif timed_out:
        state.stop("checkpoint_must_save_by")
    elif target:
        state.stop(f"{loop.stop_at_validation_metric} reached {loop.stop_at_validation_threshold}")
    log_step(parts, state, report)
    if validation is not None:
        log_validation(parts, state, validation)
    if run.checkpoints is not None:
        val_metrics = validation.metrics if validation else None
        check_metric_name(parts, report, val_metrics)
        save_if_due(
            parts, config, state, lambda: metric_of(parts, report.metrics, val_metrics, quiet=interrupted),
            is_last=state.finished, early_stop=target, timeout=timed_out, interrupted=interrupted,
        )  # fmt: skip
    if state.finished and (run.checkpoints is None or not run.checkpoints.enabled):
        check_weights(parts, state)
    log_times(parts, state, report)


def validate_now(parts: Any, state: TrainState) -> ValidationResult:
    """One validation with the current weights."""
    with parts.run.timer("validation"):
        parts.refit.sync_weights(timer=parts.run.timer)
        result = parts.validator.run(state.step)
    state.val_reward = float(result.metrics["accuracy"])
    state.note_metric(state.val_reward)
    return result


def log_validation(parts: Any, state: TrainState, result: ValidationResult) -> None:
    run = parts.run
    run.validations.append({"step": state.step, **result.metrics})
    run.alerts.validation(state.step, result.metrics)
    if run.logger is not None:
        run.logger.log_metrics(result.metrics, state.step, prefix="validation")
        run.logger.log_metrics(result.timings, state.step, prefix="timing/validation")
    if run.progress is not None:
        accuracy, count = result.metrics["accuracy"], result.metrics["num_samples"]
        interval = ""
        if "accuracy_ci95_low" in result.metrics:
            interval = f" (95 % interval {result.metrics['accuracy_ci95_low']:.3f} to {result.metrics['accuracy_ci95_high']:.3f})"
        run.progress.print(f"validation after step {state.step}: accuracy {accuracy:.3f}{interval} on {count} prompts")


def log_step(parts: Any, state: TrainState, report: StepReport) -> None:
    run, step = parts.run, state.step
    run.history.append({"step": step, **report.metrics})
    if run.logger is None:
        return
    run.logger.log_metrics(report.metrics, step, prefix="train")
    for name, values in report.histograms.items():
        run.logger.log_histogram(values, step, f"train/{name}/histogram")
    if report.table:
        run.logger.log_batched_dict_as_jsonl(report.table, f"train_data_step{step}.jsonl")


def log_times(parts: Any, state: TrainState, report: StepReport) -> None:
    """Seconds by stage, rates and memory: what differs between two runs that do the same."""
    run, step = parts.run, state.step
    timing = run.timer.step_timing_metrics()
    performance = performance_metrics(
        timing,
        num_samples=len(report.table.get("rewards", ())) or 1,
        total_num_tokens=report.metrics.get("total_num_tokens", 0),
        num_generated_tokens=report.generated_tokens,
    )
    for share in (
        "reused_forward_share",
        "zero_gradient_share",
    ):  # the first is 0 in a process's first step: of how it ran, not of what it did
        if hasattr(parts.policy, share):
            performance[share] = getattr(parts.policy, share)
    if run.logger is not None:
        run.logger.log_metrics(performance, step, prefix="performance")
        if run.memory is not None:
            run.logger.log_metrics(run.memory.step_metrics(), step, prefix="memory")
        run.logger.log_metrics(timing, step, prefix="timing/train", step_finished=True)
    run.history[-1] |= {"seconds": timing.get("total_step_time", 0.0), **performance}
    serious = run.alerts.step(step, report.metrics)
    if run.progress is not None:
        run.progress.step(step, report.metrics | performance)
        for line in serious:
            run.progress.print(line)
    if run.report is not None:
        run.report.update()
