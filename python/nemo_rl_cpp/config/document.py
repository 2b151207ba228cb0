"""Writes docs/configuration.md from the schema: `python -m nemo_rl_cpp.config.document > docs/configuration.md`."""

from __future__ import annotations

import types
import typing
from typing import Any

from pydantic_core import PydanticUndefined

from .aliases import SPELLINGS
from .base import Section
from .data import dataset_keys
from .env import environment_sections
from .keys import fields_of, section_type
from .master import EvalMasterConfig, GRPOMasterConfig, PPOMasterConfig
from .messages import shown
from .tables import OneOf

_INTRODUCTION = """# Configuration

This page is made from the schema (`python -m nemo_rl_cpp.config.document`). A run reads one YAML file:

    uv run examples/run_grpo_math.py --config configs/grpo_arithmetic_smollm2.yaml [overrides]
    nemo-rl-cpp check --config FILE [overrides]       # report every mistake, start nothing
    ... --dry-run                                     # show the resolved configuration and a memory forecast

A file that is not found as given is looked for among the shipped configurations, with or without `configs/` or
`examples/configs/` before it.

## Files

- `defaults: parent.yaml` (or a list) names files that this one changes, relative to its own folder; a shipped file is found
  by its name alone. Later parents win over earlier ones, the file wins over all. Mappings merge key by key; lists, numbers, texts and `null` replace.
- `_override_: true` in a section at the top of a file throws the parent's section away first.
- `${a.b}` is the value of another key, `${.x}` of a sibling, `${..x}` of a parent's sibling; it may stand inside a text
  or stand for a whole section. `${mul:a,b}`, `add`, `sub`, `div`, `max` calculate; `${oc.env:NAME,default}` reads the
  environment.
- Plain words are read as YAML 1.1: `1e-8` is a number, `yes`, `no`, `on`, `off` are true and false, `010` is 8.

## Overrides

| written | meaning |
|---|---|
| `a.b=v` | change a key that the files or the schema know |
| `+a.b=v` | add a key that the files do not set |
| `++a.b=v` | add or change |
| `~a.b`, `~a.b=v` | delete (if the value is v) |

A value is a number, `true`, `false`, `null`, a text (quoted where it holds other characters than letters, digits and
`/-\\+.$%*@?|:`), a list `[1,2]` (replaces), a mapping `{c: 9}` (merges), `${x.y}`, or a cast such as `str(5)`. `a.0=v`
changes an element of a list. `\\,` is a literal comma.

## Mistakes

Unknown keys, wrong types, values out of range and combinations that cannot work are all reported at once, each with file
and line, before anything heavy is loaded. Keys marked *switched off* belong to features of NeMo RL that are not supported:
they are accepted at the value shown and rejected otherwise (in a backend section that is not enabled they are not looked
at). Keys marked *no effect* are accepted with any value of their type.
"""


def _type_name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        table = next((mark for mark in arguments[1:] if isinstance(mark, OneOf)), None)
        return " or ".join(table.names()) if table is not None else _type_name(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if part is type(None) else _type_name(part) for part in arguments)
    if origin is typing.Literal:
        return " or ".join(str(value) for value in arguments)
    if origin is list:
        return f"list of {_type_name(arguments[0])}"
    if origin is dict or annotation is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    return {int: "integer", float: "number", str: "text", bool: "true or false", list: "list", Any: "any"}.get(
        annotation, str(annotation)
    )


def _default(info: Any) -> str:
    value = info.default_factory() if info.default_factory is not None else info.default
    if value is PydanticUndefined or value is ...:
        return "must be given"
    return f"`{shown(value)}`"


def _marked_type(info: Any) -> str:
    """The type of a field; pydantic keeps the marks of an annotation apart from it."""
    table = next((mark for mark in info.metadata if isinstance(mark, OneOf)), None)
    return " or ".join(table.names()) if table is not None else _type_name(info.annotation)


def _row(name: str, info: Any) -> str:
    mark = info.json_schema_extra or {}
    meaning = info.description or ""
    if "only" in mark:
        meaning = f"*switched off*: {meaning}"
    elif mark.get("no_effect"):
        meaning = f"*no effect*: {meaning}"
    cells = (f"`{name}`", _marked_type(info), _default(info), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _section(model: type[Section], name: str, lines: list[str]) -> None:
    lines += [f"### `{name}`", "", " ".join((model.__doc__ or "").split()), ""]
    inner: list[tuple[str, type[Section]]] = []
    rows = []
    for key, info in fields_of(model):
        if (found := section_type(info.annotation)) is not None:
            inner.append((f"{name}.{key}", found))
        else:
            rows.append(_row(key, info))
    if rows:
        lines += ["| key | type | default | meaning |", "|---|---|---|---|", *rows, ""]
    for dotted, found in inner:
        _section(found, dotted, lines)


def document() -> str:
    """The whole page."""
    lines = [_INTRODUCTION, "Two names of one key:", "", "| also known as | key |", "|---|---|"]
    lines += [f"| `{spelling}` | `{canonical}` |" for spelling, canonical in SPELLINGS]
    lines += ["", "## A GRPO, DAPO or ProRLv2 run", ""]
    shown_sections: set[str] = set()
    titles = (
        (GRPOMasterConfig, None),
        (PPOMasterConfig, "## Further sections of a PPO run"),
        (EvalMasterConfig, "## An evaluation"),
    )
    for master, title in titles:
        if title:
            lines += [title, ""]
        for name, info in sorted(fields_of(master), key=lambda field: field[0] not in ("grpo", "ppo")):
            label = f"{name}" if master is not EvalMasterConfig or name in ("eval",) else f"{name} (evaluation)"
            if label in shown_sections or (master is EvalMasterConfig and name in ("env", "cluster", "tokenizer")):
                continue
            shown_sections.add(label)
            model = section_type(info.annotation)
            if model is not None:
                _section(model, name, lines)
            elif name == "env":
                _environments(lines)
            else:
                lines += [
                    f"### `{name}`",
                    "",
                    "| key | type | default | meaning |",
                    "|---|---|---|---|",
                    _row(name, info),
                    "",
                ]
        if master is GRPOMasterConfig:
            _datasets(lines)
    return "\n".join(lines).rstrip() + "\n"


def _environments(lines: list[str]) -> None:
    lines += ["### `env`", "", "One section an environment. An environment of your own takes any keys.", ""]
    for name, model in environment_sections().items():
        _section(model, f"env.{name}", lines)


def _datasets(lines: list[str]) -> None:
    lines += [
        "### Keys of each data set",
        "",
        "Beside the keys of `data.train`; a class of your own takes any.",
        "",
        "| dataset_name | keys |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {', '.join(f'`{key}`' for key in keys)} |" for name, keys in dataset_keys().items()] + [""]


if __name__ == "__main__":
    print(document(), end="")
