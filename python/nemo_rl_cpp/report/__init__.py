"""`report.html`: a self-contained page about one run, updated while the run continues."""

from nemo_rl_cpp.report.page import ReportWriter, write_report

__all__ = ["ReportWriter", "write_report"]
