"""User code that is called after steps, validations and checkpoints and at a run's end. It may stop the run."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl_cpp.argument_checks import described, in_a_line, is_iterable
from nemo_rl_cpp.errors import one_sentence, user_code
from nemo_rl_cpp.user_code import call_user

if TYPE_CHECKING:
    from nemo_rl_cpp.algorithms.build import TrainingRun
    from nemo_rl_cpp.algorithms.hooks import StepResult
    from nemo_rl_cpp.algorithms.step_metrics import Metrics

METHODS = ("on_step", "on_validation", "on_checkpoint", "on_end")


@dataclass(frozen=True)
class RunEvent:
    """The event that each method of a callback receives.

    Attributes:
        step: the number of finished steps.
        max_steps: `max_num_steps`, the number of steps after which the whole run ends.
        metrics: the metrics of the step (`reward`, `loss`, `rewards/<function>`, ...); in `on_validation` those of the
            validation.
        run: the whole run, with `history`, `policy`, `config` and `log_dir`.
        checkpoint: in `on_checkpoint` the folder that was just written; otherwise None.
        status: in `on_end` how the run ended: "finished", "stopped in time" (by checkpointing.checkpoint_must_save_by),
            "interrupted" or "failed"; otherwise ""."""

    step: int
    max_steps: int
    metrics: Mapping[str, float]
    run: TrainingRun
    checkpoint: Path | None = None
    status: str = ""

    def stop(self, reason: str = "a callback") -> None:
        """End the run after this step, with a last validation and checkpoint. `reason` appears in the summary. If
        called in `on_checkpoint`, that checkpoint is the last one, and no validation follows."""
        self.run.state.stop(reason)


class Callback:
    """The base class of callbacks. Override the methods that you need; an exception in a method ends the run.

    class Plateau(nemo_rl_cpp.Callback):
        def on_validation(self, event):
            if event.metrics["accuracy"] > 0.9:
                event.stop("90 % are right")"""

    def on_step(self, event: RunEvent) -> None:
        """React to a finished step, after its metrics were logged and before its validation and checkpoint."""

    def on_validation(self, event: RunEvent) -> None:
        """React to a validation, including one before the first step."""

    def on_checkpoint(self, event: RunEvent) -> None:
        """React to the complete checkpoint `event.checkpoint`, after the step's validation, if any."""

    def on_end(self, event: RunEvent) -> None:
        """React to the end of the run, unless a second Ctrl-C aborts the run."""


@dataclass(eq=False)
class Callbacks:
    """The callbacks of a run, which are called in the given order."""

    callbacks: Sequence[Callback] = ()
    run: TrainingRun = field(init=False)

    def after_step(self, result: StepResult) -> None:
        for callback in self.callbacks:
            self._call(callback, "on_step", result.metrics)

    def after_validation(self, result: StepResult) -> None:
        for callback in self.callbacks if result.validation is not None else ():
            self._call(callback, "on_validation", result.validation.metrics)

    def after_checkpoint(self, result: StepResult) -> None:
        for callback in self.callbacks if result.checkpoint is not None else ():
            self._call(callback, "on_checkpoint", self.run.history[-1], checkpoint=result.checkpoint)

    def end(self, status: str) -> None:
        """Call `on_end` of every callback with `status`, even if some raise. Then raise the first error and print the
        others; if `status` is "failed", print all, because the caller raises the run's failure."""
        first = None
        for callback in self.callbacks:
            try:
                self._call(callback, "on_end", self.run.history[-1] if self.run.history else {}, status=status)
            except Exception as error:
                if status != "failed" and first is None:
                    first = error
                else:
                    print(f"warning: {one_sentence(error)}", file=sys.stderr, flush=True)
        if first is not None:
            raise first

    def _call(self, callback: Callback, method: str, metrics: Metrics, **of_event: object) -> None:
        run, function = self.run, getattr(callback, method, None)
        if function is not None:
            event = RunEvent(run.state.step, run.config.loop.max_num_steps, dict(metrics), run, **of_event)
            with user_code(f"callback {type(callback).__name__}.{method}"):
                call_user(function, event)


def checked_callbacks(given: object) -> Callbacks:
    """Return `given` (None, one callback, or several) as `Callbacks`. Raise ValueError for anything else."""
    is_callback = any(name.startswith("on_") for name in dir(given))
    several = [] if given is None else [given] if is_callback else given
    if isinstance(several, (str, bytes, Mapping)) or not is_iterable(several):
        raise ValueError(f"callbacks is {described(given)}: give a list of objects derived from nemo_rl_cpp.Callback")
    callbacks, known = list(several), ", ".join(METHODS)
    for index, callback in enumerate(callbacks):
        where, name = f"callbacks[{index}]", type(callback).__name__
        methods = [method for method in dir(callback) if method.startswith("on_")]
        if inspect.isclass(callback):
            raise ValueError(f"{where} is the class {callback.__name__}: give an object of it, {callback.__name__}()")
        if unknown := next((method for method in methods if method not in METHODS), None):
            raise ValueError(f"{where} has the method {name}.{unknown}, which nothing calls; the methods are {known}")
        if not methods:
            raise ValueError(f"{where} is {in_a_line(callback)}: derive it from nemo_rl_cpp.Callback, with {known}")
    return Callbacks(callbacks)
