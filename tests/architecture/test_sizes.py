"""Files and functions that a newcomer can hold in mind."""

import ast
import math
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 100
MAX_LOOP_LINES = 60
MAX_PARAMETERS = 8
MAX_RESULTS = 3

# More parameters than MAX_PARAMETERS: what users call, with names that they know.
FACADES = {
    "api/training.py:train_grpo": "a training run from one call; keyword-only",
    "generate.py:generate": "text from one call; keyword-only",
}


def source_files():
    for folder, suffixes in (
        ("csrc", {".h", ".cpp", ".cu", ".cuh"}),
        ("python", {".py"}),
        ("examples", {".py"}),
        ("tests", {".py", ".cpp", ".h"}),
    ):
        yield from (p for p in (ROOT / folder).rglob("*") if p.suffix in suffixes and "__pycache__" not in p.parts)


@cache
def definitions(path):
    nodes = ast.walk(ast.parse(path.read_text()))
    return [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def functions(path):
    for node in definitions(path):
        yield node.name, node.end_lineno - node.lineno + 1


def house_definitions():
    """("folder/file.py:function", its definition) of the package."""
    package = ROOT / "python" / "nemo_rl_cpp"
    for path in package.rglob("*.py"):
        yield from ((f"{path.relative_to(package).as_posix()}:{node.name}", node) for node in definitions(path))


def num_parameters(node):
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def num_results(node):
    """How many entries the tuple has that `node` returns by its annotation: 1 where that is no tuple or all its entries are
    of one type, infinity where neither their number nor their types are said."""
    returns = node.returns
    if isinstance(returns, ast.Constant) and isinstance(returns.value, str):
        returns = ast.parse(returns.value, mode="eval").body
    if not isinstance(returns, ast.Subscript) or ast.unparse(returns.value) not in ("tuple", "Tuple"):
        return 1
    entries = returns.slice.elts if isinstance(returns.slice, ast.Tuple) else [returns.slice]
    if not any(isinstance(e, ast.Constant) and e.value is ... for e in entries):
        return len(entries)
    return math.inf if ast.unparse(entries[0]) == "Any" else 1


def test_source_files_have_at_most_the_allowed_number_of_lines():
    long = {str(p.relative_to(ROOT)): n for p in source_files() if (n := p.read_text().count("\n")) > MAX_FILE_LINES}
    assert not long


def test_python_functions_have_at_most_the_allowed_number_of_lines():
    long = {
        f"{p.relative_to(ROOT)}:{name}": n
        for p in (ROOT / "python").rglob("*.py")
        for name, n in functions(p)
        if n > MAX_FUNCTION_LINES
    }
    assert not long


def test_readme_has_at_most_160_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 160


def test_training_loop_has_at_most_the_allowed_number_of_lines():
    loop = dict(functions(ROOT / "python" / "nemo_rl_cpp" / "algorithms" / "loop.py"))
    assert loop["train_loop"] <= MAX_LOOP_LINES


def test_python_functions_have_at_most_the_allowed_number_of_parameters():
    many = {name: n for name, node in house_definitions() if (n := num_parameters(node)) > MAX_PARAMETERS}
    assert sorted(many) == sorted(FACADES), f"{many}: put settings that belong together into a dataclass"


def test_python_functions_return_tuples_of_at_most_three_elements():
    many = {name: n for name, node in house_definitions() if (n := num_results(node)) > MAX_RESULTS}
    assert not many, "a NamedTuple or a dataclass gives its parts names"
