"""Writes docs/source-map.md: every file of the repository with the first sentence of its own header.

python tests/tools/source_map.py          print the page
python tests/tools/source_map.py --write  write the page
"""

import ast
import json
import re
import sys
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "source-map.md"
FOLDERS = ("python/nemo_rl_cpp", "csrc", "configs", "examples", "docs", "tests", "cmake", ".ci")
SKIPPED = {"__pycache__", "corpus"}  # the fuzzers' inputs have no headers
KINDS = {
    ".svg": "figure",
    ".png": "picture",
    ".css": "style sheet",
    ".js": "script",
    ".html": "template",
    ".json": "data",
    ".txt": "text",
}
CODE = {".h": 0, ".cuh": 1, ".cpp": 2, ".cu": 3}  # a header speaks for the sources of its name
COMMENT = re.compile(r"(?://|#)+ ?(.*)")
INTRODUCTION = """# Source map

This page lists every source file with the first sentence of the file's own header. The command
`python tests/tools/source_map.py --write` writes the page, and `tests/architecture/test_source_map.py` compares the page with
the files. [architecture.md](architecture.md) explains how the parts fit together.
"""


def header(path: Path) -> str:
    """The comment, docstring or title that a file begins with; empty without one."""
    if path.suffix == ".png":
        return KINDS[path.suffix]
    text = path.read_text()
    if path.suffix == ".py":
        return ast.get_docstring(ast.parse(text)) or ""
    if path.suffix == ".md":
        return next((line.lstrip("# ") for line in text.splitlines() if line.startswith("#")), "")
    if path.suffix == ".ipynb":
        return next(
            (
                line.lstrip("# ")
                for cell in json.loads(text)["cells"]
                for line in cell["source"]
                if line.startswith("#")
            ),
            "",
        )
    if path.suffix in KINDS:
        return KINDS[path.suffix]
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(("#pragma", "#!")) and not lines:
            continue
        match = COMMENT.match(line)
        if not match or line.startswith("#include"):
            break
        lines.append(match[1])
    return " ".join(lines) or of_the_first_include(path, text)


def of_the_first_include(path: Path, text: str) -> str:
    """A C++ source without a comment speaks by the header of its own name that it includes."""
    name = path.stem.removeprefix("test_")
    found = re.search(rf'^#include "((?:\w+/)*{name}\.h)"', text, re.M) if path.suffix in CODE else None
    if found is None:
        return ""
    return f"{'Tests' if path.stem != name else 'Implements'} `{found[1]}`"


def first_sentence(path: Path) -> str:
    sentence = re.split(r"(?<=[.])\s", " ".join(header(path).split()), maxsplit=1)[0]
    return sentence.rstrip(".:;")


def files(folder: Path) -> list[Path]:
    """Files of a folder and those below it, by folder and name, without `__init__.py` that say nothing."""
    found = (
        p for p in folder.rglob("*") if p.is_file() and not SKIPPED & set(p.parts) and p.suffix != ".pyc" and p != PAGE
    )
    kept = (p for p in found if p.name != "__init__.py" or first_sentence(p))
    return sorted(kept, key=lambda p: (str(p.parent), p.stem, CODE.get(p.suffix, 9), p.suffix))


def rows(paths: list[Path]) -> list[str]:
    """One row a file; C++ files of one name share a row, and what the first of them says."""
    made = []
    for _, same in groupby(paths, lambda p: p.stem if p.suffix in CODE else p.name):
        together = list(same)
        name = together[0].name if len(together) == 1 else f"{together[0].stem}{', '.join(p.suffix for p in together)}"
        sentence = next(filter(None, map(first_sentence, together)), "").replace("|", "\\|")
        made.append(f"| `{name}` | {sentence} |")
    return made


def page() -> str:
    lines = [INTRODUCTION]
    for folder in FOLDERS:
        for parent, paths in groupby(files(ROOT / folder), lambda p: p.parent):
            lines += [
                f"## `{parent.relative_to(ROOT)}/`",
                "",
                "| file | purpose |",
                "|---|---|",
                *rows(list(paths)),
                "",
            ]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page())
    else:
        print(page(), end="")
