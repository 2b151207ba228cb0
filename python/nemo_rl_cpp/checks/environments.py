"""Checks of environments, reward functions and data set classes: they are imported, and asked for what a run needs of them.

What is the user's own may import torch, which takes its time; environments of this package are not imported.
"""

from collections.abc import Iterator, Mapping

from nemo_rl_cpp.config.data import DatasetConfig, datasets_of
from nemo_rl_cpp.config.env import ENV_REGISTRY
from nemo_rl_cpp.config.master import TrainMasterConfig, WholeConfig
from nemo_rl_cpp.environments.loading import (
    LoadingError,
    check_reward_section,
    environment_class,
    environment_target,
    needed_package,
    own_dataset_class,
)
from nemo_rl_cpp.errors import install_command

from .finding import Finding


def check(config: WholeConfig) -> Iterator[Finding]:
    """Findings about the environments that the data sets use, and about data set classes of the user's."""
    for key, each in _datasets(config):
        if "." in each.dataset_name and each.dataset_name.replace(".", "").isidentifier():
            try:
                own_dataset_class(each.dataset_name)
            except LoadingError as error:
                yield Finding("error", f"{key}.dataset_name", f"cannot be used: {error}")
    for name, section in _used(config).items():
        key = f"env.{name}"
        try:
            if name == "reward_functions":
                check_reward_section(section if isinstance(section, Mapping) else {})
                yield from _parts_of_gdpo(config, section)
            elif name not in ENV_REGISTRY or not environment_target(name).startswith("nemo_rl_cpp."):
                environment_class(name)
            elif (package := needed_package(name)) is not None:
                install = install_command(package)
                yield Finding("error", key, f"needs the package {package}, which is not installed: run `{install}`")
        except LoadingError as error:
            yield Finding("error", key, f"cannot be used: {error}")


def _parts_of_gdpo(config: WholeConfig, section: Mapping[str, object]) -> Iterator[Finding]:
    """The estimator gdpo takes each function's reward as a part, and its weight once."""
    estimator = getattr(getattr(config, "grpo", None), "adv_estimator", None)
    if estimator is None or estimator.name != "gdpo":
        return
    functions, key = section["functions"], "env.reward_functions"
    if isinstance(functions, str) or len(functions) < 2:
        needs = "names one function, but adv_estimator.name gdpo weighs the parts of a reward: name at least two, or take another estimator"
        yield Finding("error", f"{key}.functions", needs)
    elif not section.get("as_parts"):
        needs = "must be true with adv_estimator.name gdpo, whose parts are the functions' own rewards"
        yield Finding("error", f"{key}.as_parts", needs)
    elif section.get("weights") is not None and estimator.reward_weights is not None:
        needs = "and grpo.adv_estimator.reward_weights are the same thing: give one of them"
        yield Finding("error", f"{key}.weights", needs)


def _used(config: WholeConfig) -> dict[str, object]:
    """The entries of `env` that a data set of the run names."""
    default = getattr(getattr(config.data, "default", None), "env_name", None)
    names = [each.env_name or default for _, each in _datasets(config)]
    return {name: config.env[name] for name in dict.fromkeys(names) if name is not None and name in config.env}


def _datasets(config: WholeConfig) -> list[tuple[str, DatasetConfig]]:
    """(dotted key, section) of every data set."""
    if not isinstance(config, TrainMasterConfig):
        return [("data", config.data)]
    return [
        found for side in ("train", "validation") for found in datasets_of(getattr(config.data, side), f"data.{side}")
    ]
