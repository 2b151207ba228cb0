"""Loads a configuration: C++ reads, merges and resolves; the schema checks; every mistake is reported at once."""

import os
from collections.abc import Mapping, Sequence
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from nemo_rl_cpp import _config
from nemo_rl_cpp.errors import short_path

from . import rules
from .aliases import ALIASES
from .base import Section
from .env import environment_sections
from .environment import environment_values
from .errors import ConfigError, Problem, Report
from .given_values import GivenValues
from .keys import additions
from .locate import find_config, parent_folders
from .master import EvalMasterConfig, GRPOMasterConfig, MasterConfig, PPOMasterConfig
from .messages import dotted_key, known_keys, sentence, takes_own_keys, unknown_key
from .python_values import check_marks
from .written import KINDS, explained, of_another_kind

Master = TypeVar("Master", bound=MasterConfig)
Part = TypeVar("Part", bound=Section)


def load_grpo_config(
    path: str | os.PathLike[str] = "grpo_math_1B.yaml",
    overrides: Sequence[str] = (),
    values: Mapping[str, object] | None = None,
    places: Mapping[str, str] | None = None,
) -> GRPOMasterConfig:
    """The checked configuration of a GRPO, DAPO or ProRLv2 run.

    `path` is a YAML file, or the name of a shipped one; `overrides` are Hydra's ("policy.optimizer.kwargs.lr=1e-6").
    `values` are Python values by dotted key, which come last and are taken as they are: no text of theirs is an
    interpolation, a number or an escape. `places` says how messages name such a key ("argument learning_rate").
    Raises ConfigError (a ValueError) that lists every mistake with file, line, key and remedy. Does not import torch.
    """
    return _load(path, overrides, GRPOMasterConfig, values, places)


def load_ppo_config(
    path: str | os.PathLike[str] = "ppo_math_1B_megatron.yaml",
    overrides: Sequence[str] = (),
    values: Mapping[str, object] | None = None,
    places: Mapping[str, str] | None = None,
) -> PPOMasterConfig:
    """The checked configuration of a PPO run; see `load_grpo_config`."""
    return _load(path, overrides, PPOMasterConfig, values, places)


def load_eval_config(
    path: str | os.PathLike[str] = "evals/eval.yaml",
    overrides: Sequence[str] = (),
    values: Mapping[str, object] | None = None,
    places: Mapping[str, str] | None = None,
) -> EvalMasterConfig:
    """The checked configuration of an evaluation; see `load_grpo_config`."""
    return _load(path, overrides, EvalMasterConfig, values, places)


LOADERS = {"grpo": load_grpo_config, "ppo": load_ppo_config, "eval": load_eval_config}
"""Kind of a configuration -> what loads it."""


def _load(
    path: str | os.PathLike[str],
    overrides: Sequence[str],
    model: type[Master],
    values: Mapping[str, object] | None,
    places: Mapping[str, str] | None,
) -> Master:
    given = GivenValues(values or {}, places or {}, model)
    file = find_config(path)
    every = [*additions(_texts(overrides), model), *given.overrides]
    try:
        data, positions, problems = _config.load(str(file), every, ALIASES, set(known_keys(model)), parent_folders())
    except _config.LoadError as error:
        raise ConfigError([Problem("", "", explained(str(error)))]) from None
    # an override of a section does not make a file another kind
    sections = {key for key, where in positions.items() if "." not in key and not where.startswith("override ")}
    own = next(name for name in KINDS if name in model.model_fields)
    if (other := of_another_kind(sections, own)) is not None:
        raise ConfigError([Problem(positions[other[0]], *other)])
    report = Report(positions, short_path(file.resolve()))
    report.problems += given.problems
    for kind, key, where, message in problems:
        where = given.place_of(where)
        text = unknown_key(key, model) if kind == "unknown_key" else message
        if kind == "unknown_key" and takes_own_keys(key, model):
            written = where.removeprefix("override '").removesuffix("'")
            text += f" (to add a key of your own write +{written})"
        report.problems.append(Problem(where, key, text))
        if kind == "interpolation":
            _remove(data, tuple(key.split(".")))
    for key in _not_given(data, ""):
        report.problems.append(
            Problem(report.where(key), key, "is '???': it must be given, in the file or on the command line")
        )
    given.restore(data, positions)
    config = _validate(data, model, report)
    if config is not None:
        config.fill_defaults()
        check_marks(config, "", report)
        rules.check(config, report)
    if report.problems:
        raise ConfigError(report.problems)
    assert config is not None
    config._positions = positions
    config._environment = environment_values(file, overrides)
    return config


def _texts(overrides: Sequence[str]) -> list[str]:
    """The overrides; a bare text is one."""
    texts = [overrides] if isinstance(overrides, str) else list(overrides)
    wrong = next((text for text in texts if not isinstance(text, str)), None)
    if wrong is not None:
        kind = type(wrong).__name__
        said = f"an override is a text such as 'grpo.seed=1', not {kind}; Python values go into `values`"
        raise ConfigError([Problem("", "", said)])
    return texts


def _not_given(data: object, prefix: str) -> list[str]:
    """Keys whose value is OmegaConf's mark of a mandatory value, `???`."""
    if data == "???":
        return [prefix]
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [key for name, value in inner for key in _not_given(value, f"{prefix}.{name}" if prefix else str(name))]


def _validate(data: dict[str, object], model: type[Master], report: Report) -> Master | None:
    """The typed configuration; of a file with mistakes, what is left without them, so that the rest is checked too."""
    if isinstance(env := data.get("env"), dict):
        for name, inner in environment_sections().items():
            if isinstance(env.get(name), dict):
                checked = _validate_part(env[name], inner, ("env", name), model, report)
                env[name] = checked.model_dump(exclude_unset=True) if checked is not None else {}
    return _validate_part(data, model, (), model, report)


def _validate_part(
    data: dict[str, object], part: type[Part], prefix: tuple[str, ...], model: type[MasterConfig], report: Report
) -> Part | None:
    first = True
    for _ in range(4):  # a repair may uncover a mistake, at most one a level
        try:
            return part.model_validate(data, strict=False)
        except ValidationError as failure:
            for error in failure.errors(include_url=False):
                key = dotted_key(prefix + error["loc"])
                if first and not report.has_problem(key):
                    report.problems.append(
                        Problem(report.where(key), key, sentence(error, key, model, report.where(key)))
                    )
                _repair(data, error)
            first = False
    return None


def _repair(data: dict[str, object], error: ErrorDetails) -> None:
    """Takes what is wrong out of the data; what is missing is put there, so that the rest can be checked."""
    *above, last = location = [part for part in dotted_key(error["loc"]).split(".") if part] or [""]
    if error["type"] != "missing":
        _remove(data, location)
        return
    node: dict | list = data
    for part in above:
        node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
    node[last] = {} if last in ("policy", "generation", "data") else "?"


def _remove(node: object, location: Sequence[str]) -> None:
    """Removes a key; for an element of a list, the whole list."""
    if not isinstance(node, dict) or not location or location[0] not in node:
        return
    name, *rest = location
    inner = node[name]
    if isinstance(inner, dict) and rest:
        _remove(inner, rest)
    elif isinstance(inner, list) and len(rest) > 1 and rest[0].isdigit() and isinstance(inner[int(rest[0])], dict):
        _remove(inner[int(rest[0])], rest[1:])
    else:
        del node[name]


def kind_of(path: str | os.PathLike[str]) -> str:
    """ "grpo", "ppo" or "eval", by the sections of a file."""
    file = find_config(path)
    try:
        data = _config.load_file(str(file), folders=parent_folders())
    except _config.LoadError as error:
        raise ConfigError([Problem("", "", explained(str(error)))]) from None
    return "ppo" if "ppo" in data else "eval" if "eval" in data else "grpo"
