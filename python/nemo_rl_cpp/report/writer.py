"""Keeps the report.html of a log folder up to date during a run."""

import json
import platform
import sys
import time
from dataclasses import replace
from pathlib import Path

from nemo_rl_cpp.config.access import to_json, written
from nemo_rl_cpp.config.loader import config_folders
from nemo_rl_cpp.config.master import MasterConfig
from nemo_rl_cpp.files.durable import write_atomic
from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.loggers.files import HYPERPARAMS, METRICS
from nemo_rl_cpp.report.history import MetricHistory, read_json, read_metrics
from nemo_rl_cpp.report.page import RunFacts, render
from nemo_rl_cpp.report.samples import SampleBook, TokenBytes, writable

REPORT = "report.html"
FACTS = "report_facts.json"
_STORED = ("title", "status", "message", "total_steps", "environment", "given")


class ReportWriter:
    """A writer of `<log_dir>/report.html`, from metrics.jsonl and the rollout files in the folder.

    `update()` after each step usually costs almost nothing: it writes the page at most every `min_interval` seconds,
    and rarely enough that writing takes less than 2 % of the time. The page is replaced atomically, so the file is
    always complete, even after a crash. `write_report(log_dir)` writes it from the files alone.
    """

    def __init__(
        self,
        log_dir: Path | str,
        config: MasterConfig | None = None,
        total_steps: int | None = None,
        title: str | None = None,
        min_interval: float = 5.0,
        token_bytes: TokenBytes | None = None,
    ) -> None:
        """Read the files that the folder already has. Without `config`, use hyperparams.json and the facts of an
        earlier report. `token_bytes` is as in `SampleBook`."""
        self.log_dir = Path(log_dir)
        self.path = self.log_dir / REPORT
        self.min_interval = min_interval
        self._book = SampleBook(self.log_dir, token_bytes)
        self._last_written = -float("inf")
        self._cost = 0.0
        self._warned = False
        facts = read_json(self.log_dir / FACTS)
        self._facts = RunFacts(
            title=title or str(facts.get("title") or "/".join(self.log_dir.absolute().parts[-2:])),
            status=str(facts.get("status", "running")),
            message=str(facts.get("message", "")),
            total_steps=total_steps or facts.get("total_steps"),
            config=written(config) if config is not None else read_json(self.log_dir / HYPERPARAMS),
            environment=facts.get("environment") or _environment(),
            given=keys_set(config) if config is not None else facts.get("given"),
        )

    def start(self) -> None:
        """Set the run's status to running, also if the run resumes, and write the first page."""
        self.update(status="running", force=True)

    def update(self, status: str | None = None, message: str | None = None, force: bool = False) -> bool:
        """Write the page if it is due or `force` is set, and return whether it was written. If it cannot be written,
        print the reason once and let the run continue."""
        changed = {name: text for name, text in (("status", status), ("message", message)) if text is not None}
        self._facts = replace(self._facts, **changed)
        now = time.monotonic()
        if not force and now - self._last_written < max(self.min_interval, 50 * self._cost):
            return False
        try:
            self._write()
        except (OSError, ValueError) as error:
            if not self._warned:
                text = f"{self.path} could not be written: {error}"
                print(text.encode("utf-8", "backslashreplace").decode(), file=sys.stderr)
            self._warned = True
            return False
        finally:
            self._last_written = time.monotonic()
            self._cost = self._last_written - now
        return True

    def finish(self, status: str = "finished", message: str = "") -> None:
        """Write the last page. `status` is "finished", "stopped in time", "interrupted" or "failed"."""
        self.update(status=status, message=message, force=True)

    def _write(self) -> None:
        history = MetricHistory(read_metrics(self.log_dir / METRICS), self._facts.config)
        page = render(history, replace(self._facts, samples=self._book.samples()))
        stored = {name: getattr(self._facts, name) for name in _STORED}
        write_atomic(self.log_dir / FACTS, json.dumps(to_json(stored)), durable=False)
        write_atomic(self.path, writable(page), durable=False)  # the folder's name may hold lone surrogates


def write_report(log_dir: Path | str) -> Path:
    """Write report.html from the log folder of a finished, running or crashed run, and return its path.

    Raise ValueError if the folder contains no metrics.jsonl.
    """
    if not (Path(log_dir) / METRICS).exists():
        raise ValueError(f"{log_dir} holds no {METRICS}: give the log folder of a run, such as logs/exp_001")
    writer = ReportWriter(log_dir)
    writer._write()
    return writer.path


def keys_set(config: MasterConfig) -> list[dict[str, Plain]]:
    """Return {"key", "value", "where"} for each configuration key set on the command line, in a call, or in the user's
    own file."""
    values, positions = written(config), config.positions
    rows: dict[str, dict[str, Plain]] = {}
    for key, where in positions.items():
        is_section = any(other.startswith((f"{key}.", f"{key}[")) for other in positions)
        place = None if is_section else _place(where)
        if place is not None:
            name = key.partition("[")[0]  # a list is shown whole
            rows[name] = {"key": name, "value": _value_at(values, name), "where": place}
    return list(rows.values())


def _value_at(values: Plain, key: str) -> Plain:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


def _place(where: str) -> str | None:
    """Return a readable name of the place that set a key, or None if it is a shipped file."""
    if where.startswith("override "):
        return "command line"
    file, _, number = where.rpartition(":")
    if not number.isdigit():
        return where
    shipped = any(Path(file).resolve().is_relative_to(folder.resolve()) for folder in config_folders())
    return None if shipped else f"{Path(file).name}:{number}"


def _environment() -> dict[str, str]:
    facts = {"Python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    torch = sys.modules.get("torch")
    return facts | ({"torch": str(torch.__version__)} if torch is not None else {})
