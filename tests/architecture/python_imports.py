"""The modules of the package and the imports between them, read from their syntax trees."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAME = "nemo_rl_cpp"


def modules(package: Path) -> dict[str, Path]:
    """Return {dotted name below the package: file}; "" is the package itself."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(package: Path) -> dict[str, set[str]]:
    """Return {module: modules of the package that it imports}, anywhere in its file except under `if TYPE_CHECKING`."""
    known = modules(package)
    return {name: set(_imported(name, path, known)) - {name, ""} for name, path in known.items()}


def _imported(name: str, path: Path, known: Iterable[str]) -> Iterator[str]:
    folder = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in _nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = (
                [NAME, *filter(None, folder)][: len(list(filter(None, folder))) + 2 - node.level] if node.level else []
            )
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for dotted in names:
            if dotted.split(".")[0] == NAME:
                yield _longest_known(dotted.split(".")[1:], known)


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        yield node
        yield from _nodes(node)


def _longest_known(parts: list[str], known: Iterable[str]) -> str:
    while parts and ".".join(parts) not in known:
        parts = parts[:-1]
    return ".".join(parts)


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Return the import cycles: the strongly connected components with more than one module."""
    reached = {name: _reachable(name, graph) for name in graph}
    found = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return {group for group in found if len(group) > 1}


def _reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    seen, waiting = set(), [start]
    while waiting:
        for name in graph.get(waiting.pop(), ()):
            if name not in seen:
                seen.add(name)
                waiting.append(name)
    return seen
