"""Runs a training loop from its start to its end, however it ends: signals, report, summary."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from nemo_rl_cpp.algorithms.publishing import publish
from nemo_rl_cpp.algorithms.validation import mean_word
from nemo_rl_cpp.config.access import to_plain
from nemo_rl_cpp.errors import in_user_code, one_sentence, tracebacks_go_to
from nemo_rl_cpp.report.page import duration
from nemo_rl_cpp.telemetry.memory import startup_objects_frozen

if TYPE_CHECKING:
    from nemo_rl_cpp.algorithms.run import TrainingRun
    from nemo_rl_cpp.algorithms.step_metrics import Metrics


AT_ONCE = "stopped at once, in the middle of a step"


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
            loop(run)
        status = "interrupted" if services.stop.requested else "finished"
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
        run.collection.close(wait=message != AT_ONCE)  # who goes on with the engine and the environments has them alone
        if services.report is not None:
            services.report.finish(status, message)
        if services.logger is not None:
            services.logger.finish()
        if services.checkpoints is not None:
            services.checkpoints.shutdown()
        if services.progress is not None:
            services.progress.finish(
                summary(run, first, time.monotonic() - began) | published,
                title=_title(run.config.title, status, services.alerts.learned_nothing),
            )


def _title(title: str, status: str, learned_nothing: bool) -> str:
    return f"{title}: {status}" + (", but nothing was learned" if learned_nothing else "")


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
            table["checkpoint"] = f"{latest} (model: {latest / 'policy' / 'weights'})"
    if services.logger is not None:
        table["logs"] = str(services.logger.log_dir)
    if services.report is not None:
        table["report"] = str(services.report.path)
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
