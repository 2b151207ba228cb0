"""The defaults of a configuration's schema, to say what a run changed."""

from collections.abc import Collection

from pydantic import BaseModel

from nemo_rl_cpp.config.access import to_plain, written
from nemo_rl_cpp.loggers.interface import flatten_dict


def schema_defaults(config: object) -> dict[str, object]:
    """The defaults of a pydantic configuration as plain data; mandatory keys are absent.

    Values that nobody wrote but that follow from others (`config.positions` knows who wrote what) count as defaults. An
    object that is no pydantic model has none: an empty dict.
    """
    if not isinstance(config, BaseModel):
        return {}
    defaults = _defaults(config)
    positions = getattr(config, "positions", None)
    if positions:
        for key, value in flatten_dict(written(config), expand_lists=False).items():
            if not written_by(key, positions):
                _put(defaults, key.split("."), value)
    return defaults


def written_by(key: str, positions: Collection[str]) -> list[str]:
    """The keys by whose lines somebody wrote this one: itself, those below it, or the whole value that it is a part of."""
    if key in positions:
        return [key]
    if below := _below(key, positions):
        return below
    parts = key.split(".")
    whole = next((a for n in range(len(parts) - 1, 0, -1) if (a := ".".join(parts[:n])) in positions), None)
    return [] if whole is None or _below(whole, positions) else [whole]


def _below(key: str, positions: Collection[str]) -> list[str]:
    return [other for other in positions if other.startswith((f"{key}.", f"{key}["))]


def _defaults(model: BaseModel) -> dict[str, object]:
    values: dict[str, object] = {}
    for name, info in type(model).model_fields.items():
        value = getattr(model, name, None)
        if isinstance(value, BaseModel):
            # the section that is in use, so that a union of kinds is compared with the defaults of its own kind
            values[info.alias or name] = _defaults(value)
        elif not info.is_required():
            values[info.alias or name] = to_plain(info.get_default(call_default_factory=True))
    return values


def _put(tree: dict[str, object], path: list[str], value: object) -> None:
    for part in path[:-1]:
        branch = tree.get(part)
        if not isinstance(branch, dict):
            branch = tree[part] = {}
        tree = branch
    tree[path[-1]] = value
