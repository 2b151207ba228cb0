"""The base class of configuration sections, the functions that declare keys, the types of numbers, and tables of the
names that a configuration may use, such as those of loggers and datasets.

Each name is defined in one table only. The values that the schema allows, the keys that it knows and
docs/configuration.md are derived from the tables, including entries that a program adds at run time."""

import pkgutil
import tomllib
import types
import typing
from collections import UserDict
from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from os.path import expanduser
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from nemo_rl_cpp.argument_checks import LARGEST, SMALLEST, in_a_line, stop_text_fault
from nemo_rl_cpp.dotted_names import PythonObjectRef, is_user_defined

from .access import plain, plain_values
from .errors import ConfigError, Problem, Report, dotted_key, sentence, shown, unknown_key


class _Made(type(BaseModel)):  # type: ignore[misc]
    """The metaclass of `Section`: `Section(key=value)` in Python code raises one ConfigError for all mistakes."""

    def __call__(cls, *given: object, **values: object) -> Any:
        name = cls.__name__
        if given:
            kind = type(given[0]).__name__
            raise ConfigError([Problem(name, "", f"takes its keys as keywords ({name}(**mapping)), not a {kind}")])
        report = Report({}, "")
        data = _fold_aliases(cls, plain_values(values), report)
        made = None
        if not report.problems:
            try:
                made = super().__call__(**data)
                made.check_all(report)
            except ValidationError as failure:
                report.problems += mistakes(failure, cls)
        if report.problems:
            raise ConfigError([Problem(p.where or name, p.key, p.message) for p in report.problems])
        return made


class Section(BaseModel, metaclass=_Made):
    """A section of the configuration. Its keys are read as `section.key` or, as in NeMo RL's scripts, `section["key"]`.

    An unknown key raises ConfigError. A key declared by `only` belongs to an unsupported feature, and accepts only the
    values that the declaration lists. A key declared by `no_effect` is accepted and ignored. Ignored keys of NeMo RL
    are listed in idle_keys.toml, under the class name of their section. In a section that is created or assigned to in
    Python, values are not converted: a string is not read as a number, nor a number as a string."""

    model_config = ConfigDict(
        strict=True,  # the loader is not strict, because ${oc.env:...} gives numbers as strings
        validate_assignment=True,
        extra="forbid",
        populate_by_name=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        validate_default=False,
        defer_build=True,
    )
    is_switched: ClassVar[bool] = False
    """Whether `enabled: false` switches the section off, so that its other keys need not be supported."""
    spellings: ClassVar[Mapping[str, str]] = {}
    """Alternative dotted name -> key. Two different values for the two names are an error."""

    @classmethod
    def __pydantic_init_subclass__(cls, **options: object) -> None:
        """Add the keys that idle_keys.toml lists for this class and its base classes."""
        for base in reversed(cls.__mro__):
            for name, row in _IDLE_KEYS.get(base.__name__, {}).items():
                if base is cls or name not in cls.model_fields:
                    cls.model_fields[name] = _idle_key(**row)

    @classmethod
    def known_keys(cls) -> frozenset[str]:
        """Return the dotted keys of this section and its nested sections."""
        return own_keys(cls)

    @classmethod
    def useful_keys(cls) -> frozenset[str]:
        """Return the known keys without those that are ignored, belong to an unsupported feature, or to one loss."""
        return cls.known_keys() - {key for key, info in dotted_fields(cls) if mark_of(info)}

    @classmethod
    def takes_own_key(cls, dotted: str) -> bool:
        """Return whether the key `dotted`, which the schema does not list, is allowed: because it is in a free-form
        mapping, or in a section that accepts any key."""
        name, _, rest = dotted.partition(".")
        info = dict(fields_of(cls)).get(name)
        if info is None or not rest:
            return cls.model_config.get("extra") == "allow"
        inner = section_type(info.annotation)
        return inner.takes_own_key(rest) if inner is not None else True

    @classmethod
    @cache
    def aliases(cls) -> tuple[tuple[str, str], ...]:
        """Return the pairs (alternative name, key) in `spellings` of this section and of its nested sections."""
        found = dict(cls.spellings)
        for name, info in fields_of(cls):
            if (inner := section_type(info.annotation)) is not None:
                found |= {f"{name}.{spelling}": f"{name}.{key}" for spelling, key in inner.aliases()}
        return tuple(found.items())

    def check_all(self, report: Report) -> None:
        """Report mistakes that type checks do not detect, in a section that Python code created."""
        check_marks(self, "", report)

    def __getitem__(self, key: str) -> Any:
        name = field_name(type(self), key)
        return (self.model_extra or {})[key] if name is None else getattr(self, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("_"):  # private state, not a key
            super().__setattr__(name, value)
            return
        cls = type(self)
        if name not in cls.model_fields and cls.model_config.get("extra") != "allow":
            raise ConfigError([Problem(cls.__name__, name, unknown_key(name, cls))])
        try:
            super().__setattr__(name, plain(value))
        except ValidationError as failure:
            raise ConfigError([Problem(cls.__name__, p.key, p.message) for p in mistakes(failure, cls)]) from None

    def __setitem__(self, key: str, value: object) -> None:
        setattr(self, field_name(type(self), key) or key, value)

    def __contains__(self, key: object) -> bool:
        known = isinstance(key, str) and field_name(type(self), key) is not None
        return known or key in (self.model_extra or {})

    get = Mapping.get

    def keys(self) -> KeysView[str]:
        return self.model_dump().keys()

    def items(self) -> Iterator[tuple[str, object]]:
        return ((key, self[key]) for key in self.keys())

    def model_dump(self, **options: Any) -> dict[str, Any]:
        options.setdefault("by_alias", True)  # `_v2` is not a possible attribute name
        return super().model_dump(**options)


Settings = Section | Mapping[str, object]
"""A section, or a mapping with the keys of a section."""


def field_name(model: type[Section], key: str) -> str | None:
    if key in model.model_fields:
        return key
    key = dict(model.aliases()).get(key, key)
    return next((name for name, info in model.model_fields.items() if key in (name, info.alias)), None)


# ---- types and marks of keys


def _number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError(f"must be a number, not {str(value).lower()}")
    return value


def _whole_number(value: object) -> object:
    value = _number(value)
    if isinstance(value, float) and value.is_integer():  # 1e3 is the number 1000
        value = int(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("must be an integer of at most 64 bits")
    return value


def _items(value: object) -> object:
    return [value] if isinstance(value, (str, int)) and not isinstance(value, bool) else value


def _stop_texts(texts: list[str]) -> list[str]:
    if fault := stop_text_fault(texts):
        raise ValueError(fault)
    return texts


def _divisor(value: float) -> float:
    if value != 0 and not SMALLEST <= value <= LARGEST:
        raise ValueError(f"must lie between {SMALLEST:g} and {LARGEST:g}, or be 0 for greedy decoding, not {value:g}")
    return value


def _share(value: float) -> float:
    if value < SMALLEST:
        raise ValueError(f"must be at least {SMALLEST:g}, not {value:g}")
    return value


Text = Annotated[str, Field(min_length=1)]
Folder = Annotated[Text, AfterValidator(expanduser)]
Int = Annotated[int, BeforeValidator(_whole_number)]
Positive = Annotated[int, BeforeValidator(_whole_number), Field(ge=1)]
Count = Annotated[int, BeforeValidator(_whole_number), Field(ge=0)]
Real = Annotated[float, BeforeValidator(_number)]
NonNegative = Annotated[float, BeforeValidator(_number), Field(ge=0)]
Seed = Annotated[int, BeforeValidator(_whole_number), Field(ge=0, lt=2**32)]
Temperature = Annotated[float, BeforeValidator(_number), Field(ge=0), AfterValidator(_divisor)]
TopP = Annotated[float, BeforeValidator(_number), Field(gt=0, le=1), AfterValidator(_share)]
Fraction = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1)]
StopStrings = Annotated[list[str], BeforeValidator(_items), AfterValidator(_stop_texts)]
StopTokenIds = Annotated[list[Count], BeforeValidator(_items)]


Quantization = Literal["q8_0", "q4_0", "nf4"]
DTYPES = {"bf16": "bfloat16", "fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16"}
"""Other names of dtypes, which vLLM and Megatron accept -> full name."""


def key(default: object, doc: str | None = None, **options: Any) -> Any:
    """Declare a key of a section, with its default and its description in docs/configuration.md. A description that
    does not fit into the line is a docstring below the key instead. `options` are arguments of pydantic's `Field`."""
    return Field(default, description=doc, **options)


def section(model: type[Section]) -> Any:
    """Declare a nested section of the class `model`. If a file omits the section, all its keys have their defaults."""
    return Field(default_factory=model)


def only(*allowed: object, why: str, **options: Any) -> Any:
    """Declare a key of an unsupported feature. It accepts only the values `allowed`, of which the first is the default.
    For another value, the error gives `why` as the reason."""
    return key(allowed[0], why, json_schema_extra={"only": list(allowed), "why": why}, **options)


def no_effect(default: object, why: str = "makes no difference here", **options: Any) -> Any:
    """Declare a key of NeMo RL that accepts any value of its type and is ignored, for the reason `why`."""
    return key(default, why, json_schema_extra={"no_effect": True}, **options)


_TYPES = {
    "any": object, "bool": bool, "count": Positive, "integer": Int, "integers": list[Int], "list": list, "mapping": dict[str, object],
    "null": None, "number": Real, "share": Fraction, "text": str, "texts": list[str],
}  # fmt: skip
_IDLE_KEYS = tomllib.loads(Path(__file__).with_name("idle_keys.toml").read_text(encoding="utf-8"))


def _idle_key(
    type: str, default: object = None, refused: bool = False, why: str = "makes no difference here", **options: str
) -> FieldInfo:
    kinds = reduce(or_, [_TYPES[name] for name in type.split(" or ")])
    field = only(default, why=why, **options) if refused else no_effect(default, why, **options)
    return FieldInfo.from_annotated_attribute(kinds, field)


# ---- keys of a section, read from pydantic's fields


def section_type(annotation: object) -> type[Section] | None:
    """Return the section class in an annotation such as `S`, `S | None` or `S | list[S]`; None if there is none."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if typing.get_origin(annotation) in (typing.Annotated, typing.Union, types.UnionType):
        for argument in typing.get_args(annotation):
            if (found := section_type(argument)) is not None:
                return found
    return None


def fields_of(model: type[Section]) -> Iterator[tuple[str, FieldInfo]]:
    """Yield (name as in YAML, field info) for each key of a section."""
    for name, info in model.model_fields.items():
        yield info.alias or name, info


def section_at(model: type[Section], dotted: str) -> type[Section] | None:
    """Return the class of the section at a dotted key of `model`; None if the key is not a section."""
    found: type[Section] | None = model
    for part in dotted.split("."):
        info = dict(fields_of(found)).get(part) if found is not None else None
        found = section_type(info.annotation) if info is not None else None
    return found


def dotted_fields(model: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield (`prefix` + dotted key, field info) for each key of a section and of its nested sections."""
    for name, info in fields_of(model):
        yield f"{prefix}{name}", info
        if (inner := section_type(info.annotation)) is not None:
            yield from dotted_fields(inner, f"{prefix}{name}.")


@cache
def own_keys(model: type[Section]) -> frozenset[str]:
    """Return the dotted keys of a section and of its nested sections, without alternative names."""
    return frozenset(key for key, _ in dotted_fields(model))


def mark_of(info: FieldInfo) -> Mapping[str, object]:
    """Return the data that `only` or `no_effect`, or the declaration of a key for one loss, attached to the key's
    field. Return {} for other keys."""
    return info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}


def additions(overrides: Sequence[str], model: type[Section]) -> list[str]:
    """Return command-line overrides, with `++` (change or add) put before those of keys in free-form mappings, such as
    hf_config_overrides, because these keys need not exist yet."""
    free = free_mappings(model)

    def added(override: str) -> str:
        key = override.partition("=")[0].strip()
        inside = any(key == mapping or key.startswith(f"{mapping}.") for mapping in free)
        return f"++{override}" if inside and "=" in override else override

    return [added(override) for override in overrides]


@cache
def free_mappings(model: type[Section]) -> frozenset[str]:
    """Return the dotted keys of free-form mappings; `env` is not among them, because the sections in `env` are
    checked."""
    return frozenset(key for key, info in dotted_fields(model) if _is_mapping(info.annotation) and key != "env")


def _is_mapping(annotation: object) -> bool:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return any(_is_mapping(part) for part in typing.get_args(annotation))
    return annotation is dict or typing.get_origin(annotation) is dict


def fill(target: Section, **values: object) -> None:
    """Set each key of `values` in `target` if it is None there. The keys do not count as set by the user."""
    for name, value in values.items():
        if getattr(target, name) is None:
            target.__dict__[name] = value
            target.model_fields_set.discard(name)


# ---- values given in Python


def mistakes(failure: ValidationError, cls: type[Section]) -> list[Problem]:
    """Return the errors in pydantic's `failure` as Problems; `cls` is the section that was validated."""
    found = []
    for error in failure.errors(include_url=False):
        key = dotted_key(error["loc"])
        found.append(Problem("", key, " ".join(sentence(error, key, cls).split())))
    return found


def check_marks(section: Section, prefix: str, report: Report) -> None:
    """Report each key declared by `only` whose value is not allowed. `prefix` ("policy.") precedes keys in messages."""
    if section.is_switched and not section.enabled:
        return
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        key = prefix + (info.alias or name)
        mark = mark_of(info)
        if "only" in mark and not any(type(value) is type(ok) and value == ok for ok in mark["only"]):
            allowed = " or ".join(shown(ok) for ok in mark["only"])
            report.add(key, f"cannot be {shown(value)}: {mark['why']}; set it to {allowed}")
        if isinstance(value, Section):
            check_marks(value, f"{key}.", report)
        elif isinstance(value, list):
            for i, item in enumerate(value):
                if isinstance(item, Section):
                    check_marks(item, f"{key}.{i}.", report)


def _fold_aliases(cls: type[Section], data: dict[str, object], report: Report) -> dict[str, object]:
    """Rename keys given by an alternative name (`Section.spellings`) to the schema's names, in place. Report a key if
    both names are given with different values."""
    for spelling, canonical in cls.aliases():
        parent, name = walk(data, spelling)
        if parent is None or name not in parent:
            continue
        target, short = walk(data, canonical, make_sections=True)
        if target is None:
            continue
        value = parent.pop(name)
        if short in target and in_a_line(target[short], 10**4) != in_a_line(value, 10**4):
            values = f"{in_a_line(value)} and {in_a_line(target[short])}"
            report.add(spelling, f"and {canonical} are one key with two values: {values}; give one")
        target[short] = value
    return data


def walk(data: dict[str, object], dotted: str, make_sections: bool = False) -> tuple[dict[str, object] | None, str]:
    """Return (mapping inside `data` that contains, or would contain, the key `dotted`; last part of `dotted`). If a
    section above the key is missing, it is created with `make_sections`; otherwise the returned mapping is None."""
    *sections, name = dotted.split(".")
    node: object = data
    for part in sections:
        if make_sections and isinstance(node, dict):
            node.setdefault(part, {})
        node = node.get(part) if isinstance(node, dict) else None
    return (node if isinstance(node, dict) else None), name


M = TypeVar("M", bound=Section)


def as_model(config: object, model: type[M], section: str = "") -> M:
    """Return `config` unchanged if it is a `model`, or build a `model` from a mapping. Raise ConfigError for mistakes;
    its keys begin with `section`, such as "policy.generation"."""
    if isinstance(config, model):
        return config
    if not isinstance(config, Mapping):
        text = f"expected a {model.__name__} or a mapping, not {type(config).__name__} ({in_a_line(config)})"
        raise ConfigError([Problem("", section, text)])
    try:
        return model(**plain_values(config))
    except ConfigError as error:
        if not section:
            raise
        where = [Problem("", f"{section}.{p.key}" if p.key else section, p.message) for p in error.problems]
    raise ConfigError(where)


@dataclass(frozen=True)
class Entry:
    """One definition of a `Table`: `target` is an object, or `package.module:Name`, which `load` imports."""

    target: object

    def load(self) -> Any:
        return pkgutil.resolve_name(self.target) if isinstance(self.target, str) else self.target


E = TypeVar("E", bound=Entry)


class Table(UserDict[str, Any], Generic[E]):
    """A mapping from names to objects that imports an object when it is accessed. `data` holds the definitions without
    importing the objects. `what` is the noun for an entry in messages, such as "environment"."""

    data: dict[str, E]

    def __init__(self, what: str, entries: Mapping[str, E]) -> None:
        super().__init__(entries)
        self.what = what

    def __getitem__(self, name: str) -> Any:
        return self.data[name].load()

    def add(
        self, name: str, entry: E, section: type[BaseModel] | None = None, keys: Mapping[str, FieldInfo] | None = None
    ) -> None:
        """Add the definition `entry` of a name, and add the configuration keys `keys` (name -> field) to the class
        `section`. Raise ValueError if the name is taken."""
        if name in self.data:
            raise ValueError(f"the {self.what} {name} is there already: choose another name")
        if section is not None:
            add_keys(section, keys or {})
        self.data[name] = entry


@dataclass(frozen=True)
class OneOf:
    """The type annotation of a string that must be one of the results of `names()`, which is called at each check. With
    `dotted`, any dotted Python name is allowed too; the package `checks` verifies later that it can be imported."""

    names: Callable[[], list[str]]
    dotted: bool = False

    @property
    def choices(self) -> list[str]:
        return [*self.names(), *(["a dotted name"] if self.dotted else [])]

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._checked)

    def _checked(self, value: object) -> str:
        names = self.names()
        if self.dotted and is_user_defined(value):
            return value if isinstance(value, PythonObjectRef) else str(value)
        if not isinstance(value, str) or value not in names:
            raise PydanticKnownError("literal_error", {"expected": ", ".join(repr(name) for name in self.choices)})
        return value


def add_keys(section: type[BaseModel], keys: Mapping[str, FieldInfo]) -> None:
    """Make a section and its subclasses accept `keys` (name -> field). Keys that a class already has stay unchanged."""
    for each in _below(section):
        each.model_fields.update({name: info for name, info in keys.items() if name not in each.model_fields})
    rebuild(section)


def rebuild(section: type[BaseModel]) -> None:
    """Rebuild pydantic's validators of a section and of all sections that contain it, after its keys have changed."""
    own_keys.cache_clear()
    level, done = _below(section), set()
    while level:
        for each in level:
            each.model_rebuild(force=True)
        done |= level
        holders = _below(Section)
        level = {
            each
            for each in holders - done
            if any(section_type(info.annotation) in level for info in each.model_fields.values())
        }


def _below(cls: type[BaseModel]) -> set[type[BaseModel]]:
    return {cls}.union(*(_below(each) for each in cls.__subclasses__()))
