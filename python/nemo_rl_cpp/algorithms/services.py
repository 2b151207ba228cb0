"""What watches and keeps a run: logs, checkpoints, clocks, the report, signals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nemo_rl_cpp.algorithms.callbacks import Callbacks
from nemo_rl_cpp.checkpoints.manager import CheckpointManager
from nemo_rl_cpp.interrupts import GracefulStop
from nemo_rl_cpp.loggers.logger import Logger
from nemo_rl_cpp.report import ReportWriter
from nemo_rl_cpp.report.alerts import Alerts
from nemo_rl_cpp.report.progress import Progress
from nemo_rl_cpp.telemetry.chrome_trace import ChromeTrace
from nemo_rl_cpp.telemetry.memory import PhaseMemory
from nemo_rl_cpp.telemetry.starvation import StarvationWatch
from nemo_rl_cpp.telemetry.timer import TimeoutChecker, Timer

if TYPE_CHECKING:
    from nemo_rl_cpp.algorithms.step_metrics import Metrics


@dataclass
class RunServices:
    """What watches and keeps a run: shared by every algorithm, and each part may be left out.

    Attributes:
        stop: asked between steps whether the user wants the run to end.
        timeout: says once when the run must save and end.
        report: writes report.html; None: no page.
        history: one dictionary a step of this process: `step`, the metrics, `seconds` and rates.
        validations: one dictionary a validation of this process: `step` and its metrics.
        alerts: what is serious about the run so far, for the terminal.
        callbacks: the user's code that hears of steps, validations, checkpoints and the end.
        starvation: says where other programs have the run's cores.
    """

    logger: Logger | None
    checkpoints: CheckpointManager | None
    timer: Timer = field(default_factory=Timer)
    progress: Progress | None = None
    report: ReportWriter | None = None
    memory: PhaseMemory | None = None
    trace: ChromeTrace | None = None
    stop: GracefulStop = field(default_factory=GracefulStop)
    timeout: TimeoutChecker = field(default_factory=lambda: TimeoutChecker(None))
    history: list[Metrics] = field(default_factory=list)
    validations: list[Metrics] = field(default_factory=list)
    alerts: Alerts = field(default_factory=Alerts)
    callbacks: Callbacks = field(default_factory=Callbacks)
    starvation: StarvationWatch = field(default_factory=StarvationWatch)

    def __post_init__(self) -> None:
        for observer in (self.progress, self.memory, self.trace):
            if observer is not None:
                self.timer.subscribe(observer)

    @property
    def saves(self) -> bool:
        """Whether checkpoints are written."""
        return self.checkpoints is not None and self.checkpoints.enabled
