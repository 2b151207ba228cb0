"""Turns further keywords of `train_grpo` and `train_ppo` into keys of the configuration; an unknown keyword is answered with the nearest one."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from nemo_rl_cpp.argument_checks import nearest
from nemo_rl_cpp.config.base import Section
from nemo_rl_cpp.config.loop import GRPOConfig, PPOConfig
from nemo_rl_cpp.config.master import GRPOMasterConfig, PPOMasterConfig

SECTIONS: dict[str, type[Section]] = {"grpo": GRPOConfig, "ppo": PPOConfig}
MODELS: dict[str, type[Section]] = {"grpo": GRPOMasterConfig, "ppo": PPOMasterConfig}


@dataclass(frozen=True)
class Function:
    """A function whose keywords are looked at: its name, its own arguments, and the algorithm ("grpo" or "ppo") of its run."""

    name: str
    arguments: Collection[str]
    algorithm: str


def dotted_keys(overrides: Mapping[str, object], function: Function) -> dict[str, tuple[str, object]]:
    """key of the configuration -> (keyword, value). ValueError of one line that names every unknown keyword and what was meant."""
    found: dict[str, tuple[str, object]] = {}
    unknown: list[str] = []
    for name, value in overrides.items():
        try:
            found[dotted_key(name, function)] = (name, value)
        except ValueError as error:
            unknown.append(str(error))
    if unknown:
        raise ValueError("; ".join(unknown))
    return found


def dotted_key(name: str, function: Function) -> str:
    """`section__key` as `section.key`, a key of the algorithm's section as `grpo.key`. ValueError for another name, with what
    was meant."""
    if "." in name:
        raise ValueError(_of_dots(name, function))
    if "__" in name:
        return name.replace("__", ".")
    section = SECTIONS[function.algorithm]
    keys = {*section.model_fields, *(spelling for spelling, _ in section.aliases() if "." not in spelling)}
    if name in keys:
        return f"{function.algorithm}.{name}"
    other = next((other for other in SECTIONS if name in SECTIONS[other].model_fields and name not in keys), None)
    if other is not None:
        raise ValueError(f"{name} is unknown to {function.name}; it is a key of train_{other}")
    if near := nearest(name, function.arguments, 0.7) or nearest(name, [*function.arguments, *keys], 0.6):
        raise ValueError(f"{name} is unknown; did you mean {near}?")
    raise ValueError(
        f"{name} is unknown; {function.name} takes {', '.join(function.arguments)}, keys of the section {function.algorithm}, and keys of "
        "others as section__key (docs/coming-from-trl.md and docs/coming-from-verl.md have the names of TRL and verl)"
    )


def _of_dots(name: str, function: Function) -> str:
    """What to say of a name with dots: how a key of ours is written, or what keywords are."""
    if name in MODELS[function.algorithm].known_keys():
        first, _, rest = name.partition(".")
        keyword = rest if first == function.algorithm and "." not in rest else name.replace(".", "__")
        return f"{name} is unknown as a keyword; write {keyword}"
    return (
        f"{name} is unknown; keywords are arguments of {function.name}, or section__key for a key of the configuration"
    )
