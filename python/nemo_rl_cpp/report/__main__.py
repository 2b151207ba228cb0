"""`python -m nemo_rl_cpp.report LOG_DIR`: writes report.html of a run again from its log folder."""

import sys

from nemo_rl_cpp.report.writer import write_report


def main(arguments: list[str]) -> int:
    """The exit status: 0, or 2 for a folder without metrics."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m nemo_rl_cpp.report LOG_DIR", file=sys.stderr)
        return 2
    try:
        print(write_report(arguments[0]))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
