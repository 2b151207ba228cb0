"""Makes the page of the API reference from the docstrings of the public names."""

import importlib
import inspect
import re
from types import ModuleType

SECTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Train, evaluate, generate", ("nemo_rl_cpp",)),
    ("Advantage estimators", ("nemo_rl_cpp.algorithms.custom_components", "nemo_rl_cpp.algorithms.advantage_estimator")),
    ("Losses", ("nemo_rl_cpp.algorithms.loss",)),
    (
        "Environments",
        (
            "nemo_rl_cpp.environments.interfaces",
            "nemo_rl_cpp.environments.single_turn",
            "nemo_rl_cpp.environments.reward_environment",
        ),
    ),
    ("Data sets", ("nemo_rl_cpp.data.datasets.processed_dataset",)),
    ("Interfaces of the parts of a run", (
        "nemo_rl_cpp.models.interfaces", "nemo_rl_cpp.models.generation.interfaces",
        "nemo_rl_cpp.weight_sync:WeightSynchronizer", "nemo_rl_cpp.loggers.interface",
    )),
    ("Short names for classes of your own", (
        "nemo_rl_cpp.environments.loading:register_env", "nemo_rl_cpp.data.datasets.response_datasets:register_dataset",
        "nemo_rl_cpp.data.processors:register_processor", "nemo_rl_cpp.config.logger:register_logger",
    )),
)  # fmt: skip
"""Heading -> modules whose public names stand below it; `module:name` is one name of a module."""

_HEADINGS = {"Args:": "Arguments", "Attributes:": "Attributes", "Raises:": "Raises", "Returns:": "Returns"}


def public_names(module: ModuleType) -> list[str]:
    """Names of `__all__`, or else the classes and functions that the module itself defines."""
    if hasattr(module, "__all__"):
        names = [name for name in module.__all__ if not name.startswith("_")]
        return sorted(names, key=lambda name: name[:1].isupper())  # functions first: one begins with them
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    ]


def signature_of(value: object) -> str:
    """Parameters with their defaults, without annotations (the text explains them); `()` where Python knows none."""
    try:
        parameters = list(inspect.signature(value).parameters.values())
    except (TypeError, ValueError):
        return "()"
    kept = [
        p.replace(annotation=p.empty, default=_plain(p.default)) for p in parameters if p.name not in ("self", "cls")
    ]
    return str(inspect.Signature(kept))


class _Shown:
    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _plain(default: object) -> object:
    text = repr(default)
    return default if default is inspect.Parameter.empty or " at 0x" not in text and len(text) <= 60 else _Shown("...")


def markdown(docstring: str) -> str:
    """A docstring as Markdown: its sections become lists, indented formulas blocks, and signs of Markdown's are text."""
    lines: list[str] = []
    section = False
    for line in inspect.cleandoc(docstring).splitlines():
        if line in _HEADINGS:
            lines += ["", f"**{_HEADINGS[line]}**", ""]
            section = True
        elif section and (entry := re.match(r"    (\*{0,2}[\w., ]+): (.*)", line)):
            lines.append(f"- `{entry[1]}`: {_safe(entry[2])}")
        elif section and line.startswith("    "):
            lines.append(f"  {_safe(line.strip())}")
        else:
            section = section and not line
            indented = line.startswith("    ")
            if indented and lines and lines[-1] and not lines[-1].startswith("    "):
                lines.append("")
            lines.append(line if indented else _safe(line))
    return "\n".join(lines)


def _safe(line: str) -> str:
    """Escapes what Markdown would take for HTML, links, headings or emphasis, but not within `code`."""
    parts = line.split("`")
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"([<*\\])", r"\\\1", parts[i]).replace("](", "]\\(").replace("{", "\\{")
    joined = "`".join(parts)
    return f"\\{joined}" if joined.startswith("#") else joined


def _directive(kind: str, title: str, body: list[str], depth: int) -> list[str]:
    fence = "`" * depth
    return [f"{fence}{{py:{kind}}} {title}", "", *body, fence, ""]


def _class(name: str, value: type) -> list[str]:
    body = [markdown(value.__doc__ or ""), ""]
    for method, function in list(vars(value).items()):
        function = getattr(function, "__func__", function)
        if method.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        body += _directive("method", f"{method}{signature_of(function)}", [markdown(function.__doc__)], 5)
    return _directive("class", f"{name}{signature_of(value)}", body, 6)


def _entry(module: ModuleType, name: str) -> list[str]:
    value = getattr(module, name)
    full = f"{module.__name__}.{name}"
    if inspect.isclass(value):
        return _class(full, value)
    if inspect.isfunction(value):
        return _directive("function", f"{full}{signature_of(value)}", [markdown(value.__doc__ or "")], 6)
    return []


def page() -> str:
    """The page, in MyST's Markdown."""
    lines = [
        "# API reference", "",
        "This page is made from the docstrings of the public names. Everything that begins with `nemo_rl_cpp.` can be imported as it is written.", "",
    ]  # fmt: skip
    for heading, names in SECTIONS:
        lines += [f"## {heading}", ""]
        for module_name, _, only in (name.partition(":") for name in names):
            module = importlib.import_module(module_name)
            if len(names) > 1 and not only:
                lines += [f"### `{module_name}`", "", markdown((module.__doc__ or "").partition("\n\n")[0]), ""]
            for name in [only] if only else public_names(module):
                lines += _entry(module, name)
    return "\n".join(lines)
