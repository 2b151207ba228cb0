"""Who may import whom in the Python package, read from the tables of docs/architecture.md."""

import re
from functools import cache

import pytest
from architecture.python_imports import NAME, ROOT, circles, imports, modules

PAGE = ROOT / "docs" / "architecture.md"
PACKAGE = ROOT / "python" / NAME
PACKAGES = {name.split(".")[0] for name in modules(PACKAGE)} - {""}


@cache  # every process of a run collects this file, and one needs the graph
def graph():
    return imports(PACKAGE)


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def names(cell):
    return re.findall(r"`([\w.]+)`", cell)


def table_below(header):
    """The rows of the first table with this header."""
    lines = PAGE.read_text().splitlines()
    rows = []
    for line in lines[lines.index(header) + 2 :]:
        if not line.startswith("|"):
            return rows
        rows.append(cells(line))
    return rows


ROWS = table_below("| package | holds | may import |")
FOUNDATION = set(names(ROWS[0][0]))
ALLOWED = {
    name: PACKAGES if may == "all" else {name, *names(may)} | FOUNDATION
    for first, _, may in ROWS
    for name in names(first)
}


def against_the_table(module, imported):
    first, second = module.split(".")[0], imported.split(".")[0]
    return second not in ALLOWED[first] | {first}


def test_import_table_in_the_architecture_page_lists_exactly_the_existing_packages():
    assert set(ALLOWED) == PACKAGES
    assert {name for allowed in ALLOWED.values() for name in allowed} <= PACKAGES


def test_import_table_allows_each_package_to_import_only_packages_listed_above_it():
    """Rows may import rows above them alone, so that packages form no circle."""
    above = set(FOUNDATION)
    order = [name for first, _, _ in ROWS for name in names(first)]
    for first, _, may in ROWS[1:]:
        if may != "all":
            assert set(names(may)) <= above, (
                f"{first} may import {may}, of which {set(names(may)) - above} stand below it"
            )
        above |= set(names(first))
    assert len(order) == len(set(order))


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_each_package_imports_only_packages_that_the_import_table_allows(package):
    wrong = [
        f"{module} imports {imported}"
        for module, found in graph().items()
        for imported in sorted(found)
        if module.split(".")[0] == package and against_the_table(module, imported)
    ]
    assert not wrong, f"{wrong}: move the function, or let the row of docs/architecture.md allow it"


def test_python_modules_have_no_import_cycles():
    assert {tuple(sorted(group)) for group in circles(graph())} == set()


def test_import_graph_covers_every_form_of_import_statement(tmp_path):
    package = tmp_path / NAME
    (package / "a").mkdir(parents=True)
    for name, text in {
        "__init__.py": "",
        "a/__init__.py": "from . import one",
        "a/one.py": f"import {NAME}.b\nfrom ..b import something\n",
        "a/two.py": f"def f():\n    from {NAME} import b\n    from .one import g\n",
        "b.py": f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import {NAME}.a.two\nimport torch\n",
    }.items():
        (package / name).write_text(text)
    graph = imports(package)
    assert graph == {"": set(), "a": {"a.one"}, "a.one": {"b"}, "a.two": {"b", "a.one"}, "b": set()}
    assert circles(graph) == set()
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {frozenset("abc")}
