"""What watches and keeps a run: logs, checkpoints, clocks, the report, signals."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl_cpp.algorithms.callbacks import Callbacks
from nemo_rl_cpp.checkpoints.manager import CheckpointManager
from nemo_rl_cpp.data.token_bytes import bytes_of_token
from nemo_rl_cpp.interrupts import GracefulStop
from nemo_rl_cpp.loggers.logger import Logger
from nemo_rl_cpp.report import ReportWriter
from nemo_rl_cpp.report.alerts import Alerts
from nemo_rl_cpp.report.defaults import schema_defaults
from nemo_rl_cpp.report.progress import Progress
from nemo_rl_cpp.telemetry.chrome_trace import ChromeTrace
from nemo_rl_cpp.telemetry.memory import PhaseMemory
from nemo_rl_cpp.telemetry.starvation import StarvationWatch
from nemo_rl_cpp.telemetry.timer import TimeoutChecker, Timer

if TYPE_CHECKING:
    from nemo_rl_cpp.algorithms.step_metrics import Metrics
    from nemo_rl_cpp.algorithms.train_state import TrainState
    from nemo_rl_cpp.config.master import TrainMasterConfig
    from nemo_rl_cpp.data.interfaces import TokenizerType


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


def make_services(
    config: TrainMasterConfig, logger: Logger | None, checkpoints: CheckpointManager | None, state: TrainState, tokenizer: TokenizerType
) -> RunServices:  # fmt: skip
    """What watches and keeps the run that the configuration describes."""
    report = trace = None
    steps = config.loop.max_num_steps
    if logger is not None and config.logger.chrome_trace:
        trace = ChromeTrace(Path(logger.log_dir) / f"trace_from_step_{state.step + 1}.json", config.title)
    if logger is not None and config.logger.report:
        report = ReportWriter(
            logger.log_dir, config, schema_defaults(config), total_steps=steps, title=config.title,
            token_bytes=bytes_of_token(tokenizer),
        )  # fmt: skip
    return RunServices(
        logger=logger,
        checkpoints=checkpoints,
        progress=Progress(steps, state.step),
        report=report,
        memory=PhaseMemory(),
        trace=trace,
        stop=GracefulStop(),
        timeout=TimeoutChecker(config.checkpointing.checkpoint_must_save_by, fit_last_save_time=True),
    )
