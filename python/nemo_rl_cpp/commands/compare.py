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
  nemo-rl-cpp compare logs/a logs/b --out compare.html     # the newest run of each, and a page with their curves
  nemo-rl-cpp compare before after                         # two evaluations, folders that eval.save_path has named"""


def main(arguments: Sequence[str]) -> int:
    """Compares runs."""
    parser = command_parser(
        "compare", "Compare runs: results, timings, keys that differ, curves over one another.", _EXAMPLES
    )
    parser.add_argument(
        "runs", nargs="+", metavar="LOG_DIR", help="log folders, two or more; or the folders of two evaluations"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="write a page, too")
    known = parser.parse_args(arguments)
    if len(known.runs) < 2:
        parser.error("compare needs two log folders or more, such as logs/a/exp_001 logs/b/exp_001")
    return run_guarded(partial(_compare, known), known)


def _compare(arguments: argparse.Namespace) -> int:
    from nemo_rl_cpp.evals.pages import is_evaluation
    from nemo_rl_cpp.files.durable import write_atomic
    from nemo_rl_cpp.report.compare import Comparison
    from nemo_rl_cpp.report.compare_page import render_comparison
    from nemo_rl_cpp.report.compare_text import print_comparison

    try:
        if any(map(is_evaluation, arguments.runs)):
            page = _compare_evaluations(arguments.runs)
        else:
            comparison = Comparison.of(arguments.runs)
            print_comparison(comparison)
            page = render_comparison(comparison) if arguments.out is not None else ""
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(arguments.out, page, durable=False)
        print(f"page: {arguments.out}")
    return 0


def _compare_evaluations(folders: Sequence[str]) -> str:
    """Prints the comparison; its page."""
    from nemo_rl_cpp.evals.pages import Comparison, page, text_of
    from nemo_rl_cpp.report.samples import writable

    comparison = Comparison.of(folders)
    print(text_of(comparison))
    return writable(page(comparison))
