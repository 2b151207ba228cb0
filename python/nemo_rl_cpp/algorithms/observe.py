"""What happens between two steps (validation, logs, the report, checkpoints, the decision to stop), and how a run ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from nemo_rl_cpp.algorithms.checkpointing import check_metric_name, check_weights, metric_of, publish, save_if_due
from nemo_rl_cpp.algorithms.step_metrics import Metrics
from nemo_rl_cpp.algorithms.validation import ValidationResult, mean_word, reached_target
from nemo_rl_cpp.config.access import to_plain
from nemo_rl_cpp.config.resources import engines_of, trainers_of
from nemo_rl_cpp.errors import in_user_code, one_sentence, short_path, tracebacks_go_to
from nemo_rl_cpp.metrics.memory import startup_objects_frozen
from nemo_rl_cpp.metrics.performance import Devices, performance_metrics
from nemo_rl_cpp.report.page import duration
from nemo_rl_cpp.user_code import serve

if TYPE_CHECKING:
    from nemo_rl_cpp.algorithms.run import TrainingRun
    from nemo_rl_cpp.config.master import TrainMasterConfig

OUT_OF_TIME = "checkpoint_must_save_by"
AT_ONCE = "stopped at once, in the middle of a step"


@dataclass
class StepReport:
    """What a step hands over to be observed.

    Attributes:
        metrics: logged under `train/`.
        table: columns of train_data_step<N>.jsonl.
        histograms: name -> values, logged as `train/<name>/histogram`.
        generated_tokens: tokens of all responses of the step, those filtered out included.
        rollout_tokens: the same with the prompts and what environments said.
        rollout_names: names of the metrics that rollouts and environments gave; validation has these too.
    """

    metrics: Metrics
    table: dict[str, list[object]] = field(default_factory=dict)
    histograms: dict[str, list[float]] = field(default_factory=dict)
    generated_tokens: float | None = None
    rollout_tokens: float | None = None
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
    elif timed_out and not state.finished:  # else it has ended by itself
        state.stop(OUT_OF_TIME)
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
        num_rollout_tokens=report.rollout_tokens,
        devices=devices_of(run.config),
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
    if services.report is not None:
        services.report.update()


def devices_of(config: TrainMasterConfig) -> Devices:
    """The processes of a run by what they do: trainers generate, too, unless engines have processes of their own."""
    trainers, engines = trainers_of(config), engines_of(config)
    return Devices(trainers + engines, trainers, engines or trainers)


def run_to_end(run: TrainingRun, loop: Callable[[TrainingRun], None]) -> None:
    """`loop(run)` with Ctrl-C ending it at a step boundary; then the last page of the report, the end of the logs, and a
    summary table. An exception leaves the report saying what it was, and goes on to the caller; one from the user's own code
    (a reward function, an environment, a loss) says so (`errors.in_user_code`)."""
    services, began, first = run.services, time.monotonic(), run.state.step
    status, message, published = "failed", "", {}
    services.stop.saves = services.saves
    services.alerts.history.settings = to_plain(run.config)
    if services.logger is not None:
        tracebacks_go_to(services.logger.log_dir)
    if services.report is not None:
        services.report.start()
    try:
        with services.stop, startup_objects_frozen():
            serve(partial(_to_the_end, run, loop))
        status = ended_as(run)
        published = publish(run) if status == "finished" else {}
        services.callbacks.end(run, status)
    except KeyboardInterrupt:
        status, message = "interrupted", AT_ONCE
        raise
    except BaseException as error:
        told = in_user_code(error)
        message = one_sentence(told or error)
        if status == "failed":  # else it is on_end that has failed
            services.callbacks.end(run, status)
        status = "failed"
        if told is None:
            raise
        raise told from error
    finally:
        if services.report is not None:
            services.report.finish(status, message)
        if services.logger is not None:
            services.logger.finish()
        if services.checkpoints is not None:
            services.checkpoints.shutdown()
        if services.progress is not None:
            services.progress.finish(
                summary(run, first, time.monotonic() - began) | published,
                title=f"{run.config.title}: {status}"
                + (", but nothing was learned" if services.alerts.learned_nothing else ""),
            )


def _to_the_end(run: TrainingRun, loop: Callable[[TrainingRun], None]) -> None:
    """Run the loop, then wait for rollouts that were begun for later steps, so that the caller has engine and environments alone."""
    at_once = False
    try:
        loop(run)
    except KeyboardInterrupt:
        at_once = True
        raise
    finally:
        run.collection.close(wait=not at_once)


def ended_as(run: TrainingRun) -> str:
    """How a run ended that has not failed. One that `checkpoint_must_save_by` has ended goes on in the next one, as one that was
    interrupted does: neither is uploaded."""
    if run.services.stop.requested:
        return "interrupted"
    return "stopped in time" if run.state.stop_reason == OUT_OF_TIME else "finished"


def summary(run: TrainingRun, first_step: int, seconds: float) -> dict[str, str]:
    """What the table at the end of a run says."""
    state, services = run.state, run.services
    steps = state.step - first_step
    table: dict[str, str] = {
        "steps": f"{state.step}" + (f" ({steps} now, from step {first_step})" if first_step else "")
    }
    if state.stop_reason is not None:
        table["ended by"] = state.stop_reason
    table["time"] = duration(seconds) + (f", {seconds / steps:.2f} s a step" if steps else "")
    if services.history:
        rewards = [row["reward"] for row in services.history]
        table["reward"] = f"{rewards[0]:.3f} -> {rewards[-1]:.3f} (best {max(rewards):.3f})"
    for row, name in ((services.validations[:1], "validation, first"), (services.validations[-1:], "validation, last")):
        if row:
            table[name] = _validation_text(row[0])
    if services.history:
        table |= _health(services.history)
    table |= services.alerts.table()
    if services.saves and state.step:
        latest = services.checkpoints.checkpoint_dir / f"step_{state.step}"
        if latest.is_dir():
            table["checkpoint"] = f"{short_path(latest)} (model: {short_path(latest / 'policy' / 'weights')})"
    if services.logger is not None:
        table["logs"] = short_path(services.logger.log_dir)
    if services.report is not None:
        table["report"] = short_path(services.report.path)
    return table


def _validation_text(row: Metrics) -> str:
    text = f"{mean_word(row)} {row['accuracy']:.3f}"
    if "accuracy_ci95_low" in row:
        text += f" (95 % interval {row['accuracy_ci95_low']:.3f} to {row['accuracy_ci95_high']:.3f})"
    if "well_formed" in row and "accuracy_of_well_formed" in row:
        text += f", {row['accuracy_of_well_formed']:.3f} among the {100 * row['well_formed']:.0f} % well-formed answers"
    return f"{text} on {row['num_samples']} prompts after step {row['step']}"


def _health(history: list[Metrics]) -> dict[str, str]:
    rows: dict[str, str] = {}
    rates = [row["tokens_per_sec"] for row in history if "tokens_per_sec" in row]
    if rates:
        rows["speed"] = f"{sum(rates) / len(rates):,.0f} tokens a second over whole steps"
    explained = [row["critic/explained_var"] for row in history if "critic/explained_var" in row]
    if explained:
        rows["explained variance"] = f"{explained[0]:.3f} -> {explained[-1]:.3f} (best {max(explained):.3f})"
    errors = [row["token_mult_prob_error"] for row in history if "token_mult_prob_error" in row]
    gaps = [row["max_logprob_gap"] for row in history if "max_logprob_gap" in row]
    if errors:
        rows["generation against training"] = f"token_mult_prob_error at most {max(errors):.9g}"
        if gaps:
            rows["generation against training"] += f", largest log-probability gap {max(gaps):.3g}"
    return rows
