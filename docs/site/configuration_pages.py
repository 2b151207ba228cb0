"""Writes docs/configuration.md from the schema: `python docs/site/configuration_pages.py --write`."""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
import types
import typing
from pathlib import Path

from nemo_rl_cpp.config.base import OneOf, Section, fields_of, mark_of, section_at, section_type
from nemo_rl_cpp.config.data import dataset_keys
from nemo_rl_cpp.config.env import environment_sections
from nemo_rl_cpp.config.errors import shown
from nemo_rl_cpp.config.master import (
    DistillationMasterConfig,
    EvalMasterConfig,
    GRPOMasterConfig,
    PPOMasterConfig,
    SFTMasterConfig,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

_DOCS = Path(__file__).resolve().parents[1]
_INTRODUCTION = """# Configuration

This page lists every key of a run's YAML file. It is made from the schema (`python docs/site/configuration_pages.py --write`). The table of a section omits the section's
name: `reward_scaling.enabled` in the table of `grpo` is the key `grpo.reward_scaling.enabled`.

## The keys to change first

| key | default | what it sets |
|---|---|---|
@FIRST@

In a PPO run the keys of `grpo` stand in the section `ppo`, in a distillation run in `distillation`. This page lists the keys that have an effect. NeMo RL's other keys are accepted
and change nothing; `--dry-run` lists those that your file sets.

## Which way to turn them

Change one key at a time, and compare the runs. [Reading the metrics](metrics.md) explains the metrics.

| what you see | key | turn it |
|---|---|---|
@SYMPTOMS@

## Files

A run reads one YAML file. If the file is not found as given, it is looked for among the shipped configurations, with or
without `configs/` or `examples/configs/` before it.

- `defaults: parent.yaml` (or a list) names files that this file changes. The paths are relative to the file's own folder.
  A shipped file is found by its name alone. Later parents win over earlier ones, and the file wins over all of them.
  Mappings are merged key by key. Lists, numbers, texts and `null` replace the parent's value.
- `_override_: true` in a section at the top of a file removes the parent's section first.
- `${a.b}` is the value of another key, `${.x}` of a sibling, and `${..x}` of a parent's sibling. It may stand inside a text
  or stand for a whole section. `${mul:a,b}`, `add`, `sub`, `div`, `max` calculate. `${oc.env:NAME,default}` reads the
  environment.
- Plain words are read as YAML 1.1: `1e-8` is a number, `yes`, `no`, `on`, `off` are true and false, `010` is 8.

## Overrides

| written | meaning |
|---|---|
| `a.b=v` | change a key that the files or the schema know |
| `+a.b=v` | add a key that the files do not set |
| `++a.b=v` | add or change |
| `~a.b`, `~a.b=v` | delete (if the value is v) |
| `a.0=v` | change an element of a list |

| a value | example |
|---|---|
| number, `true`, `false`, `null` | `1e-6` |
| text; in quotes where it holds other characters than letters, digits and `/-\\+.$%*@?\\|:` | `"a, b"` |
| list, which replaces the list | `[1,2]` |
| mapping, which is merged | `{c: 9}` |
| value of another key | `${x.y}` |
| cast | `str(5)` |
| literal comma | `\\,` |

## Mistakes

All mistakes are reported at once, each with file and line, before a model is loaded: unknown keys, wrong types, values
out of range, and combinations that cannot work.

## Two names of one key

The names listed for `grpo` also hold for `ppo` and `distillation`.

| also known as | key |
|---|---|
@SPELLINGS@
"""

FIRST = (
    ("policy.model_name", "the model"),
    ("policy.tokenizer.chat_template", "how a prompt becomes a chat; `null` for plain text"),
    ("policy.max_total_sequence_length", "the most tokens of a prompt and its response"),
    ("policy.precision", "the number format of the model"),
    ("policy.optimizer.kwargs.lr", "the learning rate"),
    (
        "policy.train_global_batch_size",
        "samples for each optimizer step; prompts x responses of a step is a multiple of it",
    ),
    (
        "policy.generation.max_new_tokens",
        "the most tokens of a response; `null` for as many as the sequence has room for",
    ),
    ("data.train", "the training data: [keys of each data set](#keys-of-each-data-set)"),
    ("data.default", "what all data sets share, such as `env_name`, the environment that scores them"),
    ("grpo.num_prompts_per_step", "prompts in a step"),
    ("grpo.num_generations_per_prompt", "responses to each prompt, which are compared with one another"),
    ("grpo.max_num_steps", "steps of the run"),
    ("grpo.val_period", "steps between validations"),
    ("loss_fn.reference_policy_kl_penalty", "how strongly the policy is held near the model it began with"),
    ("checkpointing.checkpoint_dir", "the run's folder; the same folder resumes the run"),
)
"""The fifteen keys that a newcomer changes, and what each sets."""

SYMPTOMS = (
    ("the reward stays flat, and the gradient is not 0", "policy.optimizer.kwargs.lr", "up, by a factor of 2 to 3"),
    (
        "the reward rises, then falls; `train/approx_entropy` drops fast",
        "policy.optimizer.kwargs.lr",
        "down, by a factor of 2 to 3",
    ),
    ("most groups are all right or all wrong", "grpo.num_generations_per_prompt", "up: 16 or 32. Or other data"),
    ("most groups are all right or all wrong, and generation is cheap", "grpo.use_dynamic_sampling", "`true`"),
    (
        "the reward jumps from step to step",
        "grpo.num_prompts_per_step",
        "up, and `policy.train_global_batch_size` with it",
    ),
    (
        "many responses are cut off (`train/truncation_rate`)",
        "policy.generation.max_new_tokens",
        "up, and `policy.max_total_sequence_length` with it",
    ),
    ("prompts are cut off (`train/cut_prompts_rate`)", "data.max_input_seq_length", "up"),
    (
        "answers of a chat model look strange",
        "policy.tokenizer.chat_template",
        "`default` for a chat model, `null` for a base model",
    ),
    ("the text degrades, or the policy finds a trick", "loss_fn.reference_policy_kl_penalty", "up: 0.01 to 0.1"),
    ("`train/kl_penalty` is large and learning is slow", "loss_fn.reference_policy_kl_penalty", "down: 0.001 or 0"),
    ("the policy stops exploring", "loss_fn.ratio_clip_max", "up: 0.28, as DAPO does"),
    ("one step has few updates", "policy.train_global_batch_size", "down: several updates on the samples of a step"),
    ("the run does not fit into memory", "policy.train_micro_batch_size", "down"),
    ("it still does not fit", "policy.max_total_sequence_length", "down"),
    ("validation takes long", "grpo.val_period", "up, or `grpo.max_val_samples` down"),
    ("two validations differ by chance", "grpo.max_val_samples", "up: the interval shrinks with its square root"),
)
"""What one sees in a run, the key to turn, and which way."""


def _type_name(annotation: object) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        table = next((mark for mark in arguments[1:] if isinstance(mark, OneOf)), None)
        return " or ".join(table.choices) if table is not None else _type_name(arguments[0])
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
    names: dict[object, str] = {int: "integer", float: "number", str: "text", bool: "true or false", list: "list"}
    return "any" if annotation is object else names.get(annotation, str(annotation))


def _default(info: FieldInfo) -> str:
    value = info.get_default(call_default_factory=True)
    if value is PydanticUndefined or value is ...:
        return "must be given"
    return f"`{shown(value)}`"


def _marked_type(info: FieldInfo) -> str:
    """The type of a field; pydantic keeps the marks of an annotation apart from it."""
    table = next((mark for mark in info.metadata if isinstance(mark, OneOf)), None)
    return " or ".join(table.choices) if table is not None else _type_name(info.annotation)


def _descriptions(model: type[Section]) -> dict[str, str]:
    """Return {key: its description}: the second argument of `key`, the docstring below the key, or that of a base class."""
    found: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if issubclass(cls, Section) and cls is not Section:
            found |= {name: info.description for name, info in cls.model_fields.items() if info.description}
            body = ast.parse(inspect.getsource(cls)).body[0].body
            for key, below in itertools.pairwise(body):
                if isinstance(key, ast.AnnAssign) and isinstance(below, ast.Expr):
                    found[key.target.id] = " ".join(below.value.value.split())
    return found


def _row(name: str, info: FieldInfo, meaning: str) -> str:
    cells = (f"`{name}`", _marked_type(info), _default(info), meaning)
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def status_of(info: FieldInfo) -> str:
    """What setting a key does: "effective", "without effect" (any value is accepted) or "refused" (one value is accepted)."""
    mark = mark_of(info)
    if "only" in mark or len(_choices(info.annotation)) == 1:
        return "refused"
    return "without effect" if mark.get("no_effect") else "effective"


def _choices(annotation: object) -> list[object]:
    """The values of a Literal, also of one that may be null; [None, None] for any other type."""
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    if typing.get_origin(annotation) is typing.Annotated:
        return _choices(typing.get_args(annotation)[0])
    parts = [part for part in typing.get_args(annotation) if part is not type(None)]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType) and len(parts) == 1:
        return _choices(parts[0])
    return [None, None]


def _is_idle(info: FieldInfo) -> bool:
    """Whether a key changes nothing: it has no effect, or one value alone is accepted."""
    return status_of(info) != "effective"


_HEADER = ["| key | type | default | meaning |", "|---|---|---|---|"]


def _section(model: type[Section], name: str, lines: list[str], shown: dict[str, list[str]]) -> None:
    """Add to `lines` a heading and a table: the keys of a section, and of those within it, that do something."""
    said, rows = _rows(model, name, "", shown)
    alike = itertools.groupby((row[2:].split(" | ", 1) for row in rows), key=lambda cells: cells[1])
    rows = [
        f"| {', '.join(key for key, _ in group)} | {rest}" for rest, group in alike
    ]  # of neighbours that differ in name
    if rows or shown[name]:
        lines += [f"### `{name}`", "", said, "", *([*_HEADER, *rows, ""] if rows else [])]


def _rows(model: type[Section], name: str, prefix: str, shown: dict[str, list[str]]) -> tuple[str, list[str]]:
    """Return what a section `name` is for, and the rows of its keys, which begin with `prefix`. Rows that an earlier
    section, one of `shown`, has too are named and not repeated.
    """
    inner = [(key, found) for key, info in fields_of(model) if (found := section_type(info.annotation)) is not None]
    plain = [(key, info) for key, info in fields_of(model) if section_type(info.annotation) is None]
    plain.sort(key=lambda field: field[0] != "enabled")  # the switch first, wherever the section has it from
    meanings = _descriptions(model)
    keys = {_row(key, info, meanings[key]): (key, info) for key, info in plain if not _is_idle(info)}
    like = max(shown, key=lambda other: len(keys.keys() & shown[other]), default="")
    same = [key for row, (key, _) in keys.items() if row in shown.get(like, ())]
    said = " ".join((model.__doc__ or "").split())
    if len(same) > 3 or (same and len(same) == len(keys)):
        there = f"`{like}`" + " of a GRPO run" * (like == name)
        others = [row[2:].split(" | ", 1)[0] for row in shown[like]]
        lacking = [key for key in others if key.strip("`") not in dict(keys.values())]
        if len(same) > 10 and len(lacking) < 5:
            said += f" It has the keys of {there}" + f", except {', '.join(lacking)}" * bool(lacking)
            said += ". Keys listed here differ or are new." if len(same) < len(keys) else "."
        elif len(same) == len(shown[like]):
            said += f" It has the keys of {there}."
        else:
            said += f" These keys are as in {there}: {', '.join(f'`{key}`' for key in same)}."
    else:
        same = []
    shown.setdefault(name, list(keys))  # of two sections with one name, the first
    rows = [_row(prefix + key, info, meanings[key]) for key, info in keys.values() if key not in same]
    for key, found in inner:
        meaning, inside = _rows(found, f"{name}.{key}", f"{prefix}{key}.", shown)
        if not inside and same and prefix and meaning.endswith(f"It has the keys of `{like}.{key}`."):
            continue  # as the enclosing section says
        if not inside and "It has the keys of" in meaning:
            meaning = meaning[meaning.index("It has the keys of") :]  # which say what the section is for
        if inside or shown[f"{name}.{key}"]:
            rows += [f"| `{prefix}{key}` | section | | {_cell(meaning)} |", *inside]
    return said, rows


def _default_of(dotted: str) -> str:
    """The default of a key of a GRPO run, as a cell."""
    parent, _, last = dotted.rpartition(".")
    info = dict(fields_of(section_at(GRPOMasterConfig, parent)))[last]
    return "" if section_type(info.annotation) is not None or last in ("train", "default") else _default(info)


def _introduction() -> list[str]:
    masters = (GRPOMasterConfig, PPOMasterConfig, DistillationMasterConfig, SFTMasterConfig, EvalMasterConfig)
    spelled = {each: key for master in masters for each, key in master.aliases() if ".automodel_cfg." not in each}
    spelled = {
        each: key for each, key in spelled.items() if not each.startswith(("ppo.", "distillation."))
    }  # as grpo's
    first = "\n".join(f"| `{key}` | {_default_of(key)} | {meaning} |" for key, meaning in FIRST)
    spellings = "\n".join(f"| `{spelling}` | `{canonical}` |" for spelling, canonical in spelled.items())
    symptoms = "\n".join(f"| {seen} | `{key}` | {way} |" for seen, key, way in SYMPTOMS)
    page = _INTRODUCTION.replace("@FIRST@", first).replace("@SPELLINGS@", spellings)
    return [page.replace("@SYMPTOMS@", symptoms)]


def document() -> str:
    """The page of the keys that do something."""
    return "\n".join([*_introduction(), *_parts()]).rstrip() + "\n"


PAGE = _DOCS / "configuration.md"


def _parts() -> list[str]:
    """The lines about the keys."""
    lines = ["## A GRPO, DAPO or ProRLv2 run", ""]
    shown_sections: set[str] = set()
    shown: dict[str, list[str]] = {}
    titles = (
        (GRPOMasterConfig, None),
        (PPOMasterConfig, "## Further sections of a PPO run"),
        (DistillationMasterConfig, "## Further sections of a distillation run"),
        (SFTMasterConfig, "## Further sections of supervised fine-tuning"),
        (EvalMasterConfig, "## An evaluation"),
    )
    for master, title in titles:
        if title:
            lines += [title, ""]
        for name, info in sorted(
            fields_of(master), key=lambda field: field[0] not in ("grpo", "ppo", "distillation", "sft")
        ):
            label = f"{name}" if master is not EvalMasterConfig or name in ("eval",) else f"{name} (evaluation)"
            if (
                master in (DistillationMasterConfig, SFTMasterConfig) and name == "loss_fn"
            ):  # which has other keys there
                label = f"loss_fn ({master.__name__})"
            if label in shown_sections or (master is EvalMasterConfig and name in ("env", "cluster", "tokenizer")):
                continue
            shown_sections.add(label)
            model = section_type(info.annotation)
            if model is not None:
                _section(model, name, lines, shown)
            elif name == "env":
                _environments(lines, shown)
            elif not _is_idle(info):
                lines += [f"### `{name}`", "", *_HEADER, _row(name, info, _descriptions(master)[name]), ""]
        if master is GRPOMasterConfig:
            _datasets(lines)
    return lines


def _environments(lines: list[str], shown: dict[str, list[str]]) -> None:
    lines += [
        "### `env`",
        "",
        "Each environment has one section. The section of your own environment may contain any keys.",
        "",
    ]
    for name, model in environment_sections().items():
        _section(model, f"env.{name}", lines, shown)


def _datasets(lines: list[str]) -> None:
    lines += [
        "### Keys of each data set",
        "",
        "Beside the keys of `data.train`; a class of your own takes any.",
        "",
        "| dataset_name | keys |",
        "|---|---|",
    ]
    for keys, names in itertools.groupby(dataset_keys().items(), key=lambda item: item[1]):
        cells = (", ".join(f"`{word}`" for word in words) for words in ((name for name, _ in names), keys))
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(document())
    else:
        print(document(), end="")
