"""Rules of data sets, prompts and environments."""

from nemo_rl_cpp.argument_checks import did_you_mean
from nemo_rl_cpp.files.prompt_files import find_prompt

from .data import (
    DATASET_ALIASES,
    DATASET_REGISTRY,
    DataConfig,
    DatasetConfig,
    DatasetDefaults,
    EvalDataConfig,
    dataset_keys,
    datasets_of,
    is_class_name,
    takes,
)
from .env import EnvConfigs, GuessNumberEnvConfig
from .errors import Report


def check_data(data: DataConfig, env: EnvConfigs, turns: int, turns_key: str, report: Report) -> None:
    """`turns`: the value of `turns_key`, grpo.max_rollout_turns or ppo.max_rollout_turns."""
    check_env(env, report)
    if data.train is None or data.train == []:
        report.add("data.train", "is missing: name a data set, for example dataset_name: arithmetic")
    default = data.default or DatasetDefaults()
    _check_files(default, "data.default", report)
    _check_default(default, report)
    used, names = set(), set()
    for split in ("train", "validation"):
        for dotted, dataset in datasets_of(getattr(data, split), f"data.{split}"):
            _check_dataset(dataset, dotted, report, default)
            names.add(default.dataset_name if "dataset_name" not in dataset.model_fields_set else dataset.dataset_name)
            inherits = dataset.env_name is None
            name = default.env_name if inherits else dataset.env_name
            _check_env_name(name, "data.default" if inherits else dotted, env, report)
            used.add(name)
    for key in default.model_extra or {}:
        if not any(name is not None and takes(name, key) for name in names):
            report.add(
                f"data.default.{key}",
                f"is taken by none of the data sets {', '.join(sorted(map(str, names)))}; remove it",
            )
    if "guess_number" in used & env.keys():
        guesses = GuessNumberEnvConfig(**(env["guess_number"] or {})).max_guesses
        if guesses > turns:
            report.add(
                turns_key,
                f"is {turns}, but a game of env.guess_number takes up to {guesses} turns (max_guesses) and would be cut "
                "off; raise it, or lower max_guesses",
                "env.guess_number.max_guesses",
            )


def check_eval_data(data: EvalDataConfig, env: EnvConfigs, report: Report) -> None:
    check_env(env, report)
    _check_dataset(data, "data", report)
    if data.env_name is None and len(env) != 1:
        report.add(
            "data.env_name",
            f"is missing: which environment scores the responses? env has {', '.join(env) or 'no entry'}; name one",
        )
    _check_env_name(data.env_name, "data", env, report)


def _check_dataset(dataset: DatasetConfig, dotted: str, report: Report, default: DatasetDefaults | None = None) -> None:
    _check_files(dataset, dotted, report)
    inherits = "dataset_name" not in dataset.model_fields_set and default is not None
    name = default.dataset_name if inherits else dataset.dataset_name
    if name is None:
        report.add(f"{dotted}.dataset_name", "is missing: name a data set, here or in data.default")
        return
    if not _is_known(name, "data.default" if inherits else dotted, report) or is_class_name(name):
        return
    name = DATASET_ALIASES.get(name, name)
    _check_extra_keys(dataset, dotted, DATASET_REGISTRY.entries[name].keys, report)
    given = {*(dataset.model_extra or {}), *((default.model_extra or {}) if default is not None else ())}
    if name == "ResponseDataset" and "data_path" not in given:
        report.add(
            f"{dotted}.data_path",
            "is missing: ResponseDataset reads a file or a data set of the hub",
            f"{dotted}.dataset_name",
        )


def _is_known(name: str, dotted: str, report: Report) -> bool:
    """Whether there is such a data set; reports a name that is neither known nor a class."""
    if name in DATASET_REGISTRY or name in DATASET_ALIASES or is_class_name(name):
        return True
    names = [*DATASET_REGISTRY, *DATASET_ALIASES]
    meant = next((known for known in names if known.lower() == name.lower()), name)
    hint = did_you_mean(meant, names, f"known are {', '.join(DATASET_REGISTRY)}", 0.5)
    report.add(
        f"{dotted}.dataset_name",
        f"{name} is unknown; {hint} (a data set of the hub is read by dataset_name: ResponseDataset with data_path: OWNER/NAME, "
        "input_key and output_key; a class of your own is written package.module.Name)",
    )
    return False


def _check_default(default: DatasetDefaults, report: Report) -> None:
    """Its keys may be those of any data set: which one takes them is not known here."""
    name = default.dataset_name
    if name is not None and (not _is_known(name, "data.default", report) or is_class_name(name)):
        return
    _check_extra_keys(default, "data.default", tuple({key for keys in dataset_keys().values() for key in keys}), report)


def _check_extra_keys(dataset: DatasetDefaults, dotted: str, allowed: tuple[str, ...], report: Report) -> None:
    known = sorted({*type(dataset).model_fields, *allowed})
    for key in dataset.model_extra or {}:
        if key in allowed:
            continue
        if key == "_override_":
            report.add(f"{dotted}.{key}", "works in a section at the top of the file only, not deeper")
            continue
        hint = did_you_mean(key, known, f"known are {', '.join(known)}")
        report.add(f"{dotted}.{key}", f"is unknown; {hint}")


def _check_files(dataset: DatasetDefaults, dotted: str, report: Report) -> None:
    for name in ("prompt_file", "system_prompt_file"):
        path = getattr(dataset, name)
        if path is not None and find_prompt(path) is None:
            report.add(
                f"{dotted}.{name}", f"names the file {path}, which does not exist; correct the path or write null"
            )


def check_env(env: EnvConfigs, report: Report) -> None:
    """NeMo RL's switches below `env` for what scores or runs the responses elsewhere: they would leave another environment in charge."""
    instead = "write an environment (register_env) or a reward function (env.reward_functions) that asks it"
    if env.get("should_use_nemo_gym"):
        report.add(
            "env.should_use_nemo_gym", f"cannot be true: NeMo Gym is not supported; set it to false, or {instead}"
        )
    model = env.get("reward_model")
    if isinstance(model, dict) and model.get("enabled"):
        report.add(
            "env.reward_model.enabled",
            f"cannot be true: a reward model as environment is not supported; set it to false, or {instead}",
        )


def _check_env_name(name: str | None, dotted: str, env: EnvConfigs, report: Report) -> None:
    if name is None or name in env:
        return
    hint = did_you_mean(name, env, f"env has {', '.join(env) or 'no entry'}", 0.5)
    report.add(f"{dotted}.env_name", f"{name} has no section env.{name}; {hint}")
