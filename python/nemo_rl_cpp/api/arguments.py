"""Converts arguments of `train_grpo`, `train_ppo` and `evaluate` to configuration keys, components and environments."""

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_rl_cpp.algorithms.custom_components import OwnEstimator, component_name, own_loss
from nemo_rl_cpp.argument_checks import in_a_line, names_of, nearest
from nemo_rl_cpp.config.base import Section
from nemo_rl_cpp.config.loop import GRPOConfig, PPOConfig
from nemo_rl_cpp.config.master import TrainMasterConfig
from nemo_rl_cpp.dotted_names import PythonObjectRef
from nemo_rl_cpp.environments.reward_environment import RewardFunctionEnvironment

_SECTIONS: dict[str, type[Section]] = {"grpo": GRPOConfig, "ppo": PPOConfig}
Keys = dict[str, tuple[str, object]]
"""Configuration key -> (argument, value)."""


# ---- further keywords


def dotted_keys(overrides: Mapping[str, object], algorithm: str, arguments: Collection[str]) -> Keys:
    """Return the dotted configuration keys for keyword arguments of `train_<algorithm>`. A keyword has the form
    `section__key`, or is a key of the algorithm's section.

    Raise a one-line ValueError that lists every unknown keyword, with the most similar argument or key."""
    section = _SECTIONS[algorithm]
    keys = {*section.model_fields, *(spelling for spelling, _ in section.aliases() if "." not in spelling)}
    found, unknown = {}, []
    for name, value in overrides.items():
        if "__" in name:
            found[name.replace("__", ".")] = (name, value)
        elif name in keys:
            found[f"{algorithm}.{name}"] = (name, value)
        else:
            unknown.append(f"{name} is unknown; {_hint(name, algorithm, arguments, keys)}")
    if unknown:
        raise ValueError("; ".join(unknown))
    return found


def _hint(name: str, algorithm: str, arguments: Collection[str], keys: Collection[str]) -> str:
    other = next((other for other in _SECTIONS if name in _SECTIONS[other].model_fields), None)
    if other is not None:
        return f"it is a key of train_{other}"
    if "." in name:
        return f"a key of the configuration is written {name.replace('.', '__')}"
    if near := nearest(name, arguments, 0.7) or nearest(name, [*arguments, *keys], 0.6):
        return f"did you mean {near}?"
    return (
        f"train_{algorithm} takes {', '.join(arguments)}, keys of the section {algorithm}, and keys of others as section__key "
        "(docs/coming-from-trl.md and docs/coming-from-verl.md have the names of TRL and verl)"
    )


# ---- components and adapters


@dataclass(frozen=True)
class Given:
    """The argument `loss_fn` or `adv_estimator`, converted: the configuration keys that it sets, and the user's
    component, if any."""

    what: str
    keys: Keys = field(default_factory=dict)
    component: object = None

    def check(self, config: TrainMasterConfig) -> None:
        """Raise ValueError, before a model is loaded, if the component cannot be used."""
        if self.component is None:
            return
        if self.what == "loss_fn":
            own_loss(self.component, config.loss_fn)
        else:
            OwnEstimator(self.component, config.algorithm, config.loop.adv_estimator, config.loss_fn)


def component_keys(given: object, what: str, algorithm: str) -> Given:
    """Convert the argument `what` (`loss_fn` or `adv_estimator`) to configuration keys or a component."""
    section = "loss_fn" if what == "loss_fn" else f"{algorithm}.adv_estimator"
    if given is None:
        return Given(what)
    if isinstance(given, str):
        given = {"name": given}
    if isinstance(given, Mapping):
        return Given(what, {f"{section}.{key}": (what, value) for key, value in given.items()})
    if not callable(given) and not hasattr(given, "compute_advantage"):
        raise ValueError(
            f"{what} is {in_a_line(given)}: give a function, an object or a class of yours, its dotted name, or a mapping of "
            f"keys of {section}"
        )
    return Given(what, {f"{section}.name": (what, PythonObjectRef(component_name(given), given))}, given)


def lora_keys(given: object, algorithm: str) -> Keys:
    """Return the configuration keys under `lora_cfg` that the argument `lora` sets, for the policy and the critic."""
    if given is None or given is False:
        return {}
    if isinstance(given, int):
        given = {} if given is True else {"dim": given}
    if not isinstance(given, Mapping):
        raise ValueError(
            f"lora is {in_a_line(given)}: give True, a rank such as 16, or a mapping of keys of policy.dtensor_cfg.lora_cfg such as "
            "{'dim': 16, 'alpha': 32}"
        )
    keys = {"enabled": True, **given}
    if "target_modules" in keys or "exclude_modules" in keys:
        keys = {"match_all_linear": False, **keys}
    models = ("policy", "value") if algorithm == "ppo" else ("policy",)
    return {f"{model}.dtensor_cfg.lora_cfg.{key}": ("lora", value) for model in models for key, value in keys.items()}


# ---- rewards


def reward_environment(functions: Any, weights: object, as_parts: bool) -> RewardFunctionEnvironment:
    """Return an environment that computes reward functions. `as_parts` keeps their rewards separate for the estimator
    gdpo, which weights the rewards itself and needs at least two."""
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
    names: list[str] | None = None
    if isinstance(functions, Mapping):
        names, functions = list(functions), list(functions.values())
    if isinstance(weights, Mapping):
        if names is None or set(weights) != set(names):
            there = names_of(names) if names is not None else "no names"
            raise ValueError(
                f"reward_weights has {names_of(weights)}, but reward_funcs has {there}: give both as mappings with the same names"
            )
        weights = [weights[name] for name in names]
    environment = RewardFunctionEnvironment(functions, weights, as_parts, names)
    if as_parts and len(environment.described) < 2:
        raise ValueError(
            "adv_estimator is gdpo, which weighs the parts of a reward, but reward_funcs is one function: give at least two, or leave "
            "adv_estimator out"
        )
    return environment


def rewards_of_call(functions: Any, weights: object, keys: Keys) -> tuple[RewardFunctionEnvironment, Keys]:
    """Return (environment of the reward functions, configuration keys set by their weights). The keys are empty unless
    the estimator is gdpo, which weights the rewards itself. `keys` are the configuration keys that the other arguments
    set. Raise ValueError if weights are given twice."""
    is_gdpo = keys.get("grpo.adv_estimator.name", ("", None))[1] == "gdpo"
    environment = reward_environment(functions, weights, is_gdpo)
    if not is_gdpo or weights is None:
        return environment, {}
    key = "grpo.adv_estimator.reward_weights"
    if keys.get(key, ("", None))[1] is not None:
        raise ValueError(f"reward_weights and {keys[key][0]} are the same thing: give one of them")
    weights_by_name = [weight for _, weight in sorted(environment.weight_of_name.items())]
    return environment, {key: ("reward_weights", weights_by_name)}
