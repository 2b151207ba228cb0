"""A logger backend that writes each number as a line of a CSV file. Switched on by `logger.csv_enabled=true`."""

from pathlib import Path

from nemo_rl_cpp.config.base import Section, key
from nemo_rl_cpp.config.logger import register_logger
from nemo_rl_cpp.loggers.interface import LoggerInterface, prefixed


class CsvConfig(Section):
    """The keys of `logger.csv`."""

    file: str = key("metrics.csv", "name of the file")


class CsvLogger(LoggerInterface):
    def __init__(self, cfg, log_dir):
        self.path = Path(log_dir) / cfg.file

    def log_metrics(self, metrics, step, prefix="", step_metric=None, step_finished=False):
        with open(self.path, "a") as file:
            for name, value in prefixed(metrics, prefix, step_metric).items():
                if isinstance(value, (int, float)):
                    file.write(f"{step},{name},{value!r}\n")

    def log_hyperparams(self, params):
        self.path.with_suffix(".algorithm").write_text(params["grpo"]["adv_estimator"]["name"])

    def log_histogram(self, histogram, step, name):
        """Do nothing: a histogram does not fit into the table."""


register_logger("csv", CsvLogger, CsvConfig, "write a CSV file")
