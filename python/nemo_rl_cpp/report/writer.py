"""Keeps report.html of a log folder up to date while a run goes on."""

import json
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from html import escape
from pathlib import Path

from nemo_rl_cpp.config.access import redact, to_json, to_plain, written
from nemo_rl_cpp.config.base import Settings
from nemo_rl_cpp.files.durable import write_atomic
from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.loggers.files import HYPERPARAMS, METRICS
from nemo_rl_cpp.report.given import given_keys
from nemo_rl_cpp.report.history import JsonlTail, MetricHistory
from nemo_rl_cpp.report.page import RunFacts, render
from nemo_rl_cpp.report.samples import SampleBook, TokenBytes, writable

REPORT = "report.html"
FACTS = "report_facts.json"
_STORED = ("title", "status", "message", "total_steps", "defaults", "environment", "given", "base")


class ReportWriter:
    """Writes `<log_dir>/report.html` from metrics.jsonl and the rollout files of the folder.

    `update()` after each step costs next to nothing most of the time: the page is written at most every `min_interval`
    seconds, and so seldom that writing takes less than 2 % of the time. The page replaces the old one in one step, so
    there is a whole page at any moment, also after a crash; `write_report(log_dir)` makes it again from the files alone.
    """

    def __init__(
        self,
        log_dir: Path | str,
        config: Settings | None = None,
        defaults: Mapping[str, object] | None = None,
        total_steps: int | None = None,
        title: str | None = None,
        min_interval: float = 5.0,
        token_bytes: TokenBytes | None = None,
    ) -> None:
        """`config` and `defaults`: resolved configuration and the schema's defaults (mappings or models); without them
        the folder's own hyperparams.json and an earlier report's facts are used. `token_bytes`: see `SampleBook`."""
        self.log_dir = Path(log_dir)
        self.path = self.log_dir / REPORT
        self.min_interval = min_interval
        self._tail = JsonlTail(self.log_dir / METRICS)
        self._book = SampleBook(self.log_dir, token_bytes)
        self._last_written = -float("inf")
        self._cost = 0.0
        self._warned = False
        facts = _read_json(self.log_dir / FACTS)
        steps = total_steps if total_steps is not None else facts.get("total_steps")
        plain_defaults = _mapping(redact(to_plain(defaults)) if defaults is not None else facts.get("defaults"))
        given, base = _given(config, plain_defaults, facts)
        self._facts = RunFacts(
            title=title or str(facts.get("title") or "/".join(self.log_dir.absolute().parts[-2:])),
            status=str(facts.get("status", "running")),
            message=str(facts.get("message", "")),
            total_steps=steps if isinstance(steps, int) else None,
            config=written(config) if config is not None else _read_json(self.log_dir / HYPERPARAMS),
            defaults=plain_defaults,
            environment=_mapping(facts.get("environment")) or _environment(),
            given=given,
            base=base,
        )
        self._history = MetricHistory(settings=self._facts.config)

    def start(self) -> None:
        """Says that the run goes on (also after a resume) and writes the first page."""
        self.update(status="running", force=True)

    def update(self, status: str | None = None, message: str | None = None, force: bool = False) -> bool:
        """Writes the page if it is time to, or with `force`; True when it did. A page that cannot be written does not
        end the run: False is returned and the reason is shown once."""
        if status is not None:
            self._facts = replace(self._facts, status=status)
        if message is not None:
            self._facts = replace(self._facts, message=message)
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
        """Writes the last page: status finished, stopped in time, interrupted or failed."""
        self.update(status=status, message=message, force=True)

    def _write(self) -> None:
        rows, restarted = self._tail.new_rows()
        if restarted:
            self._history = MetricHistory(settings=self._facts.config)
        for row in rows:
            self._history.add(row)
        page = render(self._history, replace(self._facts, samples=self._book.samples()))
        page = writable(page)  # a folder's name that is no UTF-8 holds lone surrogates
        stored = {name: getattr(self._facts, name) for name in _STORED}
        write_atomic(self.log_dir / FACTS, json.dumps(to_json(stored)), durable=False)
        write_atomic(self.path, page, durable=False)

    def _repr_html_(self) -> str:
        """The page inside a notebook."""
        if not self.path.exists():
            self.update(force=True)
        page = self.path.read_text(encoding="utf-8")
        return f'<iframe srcdoc="{escape(page, quote=True)}" style="width:100%;height:720px;border:0"></iframe>'


def write_report(
    log_dir: Path | str, config: Settings | None = None, defaults: Mapping[str, object] | None = None
) -> Path:
    """Writes report.html of a finished, running or crashed run from its log folder; returns its path.

    ValueError when the folder holds no metrics.jsonl.
    """
    if not (Path(log_dir) / METRICS).exists():
        raise ValueError(f"{log_dir} holds no {METRICS}: give the log folder of a run, such as logs/exp_001")
    writer = ReportWriter(log_dir, config, defaults)
    writer._write()
    return writer.path


def _given(
    config: Settings | None, defaults: Mapping[str, Plain], facts: Mapping[str, Plain]
) -> tuple[list[dict[str, Plain]] | None, str]:
    """What the user set, and on top of which shipped file: of the configuration, or as an earlier report knew it."""
    found = given_keys(config, defaults)
    if found is not None:
        return [key._asdict() for key in found.keys], found.base
    stored = facts.get("given")
    rows = (
        [row for row in stored if isinstance(row, dict) and row.keys() >= {"key", "value", "before", "where"}]
        if isinstance(stored, list)
        else None
    )
    return rows, str(facts.get("base") or "")


def _environment() -> dict[str, str]:
    facts = {"Python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    torch = sys.modules.get("torch")
    return facts | ({"torch": str(torch.__version__)} if torch is not None else {})


def _read_json(path: Path) -> dict[str, Plain]:
    try:
        return _mapping(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _mapping(value: Plain) -> dict[str, Plain]:
    return value if isinstance(value, dict) else {}
