"""Files and functions that a newcomer can hold in mind."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 100
MAX_LOOP_LINES = 60


def source_files():
    for folder, suffixes in (
        ("csrc", {".h", ".cpp", ".cu", ".cuh"}),
        ("python", {".py"}),
        ("examples", {".py"}),
        ("tests", {".py", ".cpp", ".h"}),
    ):
        yield from (p for p in (ROOT / folder).rglob("*") if p.suffix in suffixes and "__pycache__" not in p.parts)


def functions(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, node.end_lineno - node.lineno + 1


def test_files_are_short():
    long = {
        str(p.relative_to(ROOT)): n for p in source_files() if (n := len(p.read_text().splitlines())) > MAX_FILE_LINES
    }
    assert not long


def test_python_functions_are_short():
    long = {
        f"{p.relative_to(ROOT)}:{name}": n
        for p in (ROOT / "python").rglob("*.py")
        for name, n in functions(p)
        if n > MAX_FUNCTION_LINES
    }
    assert not long


def test_the_training_loop_is_one_page():
    loop = dict(functions(ROOT / "python" / "nemo_rl_cpp" / "algorithms" / "loop.py"))
    assert loop["train_loop"] <= MAX_LOOP_LINES
