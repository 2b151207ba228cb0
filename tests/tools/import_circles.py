"""Finds the circles among the package's modules: groups of modules that import one another, directly or by way of others.

Imports under `if TYPE_CHECKING` do not run and do not count. `from package import module` counts as an import of the module.
A package whose `__init__` only names what its modules hold is an ordinary module here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "nemo_rl_cpp"


def name_of(path: Path, source: Path) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def statements(node: ast.AST, lazy: bool) -> Iterator[ast.stmt]:
    """Import statements in `node`, those inside functions only with `lazy`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        elif lazy or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from statements(child, lazy)


def imported(statement: ast.stmt, module: str, is_package: bool, known: set[str]) -> Iterator[str]:
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names if alias.name in known)
        return
    base = statement.module or ""
    if statement.level:
        up = module.split(".")[: len(module.split(".")) - statement.level + is_package]
        base = ".".join([*up, base]).rstrip(".")
    for alias in statement.names:
        inner = f"{base}.{alias.name}"
        if inner in known:
            yield inner
        elif base in known:
            yield base


def graph(root: Path, lazy: bool) -> dict[str, set[str]]:
    """module -> the modules of the package that it imports."""
    source = root / "python"
    files = {name_of(path, source): path for path in sorted((source / PACKAGE).rglob("*.py"))}
    known = set(files)
    return {
        module: {
            target
            for statement in statements(ast.parse(path.read_text()), lazy)
            for target in imported(statement, module, path.name == "__init__.py", known)
            if target != module
        }
        for module, path in files.items()
    }


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected groups of more than one module (Tarjan), largest first."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = low[module] = len(order)
        stack.append(module)
        for target in sorted(edges[module]):
            if target not in order:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], order[target])
        if low[module] == order[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                found.append(sorted(group))

    for module in sorted(edges):
        if module not in order:
            visit(module)
    return sorted(found, key=lambda group: (-len(group), group))
