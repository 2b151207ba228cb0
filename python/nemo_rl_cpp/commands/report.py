"""`nemo-rl-cpp report`: report.html of a log folder, written again."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from nemo_rl_cpp.command_line import command_parser, run_guarded

_EXAMPLES = """examples:
  nemo-rl-cpp report logs/exp_001
  nemo-rl-cpp report logs           # the newest run of the folder"""


def main(arguments: Sequence[str]) -> int:
    """Writes the page and prints where it is."""
    parser = command_parser("report", "Write report.html of a run again from its log folder.", _EXAMPLES)
    parser.add_argument("log_dir", help="log folder of a run, or the folder that holds exp_001, exp_002, ...")
    known = parser.parse_args(arguments)
    return run_guarded(partial(_write, known.log_dir), known)


def _write(log_dir: str) -> int:
    from nemo_rl_cpp.report import write_report
    from nemo_rl_cpp.report.compare import run_folder

    try:
        print(write_report(run_folder(Path(log_dir))))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
