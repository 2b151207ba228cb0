"""What a report calls serious, for the terminal: as it is found, and once more when the run ends."""

from collections.abc import Mapping

from nemo_rl_cpp.config.access import as_number
from nemo_rl_cpp.report.findings import Finding, find
from nemo_rl_cpp.report.history import MetricHistory

_FIRST_LOOK = 3  # steps: one step of a small batch proves nothing


class Alerts:
    """Follows the metrics of this process's steps, with or without a report.

    Findings are looked for at every step at first and ever more seldom (each twentieth of the run so far), so that a long run
    spends next to nothing on them.
    """

    def __init__(self, settings: Mapping[str, object] | None = None) -> None:
        """`settings`: the run's configuration as a plain mapping, see `MetricHistory`."""
        self.history = MetricHistory(settings=settings)
        self._steps = 0
        self._next = _FIRST_LOOK
        self._told: set[str] = set()

    def validation(self, step: int, metrics: Mapping[str, object]) -> None:
        """Takes in the metrics of a validation."""
        self._add(step, metrics, "validation")

    def step(self, step: int, metrics: Mapping[str, object]) -> list[str]:
        """Takes in a step; what is serious and was not said before, a line each."""
        self._add(step, metrics, "train")
        self._steps += 1
        if self._steps < self._next:
            return []
        self._next = self._steps + max(1, self._steps // 20)
        return [_line(finding) for finding in self.serious() if self._is_new(finding)]

    def serious(self) -> list[Finding]:
        """The serious findings, each piece of advice once: the consequences of one cause share it."""
        found = [finding for finding in find(self.history) if finding.level == "bad"]
        return list({finding.advice: finding for finding in reversed(found)}.values())[::-1]

    @property
    def learned_nothing(self) -> bool:
        """Whether no step of this process changed the policy: every gradient was 0."""
        norms = self.history.curve("train/grad_norm").values
        return bool(norms) and all(norm == 0 for norm in norms)

    def table(self) -> dict[str, str]:
        """Rows for the table at the end of a run."""
        return {
            f"serious {number}" if number > 1 else "serious": _line(finding, "")
            for number, finding in enumerate(self.serious(), start=1)
        }

    def _add(self, step: int, metrics: Mapping[str, object], prefix: str) -> None:
        numbers = {f"{prefix}/{name}": value for name, value in metrics.items() if as_number(value) is not None}
        self.history.add({"step": step, **numbers})

    def _is_new(self, finding: Finding) -> bool:
        known = finding.metric in self._told
        self._told.add(finding.metric)
        return not known


def _line(finding: Finding, head: str = "serious: ") -> str:
    return f"{head}{finding.title}. {finding.advice}".rstrip()
