"""Finds the definitions of the package that only tests reach.

Computes a fixed point over names. A function, class or method of the package is reached if reached code mentions its
name; a method needs its class to be reached as well. The computation starts from what users call: the command lines,
`examples/`, the names that `nemo_rl_cpp` exports, the functions that docs/guides and CONTRIBUTING.md call, and the
dotted names in configurations.

Imports and `__all__` do not count as mentions. A string that equals a class name does, because registries look classes
up by name. Names are not resolved, so a name that occurs in two places counts as reached in both, and the result is a
lower bound. `nemo_rl_cpp.compat`, which is for ports, is not counted; what it imports is reached."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

STARTS = ("cli.py", "run_grpo_math.py", "run_ppo.py", "run_eval.py", "api.py", "generate.py")
# decorators that only change how a function is called; all others register or call the function
PLAIN_DECORATORS = {"abstractmethod", "cache", "cached_property", "classmethod", "contextmanager", "dataclass", "deprecated",
                    "lru_cache", "no_grad", "overload", "property", "setter", "staticmethod"}  # fmt: skip
# functions that look up an attribute by the name in their argument
LOOK_UP = {
    "getattr", "hasattr", "call_remote", "_tell", "_ask", "_of_engines", "call_all", "call_each", "call_for_one_value",
    "_together",
}  # fmt: skip
# methods that are called by base classes of other packages
CALLED_FROM_OUTSIDE = {"_repr_html_", "call_binop", "forward", "backward", "launch", "nemo_rl_cpp_weights", "run",
                       "visit_Concat", "visit_Getitem"}  # fmt: skip
# methods that users' code calls, because classes of NeMo RL, transformers or Tinker have them
CALLED_BY_USERS = {"batch_decode", "clear_logger_metrics", "convert_ids_to_tokens", "convert_tokens_to_ids",
                   "get_logger_metrics", "global_post_process_and_metrics", "result_async"}  # fmt: skip


@dataclass
class Item:
    """A module's statements, one of its assignments, a class without its methods, a function, or a method."""

    path: Path
    name: str
    owner: Item | None = None
    registered: bool = False
    mentions: set[str] = field(default_factory=set)
    reached: bool = False


def mentions(node: ast.AST) -> Iterator[str]:
    """Yield the names in `node`, also those in string annotations, `getattr(x, "name")` and dotted strings."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr
        elif isinstance(part, ast.ImportFrom):  # an import in a function, under another name
            yield from (alias.name for alias in part.names if alias.asname)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield from dotted(part.value)
            if entry := re.fullmatch(
                r"(?:[a-z][\w.]*[.:])?([A-Z]\w+)", part.value
            ):  # the entry of a registry, with or without its module
                yield entry[1]
        elif isinstance(part, ast.Call) and called_name(part) in LOOK_UP:
            yield from (a.value for a in part.args if isinstance(a, ast.Constant) and isinstance(a.value, str))
        for annotation in (getattr(part, "annotation", None), getattr(part, "returns", None)):
            for text in ast.walk(annotation) if annotation is not None else ():
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    yield from re.findall(r"\w+", text.value)


def called_name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def dotted(text: str) -> list[str]:
    """Return the last names of `package.module.Name` and `package.module:Name` in a string."""
    return re.findall(r"\bnemo_rl_cpp(?:\.\w+)*[.:](\w+)", text)


def decorator_name(node: ast.expr) -> str:
    while isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def items(path: Path) -> list[Item]:
    """Return all items of a file, the module itself first."""
    tree = ast.parse(path.read_text())
    module = Item(path, "")
    found = [module]

    def enter(node: ast.AST, owner: Item) -> None:
        for child in node.body:
            if isinstance(child, (ast.Import, ast.ImportFrom)) or is_all(child):
                continue
            if owner is module and (target := assigned(child)):
                found.append(Item(path, target, mentions=set(mentions(child))))
                continue
            if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                owner.mentions |= set(mentions(child))
                continue
            item = Item(path, child.name, owner if owner is not module else None)
            item.registered = bool({decorator_name(d) for d in child.decorator_list} - PLAIN_DECORATORS)
            found.append(item)
            if isinstance(child, ast.ClassDef):
                for part in (*child.bases, *child.keywords, *child.decorator_list):
                    item.mentions |= set(mentions(part))
                enter(child, item)
            else:
                item.mentions |= set(mentions(child))

    enter(tree, module)
    return found


def assigned(node: ast.stmt) -> str:
    """Return `NAME` of a statement `NAME = ...`."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return targets[0].id if len(targets) == 1 and isinstance(targets[0], ast.Name) else ""


def is_all(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)


def starting_names(root: Path) -> set[str]:
    """Return the names that users write: exports, guides, examples and configurations."""
    package = root / "python" / "nemo_rl_cpp"
    names = set(re.findall(r'"(\w+)": "', (package / "__init__.py").read_text()))
    for page in (*root.glob("CONTRIBUTING.md"), *(root / "docs" / "guides").glob("*.md")):
        names |= set(re.findall(r"\b(\w+)\(", page.read_text()))
    for folder in ("configs", "examples"):
        for file in (root / folder).rglob("*"):
            if file.suffix in {".yaml", ".ipynb", ".py"}:
                names |= set(dotted(file.read_text()))
    for file in (package / "compat").rglob("*.py"):
        names |= set(re.findall(r"\w+", file.read_text()))
    return names


def reached(root: Path) -> list[Item]:
    """Return all items of the package except `compat`, each marked as reached or not."""
    package = root / "python" / "nemo_rl_cpp"
    files = sorted(p for p in package.rglob("*.py") if p.relative_to(package).parts[0] != "compat")
    everything = [item for path in files for item in items(path)]
    names = starting_names(root)
    starts = {package / name for name in STARTS}
    grows = True
    while grows:
        grows = False
        for item in everything:
            if item.reached or not is_reached(item, names, starts):
                continue
            item.reached = grows = True
            names |= item.mentions
    return everything


def is_reached(item: Item, names: set[str], starts: set[Path]) -> bool:
    if not item.name:
        return True
    if item.owner is not None and not item.owner.reached:
        return False
    special = item.name.startswith("__") and item.name.endswith("__")
    called = item.owner is not None and (special or item.name in CALLED_FROM_OUTSIDE | CALLED_BY_USERS)
    return called or special or item.registered or item.name in names or (item.path in starts and item.name == "main")
