"""`nemo-rl-cpp compare`: runs side by side, as a table in the terminal and as a page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from nemo_rl_cpp.command_line import command_parser, run_guarded

_EXAMPLES = """examples:
  nemo-rl-cpp compare logs/a/exp_001 logs/b/exp_001
  nemo-rl-cpp compare logs/a logs/b --out compare.html     # the newest run of each, and a page with their curves"""


def main(arguments: Sequence[str]) -> int:
    """Compares runs."""
    parser = command_parser(
        "compare", "Compare runs: results, timings, keys that differ, curves over one another.", _EXAMPLES
    )
    parser.add_argument("runs", nargs="+", metavar="LOG_DIR", help="log folders, two or more")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="write a page, too")
    known = parser.parse_args(arguments)
    if len(known.runs) < 2:
        parser.error("compare needs two log folders or more, such as logs/a/exp_001 logs/b/exp_001")
    return run_guarded(partial(_compare, known), known)


def _compare(arguments: argparse.Namespace) -> int:
    from nemo_rl_cpp.files.durable import write_atomic
    from nemo_rl_cpp.report.compare import Comparison
    from nemo_rl_cpp.report.compare_page import render_comparison
    from nemo_rl_cpp.report.compare_text import print_comparison

    try:
        comparison = Comparison.of(arguments.runs)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_comparison(comparison)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(arguments.out, render_comparison(comparison), durable=False)
        print(f"page: {arguments.out}")
    return 0
