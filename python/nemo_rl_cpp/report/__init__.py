"""`report.html`: one self-contained page about a run, rewritten during the run."""

from nemo_rl_cpp.report.writer import ReportWriter, write_report

__all__ = ["ReportWriter", "write_report"]
