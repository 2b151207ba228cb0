"""Load a configuration. C++ code reads the files, merges them and resolves interpolations. The schema then checks the
result, and all mistakes are reported together."""

import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from nemo_rl_cpp import _config
from nemo_rl_cpp.errors import keep_out_of_files, short_path

from . import master
from .access import mapped, plain
from .base import Section, additions, check_marks, field_name, mistakes, section_at, walk
from .env import environment_sections
from .errors import KINDS, ConfigError, Problem, Report, dotted_key, explained, sentence, unknown_key

PACKAGE = Path(__file__).resolve().parents[1]
_RENAMED = {"grpo.yaml": "grpo_math_1B.yaml", "ppo.yaml": "ppo_math_1B_megatron.yaml"}
_VARIABLE = re.compile(r"\$\{\s*oc\.env:\s*([A-Za-z_]\w*)")


def environment_texts(file: str | os.PathLike[str], overrides: Sequence[str]) -> dict[str, str]:
    """Return {value of an environment variable: "${oc.env:NAME}"} for each variable that the file, a parent file or an
    override reads, if it has six characters or more: shorter values may occur by chance in other text."""
    try:
        tree = _config.load_file(os.fspath(file), folders=parent_folders())
    except _config.LoadError:
        return {}
    names = set(_VARIABLE.findall(f"{tree} {overrides}"))
    found = {os.environ[name]: f"${{oc.env:{name}}}" for name in names if len(os.environ.get(name, "")) >= 6}
    keep_out_of_files(found)
    return found


_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*")


class GivenValues:
    """Configuration values that a Python caller gives in addition to a file, by dotted key."""

    def __init__(self, values: Mapping[str, object], places: Mapping[str, str], model: type[Section]) -> None:
        self._model = model
        self._canonical = dict(model.aliases())
        self.problems: list[Problem] = []
        self._values: dict[str, object] = {}
        self._places: dict[str, str] = {}
        for key, value in values.items():
            place = places.get(key, f"value of {key}")
            key = self._canonical.get(key, key)
            if not self._is_known(key):
                self.problems.append(Problem(place, key, unknown_key(key, model)))
                continue
            try:
                for dotted, item in self._leaves(key, plain(value)):
                    self._take(dotted, item, place)
            except ConfigError as error:
                self.problems += [Problem(place, key, problem.message) for problem in error.problems]
        texts = "".join(map(repr, self._values.values()))
        self._mark = next(mark for n in range(10**6) if (mark := f"given_value_{n}_") not in texts)
        numbered = enumerate(self._values.items())
        self.overrides = [f"++{key}={self._as_override(i, value)}" for i, (key, value) in numbered]
        self.origins = dict(zip((f"override '{text}'" for text in self.overrides), self._places.values()))
        """{override that was made from a Python value: the caller's name of this value, such as "argument seed"}"""

    def _leaves(self, key: str, value: object) -> Iterator[tuple[str, object]]:
        if isinstance(value, Section):
            value = value.model_dump(exclude_unset=True)
        if isinstance(value, dict) and value and section_at(self._model, key) is not None:
            for name, item in value.items():
                yield from self._leaves(self._canonical.get(f"{key}.{name}", f"{key}.{name}"), item)
        else:
            yield key, value

    def _is_known(self, key: str) -> bool:
        if not _KEY.fullmatch(key):
            return False
        known, parts = self._model.known_keys(), key.split(".")
        if key in known:
            return True
        above = next((dotted for n in range(len(parts) - 1, 0, -1) if (dotted := ".".join(parts[:n])) in known), None)
        section = section_at(self._model, above) if above is not None else self._model
        return section is None or section.model_config.get("extra") != "forbid"

    def _take(self, key: str, value: object, place: str) -> None:
        parent, _, name = key.rpartition(".")
        section = section_at(self._model, parent) if parent else self._model
        if not self._is_known(key):
            self.problems.append(Problem(place, key, unknown_key(key, self._model)))
            return
        field = field_name(section, name) if section is not None else None
        if field is not None:
            try:  # checked strictly like an assignment, because the loader accepts strings as numbers
                section.__pydantic_validator__.validate_assignment(section.model_construct(), field, value)
            except ValidationError as failure:
                found = mistakes(failure, section)
                self.problems += [Problem(place, key.removesuffix(name) + p.key, p.message) for p in found]
                return
        self._values[key] = value
        self._places[key] = place

    def _as_override(self, index: int, value: object) -> str:
        if value is None:
            return "null"
        if isinstance(value, (bool, int, float)) and abs(value) < 2**63:
            return repr(value).lower()  # exact: the shortest text that parses to the same number
        return f"{self._mark}{index}_"

    def restore(self, data: dict[str, object], positions: dict[str, str]) -> None:
        """Replace the placeholders in the loaded `data` that stand for Python values in the overrides by these values,
        and record their places in `positions`."""
        values = list(self._values.values())
        pattern = re.compile(re.escape(self._mark) + r"(\d+)_")

        def fill(leaf: object) -> object:
            if not isinstance(leaf, str):
                return leaf
            whole = pattern.fullmatch(leaf)
            return values[int(whole[1])] if whole else pattern.sub(lambda found: str(values[int(found[1])]), leaf)

        filled = {key: mapped(item, fill) for key, item in data.items()}
        data.clear()
        data.update(filled)
        for key, value in self._values.items():
            parent, name = walk(data, key)
            if parent is not None:
                parent[name] = value
            if isinstance(value, (dict, list)):  # the value replaces the keys inside it that the file set
                for inner in [known for known in positions if known.startswith(f"{key}.")]:
                    del positions[inner]
            positions[key] = self._places[key]


Master = TypeVar("Master", bound=master.MasterConfig)
Part = TypeVar("Part", bound=Section)


def _loader(kind: str, model: type[Master]) -> Callable[..., Master]:
    def load(
        path: str | os.PathLike[str] = KINDS[kind].default_config,
        overrides: Sequence[str] = (),
        values: Mapping[str, object] | None = None,
        places: Mapping[str, str] | None = None,
    ) -> Master:
        return _load(path, overrides, model, values, places)

    load.__name__ = load.__qualname__ = f"load_{kind}_config"
    load.__doc__ = f"""Load and check the configuration of {KINDS[kind].words}, without importing torch.

    Args:
        path: a YAML file, or the name of a shipped one.
        overrides: Hydra overrides such as "policy.optimizer.kwargs.lr=1e-6".
        values: dotted key -> Python value, applied last. Strings are taken literally: they are never read as
            interpolations, numbers or escapes.
        places: dotted key -> name of a value in messages ("argument learning_rate").

    Raise ConfigError (a ValueError), which lists every mistake with file, line, key and remedy.
    """
    return load


load_grpo_config = _loader("grpo", master.GRPOMasterConfig)
load_ppo_config = _loader("ppo", master.PPOMasterConfig)
load_distillation_config = _loader("distillation", master.DistillationMasterConfig)
load_sft_config = _loader("sft", master.SFTMasterConfig)
load_eval_config = _loader("eval", master.EvalMasterConfig)
LOADERS = dict(
    grpo=load_grpo_config, ppo=load_ppo_config, distillation=load_distillation_config, sft=load_sft_config,
    eval=load_eval_config,
)  # fmt: skip
"""Kind of a configuration -> the function that loads it."""


def of_another_kind(sections: Iterable[str], own: str) -> tuple[str, str] | None:
    """Return (section, message) if `sections`, those of a file, show that the file is for another kind of run than
    `own` (a key of KINDS); otherwise None."""
    there = set(sections)
    other = next((name for name in KINDS if name in there), None) if own not in there else None
    if other is None:
        return None
    words, script, *_ = KINDS[other]
    text = f"makes the file a configuration of {words}, not of {KINDS[own].words}: it is run by"
    return other, f"{text} examples/{script}.py (python -m nemo_rl_cpp.{script})"


def _load(
    path: str | os.PathLike[str],
    overrides: Sequence[str],
    model: type[Master],
    values: Mapping[str, object] | None,
    places: Mapping[str, str] | None,
) -> Master:
    given = GivenValues(values or {}, places or {}, model)
    file = find_config(path)
    overrides = [overrides] if isinstance(overrides, str) else list(overrides)
    every = [*additions(overrides, model), *given.overrides]
    try:
        aliases, known = list(model.aliases()), set(model.known_keys())
        data, positions, problems = _config.load(str(file), every, aliases, known, parent_folders())
    except _config.LoadError as error:
        raise _unread(error) from None
    # an override of a section does not change the file's kind
    sections = {key for key, where in positions.items() if "." not in key and not where.startswith("override ")}
    own = next(name for name in KINDS if name in model.model_fields)
    if (other := of_another_kind(sections, own)) is not None:
        raise ConfigError([Problem(positions[other[0]], *other)])
    report = Report(positions, short_path(file.resolve()))
    report.problems += given.problems
    for kind, key, where, message in problems:
        where = given.origins.get(where, where)
        text = unknown_key(key, model) if kind == "unknown_key" else message
        if kind == "unknown_key" and model.takes_own_key(key):
            written = where.removeprefix("override '").removesuffix("'")
            text += f" (to add a key of your own write +{written})"
        report.problems.append(Problem(where, key, text))
        if kind == "interpolation":
            _remove(data, tuple(key.split(".")))
    for key in _not_given(data, ""):
        text = "is '???': it must be given, in the file or on the command line"
        report.problems.append(Problem(report.where(key), key, text))
    given.restore(data, positions)
    in_the_text = list(report.problems)
    config = _validate(data, model, report)
    if config is not None:
        config.check_rules(report)
    known = {problem.key for problem in report.problems}
    for key in positions:  # in a section with free keys nothing else reports it
        if key.endswith("._override_") and key not in known:
            report.add(key, unknown_key(key, model))
    if report.problems:
        of_values = report.problems[len(in_the_text) :]
        raise ConfigError(in_the_text + _without_consequences(of_values, file, positions, model))
    assert config is not None
    config._positions = positions
    config._environment = environment_texts(file, overrides)
    return config


_REFERENCE = re.compile(r"\$\{\s*(\.*)([A-Za-z_][\w.]*)\s*\}")  # ${section.key}; ${.key}: in the same section


def _without_consequences(
    problems: Sequence[Problem], file: Path, positions: Mapping[str, str], model: type[Section]
) -> list[Problem]:
    """Return `problems` without those of keys whose values are interpolated (`${key}`) from another key in `problems`.
    `positions` maps keys to the places that set them."""
    tree, canonical = _config.load_file(str(file), folders=parent_folders()), dict(model.aliases())
    wrong = {problem.key for problem in problems}

    def follows(key: str) -> bool:
        place, (parent, name) = positions.get(key, ""), walk(tree, key)
        text = place.partition("=")[2] if place.startswith("override ") else (parent or {}).get(name)
        for dots, source in _REFERENCE.findall(text) if isinstance(text, str) else ():
            source = ".".join([*key.split(".")[: -len(dots)], source]) if dots else source
            if canonical.get(source, source) in wrong:
                return True
        return False

    return [problem for problem in problems if not follows(problem.key)]


def _not_given(data: object, prefix: str) -> list[str]:
    if data == "???":
        return [prefix]
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [key for name, value in inner for key in _not_given(value, f"{prefix}.{name}" if prefix else str(name))]


def _validate(data: dict[str, object], model: type[Master], report: Report) -> Master | None:
    """Return the configuration `data` as a `model`. Report mistakes, and remove wrong values from `data`, so that the
    rest can be checked, too. Return None if that is impossible."""
    if isinstance(env := data.get("env"), dict):
        for name, inner in environment_sections().items():
            if isinstance(env.get(name), dict):
                checked = _validate_part(env[name], inner, ("env", name), model, report)
                env[name] = checked.model_dump(exclude_unset=True) if checked is not None else {}
                if checked is not None:
                    check_marks(checked, f"env.{name}.", report)
    return _validate_part(data, model, (), model, report)


def _validate_part(
    data: dict[str, object], part: type[Part], prefix: tuple[str, ...], model: type[master.MasterConfig], report: Report
) -> Part | None:
    first = True
    for _ in range(4):  # a repair may reveal another mistake, at most one per level of nesting
        try:
            return part.model_validate(data, strict=False)
        except ValidationError as failure:
            for error in failure.errors(include_url=False):
                key = dotted_key(prefix + error["loc"])
                if first and not report.has_problem(key):
                    where = report.where(key)
                    report.problems.append(Problem(where, key, sentence(error, key, model, where)))
                _repair(data, error)
            first = False
    return None


def _repair(data: dict[str, object], error: ErrorDetails) -> None:
    """Change `data` so that validation can continue: remove a wrong value, or set a placeholder for a missing value."""
    *above, last = location = [part for part in dotted_key(error["loc"]).split(".") if part] or [""]
    if error["type"] != "missing":
        _remove(data, location)
        return
    node: dict | list = data
    for part in above:
        node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
    node[last] = {} if last in ("policy", "generation", "data") else "?"


def _remove(node: object, location: Sequence[str]) -> None:
    """Remove the value at `location` (keys and list indices) from `node` in place. If the value is an element of a
    list, remove the whole list."""
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
    """Return the kind of run (a key of `LOADERS`) that a file's sections show. Raise ConfigError if unreadable."""
    file = find_config(path)
    try:
        data = _config.load_file(str(file), folders=parent_folders())
    except _config.LoadError as error:
        raise _unread(error) from None
    return next((kind for kind in LOADERS if kind != "grpo" and kind in data), "grpo")


def _unread(error: _config.LoadError) -> ConfigError:
    """Return the error for a file that cannot be read. For a missing parent, such as the `../../grpo_math_1B.yaml` of a
    recipe that was copied from NeMo RL, the message suggests the shipped file of this name."""
    text, near = explained(str(error)), []
    if missing := re.search(r"the configuration file (.*) does not exist$", text):
        name = _shipped_name(Path(missing[1]).name)
        near = [shipped for shipped in shipped_configs() if Path(shipped).name == name]
    return ConfigError([Problem("", "", f"{text}; did you mean {' or '.join(near)}?" if near else text)])


# ---- finding a configuration file: as given, in the source tree, or in the installed package


def config_folders() -> list[Path]:
    """Return the folders with shipped configurations. In a checkout, the repository's `configs/` comes first."""
    root = PACKAGE.parents[1]
    is_checkout = (root / "pyproject.toml").is_file() and (root / "configs").is_dir()
    return ([root / "configs"] if is_checkout else []) + [PACKAGE / "configs"]


def parent_folders() -> list[str]:
    """Return the folders in which to search for a parent file of `defaults:`, such as `configs/grpo_tiny.yaml`."""
    return [os.fspath(place) for folder in config_folders() for place in (folder, folder.parent)]


def find_config(path: str | os.PathLike[str]) -> Path:
    """Return the YAML file for `path`: an existing file, or a shipped configuration, with or without a leading
    `configs/`, whose name may also be NeMo RL's (an entry of `_RENAMED`, or `NAME.v2.yaml`). Raise ConfigError, with
    the most similar names, if there is none."""
    given = Path(path).expanduser()
    if given.is_file():
        return given
    prefixes = ("examples/configs", "configs")
    relative = next((given.relative_to(prefix) for prefix in prefixes if given.is_relative_to(prefix)), given)
    names = [relative, relative.with_name(_shipped_name(relative.name))]
    places = [] if given.is_absolute() else [folder / name for folder in config_folders() for name in names]
    if (found := next(filter(Path.is_file, places), None)) is None:
        raise ConfigError([Problem("", "", _not_found(str(path), relative))])
    return found


def _shipped_name(name: str) -> str:
    """Return the name of the file that is shipped for NeMo RL's file `name`; for another name, the name itself."""
    return _RENAMED.get(name, name.replace(".v2.yaml", ".yaml"))


def shipped_configs() -> dict[str, Path]:
    """Return {name of a shipped configuration, in the form that --config accepts: its file}."""
    files = {str(p.relative_to(folder)): p for folder in reversed(config_folders()) for p in folder.rglob("*.yaml")}
    return dict(sorted(files.items()))


def _not_found(given: str, relative: Path) -> str:
    known = list(shipped_configs())
    stems = {name.removesuffix(".yaml"): name for name in known}  # the common suffix would distort the comparison
    near = [stems[stem] for stem in difflib.get_close_matches(str(relative.with_suffix("")), list(stems), 3, 0.6)]
    near += [name for name in known if Path(name).name == relative.name and name not in near]
    hint = f"did you mean {' or '.join(near)}?" if near else f"shipped are {', '.join(known)}"
    return f"the configuration file {given} does not exist, neither here nor among the shipped ones; {hint}"
