"""Prints the tree of README.md: every source file with the first sentence of its own header.

python tests/tools/readme_tree.py          print it
python tests/tools/readme_tree.py --write  put it into README.md
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- tree: written by tests/tools/readme_tree.py -->", "<!-- end of tree -->"
FOLDERS = ("csrc", "python/nemo_rl_cpp", "configs", "examples")
SUFFIXES = {".h", ".cu", ".cuh", ".py", ".yaml", ".ipynb", ".txt"}
WIDTH = 118


def first_sentence(path: Path) -> str:
    text = path.read_text()
    if path.suffix == ".py":
        header = ast.get_docstring(ast.parse(text)) or ""
    elif path.suffix in {".yaml", ".h", ".cu", ".cuh"}:
        lines = []
        for line in text.splitlines():
            if line.startswith("#pragma"):
                continue
            match = re.match(r"(?://|#)+ ?(.*)", line)
            if not match or line.startswith("#include"):
                break
            lines.append(match[1])
        header = " ".join(lines)
    else:
        header = ""
    sentence = re.split(r"(?<=[.])\s", " ".join(header.split()), maxsplit=1)[0]
    return sentence.rstrip(".:;")


def files(folder: Path) -> list[Path]:
    found = (p for p in folder.rglob("*") if p.is_file() and p.suffix in SUFFIXES and "__pycache__" not in p.parts)
    return sorted(
        (p for p in found if p.name != "__init__.py" or first_sentence(p)), key=lambda p: (str(p.parent), p.name)
    )


def tree() -> str:
    lines = []
    for folder in FOLDERS:
        current = None
        for path in files(ROOT / folder):
            relative = path.relative_to(ROOT)
            if relative.parent != current:
                current = relative.parent
                lines.append(f"{current}/")
            line = f"  {relative.name:<34} {first_sentence(path)}".rstrip()
            lines.append(line if len(line) <= WIDTH else line[: WIDTH - 3].rsplit(" ", 1)[0] + " ...")
    return "\n".join(lines)


def block() -> str:
    return f"{BEGIN}\n```text\n{tree()}\n```\n{END}"


def replaced(readme: str) -> str:
    return re.sub(re.escape(BEGIN) + r".*?" + re.escape(END), lambda _: block(), readme, flags=re.S)


if __name__ == "__main__":
    if "--write" in sys.argv:
        path = ROOT / "README.md"
        path.write_text(replaced(path.read_text()))
    else:
        print(tree())
