"""NeMo RL's logger: the house's, with plots, and with back ends and packages that are looked up in this module.

What replaces `wandb`, `WandbLogger`, `SummaryWriter` or `RayGpuMonitorLogger` here, for instance in a test, is what is used.
"""

import io
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nemo_rl_cpp.compat.utils.plots import logprob_error_plot, matplotlib_figure, timeline_plots
from nemo_rl_cpp.config.logger import GPUMonitoringConfig, LoggerConfig
from nemo_rl_cpp.loggers import backends as log_backends
from nemo_rl_cpp.loggers import files as log_files
from nemo_rl_cpp.loggers import interface as log_interface
from nemo_rl_cpp.loggers import logger as house
from nemo_rl_cpp.loggers import tb_events
from nemo_rl_cpp.loggers.backends import import_tracker
from nemo_rl_cpp.loggers.backends import merge_generation_workers as _merge_generation_logger_workers
from nemo_rl_cpp.loggers.backends import summarize_list as _summarize_list
from nemo_rl_cpp.loggers.folders import get_experiment_dir, get_next_experiment_dir
from nemo_rl_cpp.loggers.interface import flatten_dict, scalar_of
from nemo_rl_cpp.loggers.samples import print_message_log_samples
from nemo_rl_cpp.telemetry.monitor import RayGpuMonitorLogger


class LoggerInterface(log_interface.LoggerInterface):
    """One place that metrics go to."""

    @abstractmethod
    def log_plot(self, figure: Any, step: int, name: str) -> None:
        """Logs a figure: a matplotlib Figure or a `plots.LinePlot`."""


class TrackerPackage:
    """Stands for a package that is imported at its first use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # questions of Python itself, such as whether this can be copied
            raise AttributeError(attribute)
        return getattr(import_tracker(self._name), attribute)


wandb, mlflow, swanlab, trackio = (TrackerPackage(name) for name in ("wandb", "mlflow", "swanlab", "trackio"))


def _package(name: str) -> Any:
    """What this module calls `name`; ValueError when it is not installed."""
    package = globals()[name]
    if isinstance(package, TrackerPackage):
        import_tracker(name)
    return package


class WandbLogger(log_backends.WandbLogger, LoggerInterface):
    """Weights & Biases. A run that resumes in the same folder continues the same W&B run."""

    package = staticmethod(_package)

    def log_plot(self, figure: Any, step: int, name: str) -> None:
        """Logs a matplotlib figure as an image."""
        if (image := matplotlib_figure(figure)) is not None:
            self.run.log({name: self._wandb.Image(image)}, step=step)


class MLflowLogger(log_backends.MLflowLogger, LoggerInterface):
    """MLflow. Scalars only: lists are logged as their mean, p50, p90 and max."""

    package = staticmethod(_package)

    def log_plot(self, figure: Any, step: int, name: str) -> None:
        """Logs a matplotlib figure as an artifact."""
        if (image := matplotlib_figure(figure)) is not None:
            self._mlflow.log_figure(image, f"plots/{name}.png", save_kwargs={"bbox_inches": "tight"})


class SwanlabLogger(log_backends.SwanlabLogger, LoggerInterface):
    """SwanLab."""

    package = staticmethod(_package)

    def log_plot(self, figure: Any, step: int, name: str) -> None:
        """Logs a matplotlib figure as an image."""
        if (image := matplotlib_figure(figure)) is not None:
            self.run.log({name: self._swanlab.Image(image)}, step=step)


class TrackioLogger(log_backends.TrackioLogger, LoggerInterface):
    """Trackio, which keeps its data in a local database. A run that resumes in the same folder goes on there."""

    package = staticmethod(_package)

    def log_plot(self, figure: Any, step: int, name: str) -> None:
        """Plots are files of the run only."""


class SummaryWriter(tb_events.SummaryWriter):
    """An event file under the names of TensorBoard's writer."""

    def add_image(self, tag: str, png: bytes, global_step: int, *, width: int, height: int) -> None:
        """A PNG image."""
        self.add(global_step, [tb_events.image(tag, png, width, height)])


class TensorboardLogger(log_files.TensorboardLogger, LoggerInterface):
    """TensorBoard events: neither TensorBoard nor torch is needed to write them."""

    @staticmethod
    def new_writer(**options: Any) -> Any:
        """The `SummaryWriter` of this module."""
        return SummaryWriter(**options)

    @staticmethod
    def _coerce_to_scalar(value: Any) -> int | float | bool | str | None:
        return scalar_of(value)

    def log_plot(self, figure: Any, step: int, name: str) -> None:
        """Adds a matplotlib figure as an image; other plots are files only."""
        if (drawing := matplotlib_figure(figure)) is not None:
            buffer = io.BytesIO()
            drawing.savefig(buffer, format="png", dpi=100)
            width, height = (round(100 * inches) for inches in drawing.get_size_inches())
            self.writer.add_image(name, buffer.getvalue(), step, width=width, height=height)


class Logger(house.Logger, LoggerInterface):
    """Sends everything to metrics.jsonl, TensorBoard events, and the enabled trackers (`loggers`), and draws plots."""

    @staticmethod
    def backends() -> dict[str, Callable[..., log_interface.LoggerInterface]]:
        """The classes that this module holds, and those that were registered."""
        return house.Logger.backends() | {
            "wandb": WandbLogger,
            "swanlab": SwanlabLogger,
            "tensorboard": TensorboardLogger,
            "mlflow": MLflowLogger,
            "trackio": TrackioLogger,
        }

    @staticmethod
    def new_monitor(**options: Any) -> RayGpuMonitorLogger:
        """The `RayGpuMonitorLogger` of this module."""
        return RayGpuMonitorLogger(**options)

    def log_plot(self, figure: Any, step: int, name: str) -> None:
        """Logs a matplotlib Figure or a `plots.LinePlot`; it is also saved as plots/NAME_stepN.svg beside metrics.jsonl.

        TensorBoard and the trackers get it as a matplotlib Figure, or not at all where matplotlib is missing.
        """
        if any(isinstance(logger, log_files.JsonlLogger) for logger in self._files):
            self._write(f"plots/{name}_step{step}.svg", lambda path: _save(figure, path))
        drawn = matplotlib_figure(figure) if self.loggers else None
        if drawn is not None:
            self._each(lambda logger: logger.log_plot(drawn, step, name) if logger in self.loggers else None)

    def log_plot_per_worker_timeline_metrics(
        self, metrics: dict[int, list[Any]], step: int, prefix: str, name: str, timeline_interval: float
    ) -> None:
        """Plots one line a worker and their average. `metrics`: worker -> values `timeline_interval` seconds apart."""
        for kind, plot in timeline_plots(metrics, name, timeline_interval).items():
            self.log_plot(plot, step, f"{prefix}/{kind}_{name}")

    def log_plot_token_mult_prob_error(self, data: Mapping[str, Any], step: int, name: str) -> None:
        """Plots the log-probabilities of the sample in which generator and trainer differ most.

        `data`: token_mask, generation_logprobs, prev_logprobs [B, S], sample_mask, prompt_lengths, full_lengths [B].
        Nothing is plotted when no sample counts.
        """
        if (plot := logprob_error_plot(data)) is not None:
            self.log_plot(plot, step, name)

    def log_string_list_as_jsonl(self, to_log: list[str], filename: str) -> None:
        """Appends strings, which are JSON already, as lines to a file of the log folder."""

        def append(path: Path) -> None:
            with open(path, "a", encoding="utf-8") as file:
                file.writelines(line + "\n" for line in to_log)

        self._write(filename, append)


def _save(figure: Any, path: Path) -> None:
    if hasattr(figure, "to_svg"):
        path.write_text(figure.to_svg(), encoding="utf-8")
    else:
        figure.savefig(path, format="svg", bbox_inches="tight")


def log_container_init_timing(*args: Any, **kwargs: Any) -> None:
    """Nothing: NeMo RL's run scripts report with it how long their container took to start; there is none here."""
