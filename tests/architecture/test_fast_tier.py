"""The fast tier leaves out folders and single tests, but no package."""

import ast
from pathlib import Path

import pytest
from tiers import SLOW_FOLDERS, TESTS

PACKAGE = TESTS.parent / "python" / "nemo_rl_cpp"


def fast_tests(path: Path) -> int:
    """How many tests of a file the fast tier keeps; a parametrised one counts once."""
    tree = ast.parse(path.read_text())
    marks = (
        node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    )
    if any(is_slow(mark.value) for mark in marks):
        return 0
    tests = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))
    return sum(not any(is_slow(d) for d in test.decorator_list if not isinstance(d, ast.Call)) for test in tests)


def is_slow(node: ast.expr) -> bool:
    return "pytest.mark.slow" in ast.unparse(node)


def test_only_three_test_folders_are_marked_slow_entirely():
    assert set(SLOW_FOLDERS) == {"integration", "parity", "unit/cuda"}  # a folder that is added takes many tests away
    assert all(list((TESTS / folder).rglob("test_*.py")) for folder in SLOW_FOLDERS)


@pytest.mark.parametrize("package", sorted(p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()))
def test_every_package_has_tests_that_are_not_marked_slow(package):
    folder = TESTS / "unit" / package
    assert f"unit/{package}" not in SLOW_FOLDERS
    assert sum(fast_tests(path) for path in folder.rglob("test_*.py")) >= 3


@pytest.mark.parametrize("path", sorted((TESTS / "unit" / "ops").glob("test_*.py")), ids=lambda path: path.stem)
def test_every_op_test_file_has_tests_that_are_not_marked_slow(path):
    assert fast_tests(path) > 0
