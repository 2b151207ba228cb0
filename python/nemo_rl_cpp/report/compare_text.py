"""A comparison for the terminal."""

import shutil
import textwrap
from collections.abc import Sequence

from nemo_rl_cpp.report.compare import Comparison, Row

_LONGEST = 60


def print_comparison(comparison: Comparison) -> None:
    """Prints the results, the timings and the keys that differ."""
    names = [run.name for run in comparison.runs]
    blocks = [("", comparison.results())]
    timings = [Row(label, [f"{seconds:.3g}" for seconds in means]) for label, means in comparison.timings()]
    blocks.append(("seconds a step, by stage", timings))
    keys = comparison.differing_keys()
    blocks.append(("keys that differ", keys))
    blocks = [(title, rows) for title, rows in blocks if rows]
    widths = _widths(names, [row for _, rows in blocks for row in rows])
    for title, rows in blocks:
        print(_line(title, names, widths))
        print("  ".join("─" * width for width in widths))
        for row in rows:
            _print_row(row, widths)
        print()
    if not keys:
        print(textwrap.fill(comparison.no_keys(), max(shutil.get_terminal_size().columns, 40)) + "\n")
    if verdict := comparison.verdict():
        print(textwrap.fill(verdict, max(shutil.get_terminal_size().columns, 40)))


def _widths(names: Sequence[str], rows: Sequence[Row]) -> list[int]:
    first = max((len(row.name) for row in rows), default=0)
    first = max(first, len("seconds a step, by stage"))
    columns = [max(len(name), *(min(len(row.values[i]), _LONGEST) for row in rows)) for i, name in enumerate(names)]
    room = max(shutil.get_terminal_size().columns - first - 2 * len(columns), 16 * len(columns))
    limit = max(room // len(columns), 12)
    return [first, *(min(column, limit) for column in columns)]


def _line(head: str, cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(f"{cell:<{width}}" for cell, width in zip((head, *cells), widths, strict=True)).rstrip()


def _print_row(row: Row, widths: Sequence[int]) -> None:
    cells = [textwrap.wrap(value, width) or [""] for value, width in zip(row.values, widths[1:], strict=True)]
    for number in range(max(map(len, cells))):
        parts = [cell[number] if number < len(cell) else "" for cell in cells]
        print(_line(row.name if number == 0 else "", parts, widths))
