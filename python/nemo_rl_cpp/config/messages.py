"""Turns what pydantic finds into sentences: what was given, what is expected, which key was probably meant."""

from pydantic_core import ErrorDetails

from nemo_rl_cpp.argument_checks import did_you_mean, in_a_line

from .aliases import ALIASES
from .base import Section
from .data import dataset_keys
from .env import environment_sections
from .foreign_names import dead_key, own_name
from .keys import fields_of, own_keys, section_type
from .written import quotes_advice

_UNION_TAGS = {"one", "many"}  # of data.py; they appear in pydantic's locations


def known_keys(model: type[Section]) -> frozenset[str]:
    """Every dotted key of the schema, sections included, and those of the tables of environments and data sets."""
    found = set(own_keys(model))
    if "env" in model.model_fields:
        for name, inner in environment_sections().items():
            found.update(f"env.{name}.{key}" for key in own_keys(inner))
    if "grpo" in model.model_fields or "ppo" in model.model_fields:
        found.update(
            f"data.{split}.{key}"
            for split in ("train", "validation")
            for keys in dataset_keys().values()
            for key in keys
        )
    return frozenset(found)


SCRIPTS = {"grpo": "examples/run_grpo_math.py", "ppo": "examples/run_ppo.py"}
"""What runs a configuration with such a section."""


def unknown_key(dotted: str, model: type[Section]) -> str:
    """Sentence for a key that is not in the schema, with the nearest one."""
    if (dead := dead_key(dotted)) is not None:
        return dead
    section = dotted.partition(".")[0]
    if section in SCRIPTS and section not in model.model_fields:
        own = next((f"; did you mean {name}?" for name in SCRIPTS if name in model.model_fields), "")
        return f"is unknown here{own} (configurations with a section {section} are run by {SCRIPTS[section]})"
    parent, _, name = dotted.rpartition(".")
    if name == "_override_":
        return "works in a section at the top of the file only, not deeper"
    if (own := own_name(name, known_keys(model))) is not None:
        return f"is unknown here: other trainers' {name} is {own}"
    prefix = f"{parent}." if parent else ""
    every = known_keys(model) | {spelling for spelling, canonical in ALIASES if canonical in known_keys(model)}
    here = sorted(
        key.removeprefix(prefix) for key in every if key.startswith(prefix) and "." not in key.removeprefix(prefix)
    )
    if near := did_you_mean(name, here, cutoff=0.55):
        return f"is unknown; {near}"
    same = sorted((key for key in every if key.rpartition(".")[2] == name), key=lambda key: (key.count("."), key))
    if same:
        return f"is unknown here; did you mean {same[0]}?"
    if far := did_you_mean(dotted, (key for key in every if not dotted.startswith(key + ".")), cutoff=0.8):
        return f"is unknown; {far}"
    known = parent or ("the file" if "cluster" in model.model_fields else "the section")
    if not here and takes_own_keys(dotted, model):
        return "is unknown"
    return f"is unknown; {known} " + (f"knows {', '.join(here)}" if here else "takes no keys")


def takes_own_keys(dotted: str, model: type[Section]) -> bool:
    """Whether a key that the schema does not know may be added there: in a free mapping, or a section that takes any keys."""
    name, _, rest = dotted.partition(".")
    info = dict(fields_of(model)).get(name)
    if info is None or not rest:
        return model.model_config.get("extra") == "allow"
    if name == "env" and "env" in model.model_fields:
        return rest.partition(".")[0] not in environment_sections()
    inner = section_type(info.annotation)
    return takes_own_keys(rest, inner) if inner is not None else True


def dotted_key(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location if part not in _UNION_TAGS)


def shown(value: object) -> str:
    """A value as YAML would show it, short."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return in_a_line(value)


def sentence(error: ErrorDetails, dotted: str, model: type[Section], where: str = "") -> str:
    """What to say about one pydantic error. `where`: the place of the key, at which the value is looked up as written."""
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return unknown_key(dotted, model)
    if kind == "missing":
        return "is missing; set it in the file or on the command line"
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return _choice(context["expected"], value)
    bound = _BOUNDS.get(kind)
    if bound is not None:
        limit = next(iter(context.values()))
        return f"must be {bound} {limit}, not {shown(value)}"
    expected = _EXPECTED.get(kind)
    if expected is None:
        return f"{error['msg'][0].lower()}{error['msg'][1:]} (given: {shown(value)})"
    hint = quotes_advice(where, dotted) if kind == "string_type" and isinstance(value, (int, float)) else ""
    return f"must be {expected}, not {shown(value)}{hint}"


def _choice(expected: str, value: object) -> str:
    allowed = [part.strip("' ") for part in expected.replace(" or ", ", ").split(",")]
    near = did_you_mean(str(value), allowed)
    what = f"one of {', '.join(allowed)}" if len(allowed) > 1 else f"{allowed[0]} (nothing else is supported)"
    return f"must be {what}, not {shown(value)}{near and f'; {near}'}"


_BOUNDS = {
    "greater_than_equal": "at least",
    "greater_than": "greater than",
    "less_than_equal": "at most",
    "less_than": "less than",
}
_EXPECTED = {
    kind: words
    for words, kinds in {
        "an integer": ("int_type", "int_parsing", "int_from_float"),
        "a smaller integer": ("int_parsing_size",),
        "a number": ("float_type", "float_parsing"),
        "a finite number": ("finite_number",),
        "true or false": ("bool_type", "bool_parsing"),
        "a text": ("string_type",),
        "a list": ("list_type",),
        "a longer list": ("too_short",),
        "a shorter list": ("too_long",),
        "a section (lines of key: value)": ("dict_type", "model_type", "model_attributes_type"),
    }.items()
    for kind in kinds
}
