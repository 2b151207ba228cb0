"""`nemo-rl-cpp compare`: runs or evaluations side by side, as a table in the terminal and as a page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from nemo_rl_cpp.command_line import command_parser, run_guarded

_EXAMPLES = """examples:
  nemo-rl-cpp compare logs/a/exp_001 logs/b/exp_001
  nemo-rl-cpp compare logs/a logs/b --out compare.html     # the newest run of each, and a page with their curves
  nemo-rl-cpp compare before after                         # evaluations, folders that eval.save_path has named"""


def main(arguments: Sequence[str]) -> int:
    """Compares runs."""
    parser = command_parser(
        "compare",
        "Compare runs or evaluations: results, keys that differ, curves, timings, prompts that changed.",
        _EXAMPLES,
    )
    parser.add_argument(
        "runs", nargs="+", metavar="LOG_DIR", help="log folders, or folders of evaluations, two or more"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="write a page, too")
    known = parser.parse_args(arguments)
    if len(known.runs) < 2:
        parser.error("compare needs two log folders or more, such as logs/a/exp_001 logs/b/exp_001")
    return run_guarded(partial(_compare, known), known)


def _compare(arguments: argparse.Namespace) -> int:
    from nemo_rl_cpp.evals.pages import compare_evaluations, is_evaluation
    from nemo_rl_cpp.files.durable import write_atomic
    from nemo_rl_cpp.report.compare import compare_runs

    compare = compare_evaluations if any(map(is_evaluation, arguments.runs)) else compare_runs
    try:
        comparison = compare(arguments.runs)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    comparison.print()
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(arguments.out, comparison.page(), durable=False)
        print(f"page: {arguments.out}")
    return 0
