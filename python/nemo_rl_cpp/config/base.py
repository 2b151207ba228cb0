"""What every section shares: attribute and key access, number types, and the marks that a key may carry."""

import tomllib
from collections.abc import Iterator, KeysView, Mapping
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from nemo_rl_cpp.argument_checks import LARGEST, SMALLEST, stop_text_fault

from . import python_values


class _Made(type(BaseModel)):  # type: ignore[misc]
    """`Section(key=value)` raises ConfigError, as the loader does; what the loader reads is not made through here."""

    def __call__(cls, *given: object, **values: object) -> Any:
        return python_values.make(cls, super().__call__, given, values)


class Section(BaseModel, metaclass=_Made):
    """One mapping of the configuration, read as `section.key` or, as in NeMo RL's scripts, `section["key"]`.

    Unknown keys are errors. A key marked by `only` takes no value but the listed ones, because the feature behind it is
    not supported; a key marked by `no_effect` is known and makes no difference here. Those of NeMo RL stand in idle_keys.toml,
    by the name of the section's class. Made in Python or assigned to, a
    section holds the values that it was given: a text is not read as a number, nor a number as a text. Raises ConfigError.
    """

    model_config = ConfigDict(
        strict=True,  # the loader asks for less: texts of ${oc.env:...} are numbers there
        validate_assignment=True,
        extra="forbid",
        populate_by_name=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        validate_default=False,
        defer_build=True,
    )
    is_switched: ClassVar[bool] = False
    """Whether the section does nothing where its key `enabled` is false; unsupported features are then not looked for in it."""

    @classmethod
    def __pydantic_init_subclass__(cls, **options: object) -> None:
        """Gives the section its keys of idle_keys.toml, and those of the sections that it derives from, behind its own."""
        for base in reversed(cls.__mro__):
            for name, info in _idle_keys(base.__name__).items():
                if base is cls or name not in cls.model_fields:
                    cls.model_fields[name] = info

    def __getitem__(self, key: str) -> Any:
        name = _field_name(type(self), key)
        if name is not None:
            return getattr(self, name)
        extra = self.model_extra or {}
        if key in extra:
            return extra[key]
        if key in type(self).__private_attributes__:
            return getattr(self, key)
        raise KeyError(key)

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("_"):  # of the program, not of the file
            super().__setattr__(name, value)
        else:
            python_values.assign(self, super().__setattr__, name, value)

    def __setitem__(self, key: str, value: object) -> None:
        setattr(self, _field_name(type(self), key) or key, value)

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, str):
            return False
        return (
            _field_name(type(self), key) is not None
            or key in (self.model_extra or {})
            or key in type(self).__private_attributes__
        )

    def get(self, key: str, default: object = None) -> Any:
        return self[key] if key in self else default

    def keys(self) -> KeysView[str]:
        return self.model_dump().keys()

    def items(self) -> Iterator[tuple[str, object]]:
        return ((key, self[key]) for key in self.keys())

    def model_dump(self, **options: Any) -> dict[str, Any]:
        options.setdefault("by_alias", True)  # `_v2` is not a possible attribute name
        return super().model_dump(**options)


Settings = Section | Mapping[str, object]
"""A section, or a mapping with its keys."""


def _field_name(model: type[BaseModel], key: str) -> str | None:
    if key in model.model_fields:
        return key
    key = dict(python_values.aliases_of(model)).get(key, key)
    return next((name for name, info in model.model_fields.items() if key in (name, info.alias)), None)


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
    """A single item is a list of one."""
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


def key(default: object, doc: str, **options: Any) -> Any:
    """A key with its default and meaning. The default is written nowhere else."""
    if isinstance(default, (list, dict)):
        return Field(default_factory=lambda: type(default)(default), description=doc, **options)
    return Field(default, description=doc, **options)


def section(model: type[Section], doc: str) -> Any:
    """A section that is filled with its defaults when the file leaves it out."""
    return Field(default_factory=model, description=doc)


def only(*allowed: object, why: str, **options: Any) -> Any:
    """A key of a feature that is not supported: the first of `allowed` is the default, any other value is an error."""
    return key(allowed[0], why, json_schema_extra={"only": list(allowed), "why": why}, **options)


def no_effect(default: object, why: str = "makes no difference here", **options: Any) -> Any:
    """A key of NeMo RL that is accepted with any value of its type."""
    return key(default, why, json_schema_extra={"no_effect": True}, **options)


_TYPES = {
    "any": object, "bool": bool, "count": Positive, "integer": Int, "integers": list[Int], "list": list, "mapping": dict[str, object],
    "null": None, "number": Real, "share": Fraction, "text": str, "texts": list[str],
}  # fmt: skip
_IDLE_KEYS = tomllib.loads(Path(__file__).with_name("idle_keys.toml").read_text(encoding="utf-8"))


def _idle_keys(section: str) -> dict[str, FieldInfo]:
    """The keys that the table has for a class of this name."""
    return {name: _idle_key(**row) for name, row in _IDLE_KEYS.get(section, {}).items()}


def _idle_key(
    type: str, default: object = None, refused: bool = False, why: str = "makes no difference here", **options: str
) -> FieldInfo:
    kinds = reduce(or_, [_TYPES[name] for name in type.split(" or ")])
    field = only(default, why=why, **options) if refused else no_effect(default, why, **options)
    return FieldInfo.from_annotated_attribute(kinds, field)
