"""A live line in the terminal with step, phase, reward, speed and time left; without a terminal, plain lines."""

import math
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from nemo_rl_cpp.config.access import as_number
from nemo_rl_cpp.metrics.timer import TOTAL
from nemo_rl_cpp.report.history import format_number
from nemo_rl_cpp.report.page import duration
from nemo_rl_cpp.stages import stage

if TYPE_CHECKING:
    from IPython.display import DisplayHandle

_SHOWN = {
    "reward": "reward",
    "accuracy": "acc",
    "loss": "loss",
    "grad_norm": "grad",
    "critic/explained_var": "ev",
    "mean_gen_tokens_per_sample": "len",
    "tokens_per_sec": "tok/s",
}
"""Metrics that a line shows, in this order -> their labels."""
_FIRST = {
    "validation": "validating",
    "generation": "generating the first responses",
    "value_training": "training the critic",
    "policy_training": "training on the first batch",
}
"""Phase -> the text that is printed when it begins in the first step, if there is no live line."""


class Progress:
    """A display of a run's progress. After `timer.subscribe(progress)` it also shows the stage that the timer measures.
    `mode` is "live" (one line, redrawn in place, below other output), "notebook" (the same in the cell's output),
    "plain" (one line per step), or None to choose by the kind of output."""

    def __init__(
        self, total_steps: int, start_step: int = 0, mode: str | None = None, console: Console | None = None,
        has_rollouts: bool = True,
    ) -> None:  # fmt: skip
        """Start the display of a run of `total_steps` steps, with rollouts or without, on `console` (None: stdout)."""
        self.total_steps = total_steps
        self.mode = mode or _choose_mode(console)
        self._console = console
        self._step = self._start_step = start_step
        self._phase = "starting"
        self._metrics: dict[str, float] = {}
        self._began = self._step_began = self._phase_began = time.monotonic()
        self._first_step_end: float | None = None
        self._live: Live | None = None
        self._display: DisplayHandle | None = None
        self._said = set() if has_rollouts else {"generation"}
        if self.mode == "live":
            self._start_live()
        elif self.mode == "notebook":
            from IPython.display import display

            self._display = display({"text/plain": self.line()}, raw=True, display_id=True)

    def phase(self, name: str) -> None:
        self._phase, self._phase_began = name, time.monotonic()
        if self.mode == "notebook":
            self._show_notebook()
        elif self.mode == "plain" and self._first_step_end is None and name in _FIRST and name not in self._said:
            self._said.add(name)
            stage(_FIRST[name])

    def stage_started(self, label: str, depth: int) -> None:
        """Show the stage `label`, which a timer has started, as the phase; ignore inner stages (`depth` above 0)."""
        if depth == 0 and label != TOTAL:
            self.phase(label.removesuffix("/total"))

    def step(self, step: int, metrics: Mapping[str, object]) -> None:
        """Show that step `step` (counted from 1) is complete, with its metrics."""
        now = time.monotonic()
        for name in _SHOWN:
            if (value := as_number(metrics.get(name))) is not None:
                self._metrics[name] = value
        if self._first_step_end is None:
            self._first_step_end, self._start_step = now, step
        took, self._step, self._step_began = now - self._step_began, step, now
        if self.mode == "plain":
            self.print(" | ".join(filter(None, [self._head(), self._values(), duration(took)])) + self._tail(now))
        elif self.mode == "notebook":
            self._show_notebook()

    def finish(self, summary: Mapping[str, str], title: str) -> None:
        """End the live line and print a table of `summary`."""
        self.close()
        table = Table(title=title, show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column()
        for key, text in summary.items():
            table.add_row(key, text)
        self._get_console().print(table)

    def close(self) -> None:
        """End the live line. Further calls do nothing."""
        if self._live is not None:
            self._live.stop()

    # ---- the line

    def line(self) -> str:
        now = time.monotonic()
        phase = f"{self._phase} {duration(now - self._phase_began)}"
        return " | ".join(filter(None, [self._head(), phase, self._values()])) + self._tail(now)

    def _head(self) -> str:
        return f"step {self._step}/{self.total_steps}"

    def _values(self) -> str:
        shown = {label: self._metrics[name] for name, label in _SHOWN.items() if name in self._metrics}
        if {"acc", "reward"} <= shown.keys() and math.isclose(shown["acc"], shown["reward"], rel_tol=1e-6):
            del shown["acc"]  # the environment logs the mean reward as accuracy
        return "  ".join(f"{label} {format_number(value)}" for label, value in shown.items())

    def _tail(self, now: float) -> str:
        """Return the time left, estimated by the mean of all steps but the first, which includes warm-up."""
        if self._first_step_end is None or self._step >= self.total_steps:
            return ""
        done = self._step - self._start_step
        mean = (self._step_began - self._first_step_end) / done if done else self._first_step_end - self._began
        left = mean * (self.total_steps - self._step) - (now - self._step_began)
        return f" | {duration(max(left, 0.0))} left"

    # ---- where it goes

    def _get_console(self) -> Console:
        self._console = self._console or Console()
        return self._console

    def print(self, text: str) -> None:
        if self.mode == "live":
            self._get_console().print(text, markup=False, highlight=False)
        elif self._console is not None:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def _start_live(self) -> None:
        spinner = Spinner("dots")

        def line() -> Spinner:  # called at each refresh, so that its times advance during a long phase
            spinner.update(text=Text(self.line(), no_wrap=True, overflow="ellipsis"))
            return spinner

        self._live = Live(get_renderable=line, console=self._get_console(), refresh_per_second=4, transient=True)
        self._live.start()

    def _show_notebook(self) -> None:
        if self._display is not None:
            self._display.update({"text/plain": self.line()}, raw=True)


def _choose_mode(console: Console | None) -> str:
    ipython = sys.modules.get("IPython")  # an import is not enough: a notebook kernel must run in this process
    if ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None:
        return "notebook"
    terminal = console.is_terminal if console is not None else getattr(sys.stdout, "isatty", bool)()
    return "live" if terminal else "plain"
