"""The commands that read log folders: `report` and `compare`."""

from collections.abc import Sequence
from pathlib import Path

from nemo_rl_cpp.command_line import command_parser
from nemo_rl_cpp.evals.results import compare_evaluations, is_evaluation
from nemo_rl_cpp.files.durable import write_atomic
from nemo_rl_cpp.report import write_report
from nemo_rl_cpp.report.compare import compare_runs, run_folder

_REPORT_EXAMPLES = """examples:
  nemo-rl-cpp report logs/exp_001
  nemo-rl-cpp report logs           # the newest run of the folder"""
_COMPARE_EXAMPLES = """examples:
  nemo-rl-cpp compare logs/a/exp_001 logs/b/exp_001
  nemo-rl-cpp compare logs/a logs/b --out compare.html     # the newest run of each, and a page with their curves
  nemo-rl-cpp compare before after                         # evaluations, folders that eval.save_path has named"""


def report(arguments: Sequence[str]) -> int:
    """Run the command `report`: rewrite report.html of a log folder and print its path. Return the exit status."""
    parser = command_parser("report", "Write report.html of a run again from its log folder.", _REPORT_EXAMPLES)
    parser.add_argument("log_dir", help="log folder of a run, or the folder that holds exp_001, exp_002, ...")
    known = parser.parse_args(arguments)
    print(write_report(run_folder(Path(known.log_dir))))
    return 0


def compare(arguments: Sequence[str]) -> int:
    """Run the command `compare`: print tables for runs or evaluations, and write a page. Return the exit status."""
    what = "Compare runs or evaluations: results, keys that differ, curves, prompts that changed."
    parser = command_parser("compare", what, _COMPARE_EXAMPLES)
    parser.add_argument("runs", nargs="+", metavar="LOG_DIR", help="two or more folders of logs or of evaluations")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="write the report page of the runs, too")
    known = parser.parse_args(arguments)
    if len(known.runs) < 2:
        parser.error("compare needs two log folders or more, such as logs/a/exp_001 logs/b/exp_001")

    of_evaluations = any(map(is_evaluation, known.runs))
    if of_evaluations and known.out is not None:
        parser.error("--out writes the page of runs; evaluations are compared in the terminal: omit --out")
    comparison = (compare_evaluations if of_evaluations else compare_runs)(known.runs)
    comparison.print()
    if known.out is not None:
        known.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(known.out, comparison.page(), durable=False)
        print(f"page: {known.out}")
    return 0
