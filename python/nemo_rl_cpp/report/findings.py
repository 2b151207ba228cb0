"""What the numbers of a run say, in plain words."""

# the modules of the rules register them when they are imported
from nemo_rl_cpp.report import findings_health, findings_learning  # noqa: F401
from nemo_rl_cpp.report.finding import LEVELS, RULES, Finding, Rule
from nemo_rl_cpp.report.history import MetricHistory


def rules() -> list[Rule]:
    """All rules, in the order of their definition."""
    return list(RULES)


def find(history: MetricHistory) -> list[Finding]:
    """Every finding that applies, the worst first."""
    found = [finding for rule in rules() if (finding := rule(history)) is not None]
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))
