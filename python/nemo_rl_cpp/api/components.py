"""Reward functions, a loss and an advantage estimator as arguments of a call."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_rl_cpp.algorithms.custom_components import OwnEstimator, component_name, own_loss
from nemo_rl_cpp.argument_checks import in_a_line, names_of
from nemo_rl_cpp.config.master import TrainMasterConfig
from nemo_rl_cpp.dotted_names import PythonObjectRef
from nemo_rl_cpp.environments.reward_environment import RewardFunctionEnvironment


@dataclass(frozen=True)
class Given:
    """An argument `loss_fn` or `adv_estimator`: keys of the configuration, or a component as it is.

    Attributes:
        what: the argument.
        keys: key -> (argument, value).
        component: a function, an object or a class of the user's, which `keys` has as the name; None: there is none.
    """

    what: str
    keys: dict[str, tuple[str, object]] = field(default_factory=dict)
    component: object = None

    def made(self, config: TrainMasterConfig) -> Any:
        """The component as a run takes it; ValueError for what is none."""
        if self.what == "loss_fn":
            return own_loss(self.component, config.loss_fn)
        return OwnEstimator(self.component, config.algorithm, config.loop.adv_estimator, config.loss_fn)

    def check(self, config: TrainMasterConfig) -> None:
        """ValueError for a component that is none, before a model is loaded."""
        if self.component is not None:
            self.made(config)


def component_keys(given: object, what: str, algorithm: str) -> Given:
    """What an argument `loss_fn` or `adv_estimator` means."""
    section = "loss_fn" if what == "loss_fn" else f"{algorithm}.adv_estimator"
    if given is None:
        return Given(what)
    if isinstance(given, str):
        return Given(what, {f"{section}.name": (what, given)})
    if isinstance(given, Mapping):
        return Given(what, {f"{section}.{key}": (what, value) for key, value in given.items()})
    if not callable(given) and not hasattr(given, "compute_advantage"):
        raise ValueError(
            f"{what} is {in_a_line(given)}: give a function, an object or a class of yours, its dotted name, or a mapping of keys of {section}"
        )
    return Given(what, {f"{section}.name": (what, PythonObjectRef(component_name(given), given))}, given)


def lora_keys(given: object, models: Sequence[str]) -> dict[str, tuple[str, object]]:
    """The keys of `lora_cfg` of these models, each with its argument and value, that an argument `lora` means."""
    if given is None or given is False:
        return {}
    if given is True:
        keys: Mapping[str, object] = {}
    elif isinstance(given, int):
        keys = {"dim": given}
    elif isinstance(given, Mapping):
        keys = given
    else:
        raise ValueError(
            f"lora is {in_a_line(given)}: give True, a rank such as 16, or a mapping of keys of policy.dtensor_cfg.lora_cfg such as "
            "{'dim': 16, 'alpha': 32}"
        )
    if "target_modules" in keys or "exclude_modules" in keys:
        keys = {"match_all_linear": False, **keys}
    keys = {"enabled": True, **keys}
    return {f"{model}.dtensor_cfg.lora_cfg.{key}": ("lora", value) for model in models for key, value in keys.items()}


def reward_environment(functions: Any, weights: object, as_parts: bool) -> RewardFunctionEnvironment:
    """Reward functions as an environment; `as_parts` for gdpo, whose estimator weighs them. ValueError where gdpo would have less
    than two parts."""
    if functions is None:
        raise ValueError(
            "reward_funcs is missing: give a function of (completions, **columns) that returns one number each"
        )
    if inspect.isclass(functions):
        raise ValueError(f"reward_funcs is the class {functions.__name__}: give a function, or an object of it")
    if hasattr(functions, "parameters") and hasattr(functions, "forward"):
        raise ValueError(
            f"reward_funcs is a {type(functions).__name__}, a model: give a function of (prompts, completions, **columns) that asks it"
        )
    names = None
    if isinstance(functions, Mapping):
        names, functions = list(functions), list(functions.values())
    if isinstance(weights, Mapping):
        weights = _weights_by_name(weights, names)
    environment = RewardFunctionEnvironment(functions, weights, as_parts, names)
    if as_parts and len(environment.described) < 2:
        raise ValueError(
            "adv_estimator is gdpo, which weighs the parts of a reward, but reward_funcs is one function: give at least two, or leave "
            "adv_estimator out"
        )
    return environment


def _weights_by_name(weights: Mapping[str, float], names: Sequence[str] | None) -> list[float]:
    if names is None or set(weights) != set(names):
        there = names_of(names) if names is not None else "no names"
        raise ValueError(
            f"reward_weights has {names_of(weights)}, but reward_funcs has {there}: give both as mappings with the same names"
        )
    return [weights[name] for name in names]


__all__ = ["Given", "component_keys", "lora_keys", "reward_environment"]
