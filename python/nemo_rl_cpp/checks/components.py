"""Checks of losses and advantage estimators of the user's: they are imported, and asked for what a run needs of them."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from nemo_rl_cpp.argument_checks import described, in_a_line
from nemo_rl_cpp.config.master import TrainMasterConfig, WholeConfig
from nemo_rl_cpp.dotted_names import LoadingError, import_object, is_dotted

from .finding import Finding


class Interface(NamedTuple):
    """What a run asks of a component.

    Attributes:
        what: how messages call it.
        base: the base class that they name.
        method: the method that is called; "__call__" where the object itself is.
        inputs: the keywords that it may take.
        sections: parameters of a constructor that get a section of the configuration, as NeMo RL's classes do.
    """

    what: str
    base: str
    method: str
    inputs: tuple[str, ...]
    sections: tuple[str, ...]


ESTIMATORS = {
    "grpo": Interface(
        "advantage estimator", "nemo_rl_cpp.AdvantageEstimator", "compute_advantage",
        ("rewards", "mask", "group_id", "prompt_ids", "valid_mask", "repeated_batch", "logprobs_policy", "logprobs_reference",
         "teacher_logprobs", "prev_logprobs"),
        ("estimator_config", "loss_config"),
    ),
    "ppo": Interface(
        "advantage estimator", "nemo_rl_cpp.AdvantageEstimator", "compute_advantage",
        ("rewards", "mask", "values", "prompt_ids", "logprobs", "reference_logprobs"),
        ("estimator_config", "loss_config"),
    ),
}  # fmt: skip
LOSS = Interface(
    "loss", "nemo_rl_cpp.LossFunction", "__call__",
    ("next_token_logprobs", "data", "global_valid_seqs", "global_valid_toks"),
    ("cfg", "loss_config"),
)  # fmt: skip


def check(config: WholeConfig) -> Iterator[Finding]:
    """Findings about `<algorithm>.adv_estimator.name` and `loss_fn.name` where they are dotted names."""
    if not isinstance(config, TrainMasterConfig):
        return
    estimator = config.loop.adv_estimator
    for key, section, interface in (
        (
            f"{config.algorithm}.adv_estimator.name",
            estimator,
            ESTIMATORS["ppo" if config.algorithm == "ppo" else "grpo"],
        ),
        ("loss_fn.name", config.loss_fn, LOSS),
    ):
        if is_dotted(section.name):
            try:
                check_component(import_object(section.name, interface.what), section.name, section.kwargs, interface)
            except LoadingError as error:
                yield Finding("error", key, f"cannot be used: {error}")


def check_component(found: object, name: str, kwargs: Mapping[str, object], interface: Interface) -> None:
    """LoadingError unless `found` is a class, an object or a function with this interface; `kwargs` are what it is made with."""
    what = f"{interface.what} {in_a_line(name)}"
    if inspect.isclass(found):
        _check_class(found, what, kwargs, interface)
    method = _method_of(found, interface)
    if method is None:
        raise LoadingError(
            f"{what} is {described(found)} without {interface.method}: derive its class from {interface.base}, or give a function of "
            f"({', '.join(interface.inputs[:3])}, ...)"
        )
    skipped = 1 if inspect.isclass(found) else 0  # self
    given = {} if inspect.isclass(found) else kwargs
    missing, odd = _needed(method, interface.inputs, given, skipped)
    if missing:
        raise LoadingError(
            f"{what}: {getattr(method, '__name__', interface.method)} asks for {' and '.join(missing)}, but it can be given {', '.join(interface.inputs)}"
        )
    if odd:
        raise LoadingError(f"{what} takes no {' and no '.join(odd)}, which kwargs has")


def _check_class(found: type, what: str, kwargs: Mapping[str, object], interface: Interface) -> None:
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise LoadingError(f"{what} lacks {' and '.join(missing)}, which {interface.base} asks for")
    if str(getattr(getattr(found, "input_type", None), "value", "logprob")) != "logprob":
        raise LoadingError(
            f"{what} has the input_type {found.input_type}, but logits are never formed here: take next_token_logprobs (LossInputType.LOGPROB)"
        )
    asked, odd = _needed(_constructor_of(found), interface.sections, kwargs, 1)
    if asked:
        raise LoadingError(
            f"{what}: its __init__ asks for {' and '.join(asked)}: put a value into kwargs, or give it a default"
        )
    if odd:
        raise LoadingError(f"{what}: its __init__ takes no {' and no '.join(odd)}, which kwargs has")


def _constructor_of(found: type) -> Callable[..., object]:
    """The `__init__` that somebody wrote; a Protocol's own takes anything, and object's nothing."""
    owners = (base for base in found.__mro__ if "__init__" in vars(base) and not getattr(base, "_is_protocol", False))
    owner = next((base for base in owners if getattr(vars(base)["__init__"], "__module__", "") != "typing"), object)
    return (lambda self: None) if owner is object else vars(owner)["__init__"]


def _method_of(found: object, interface: Interface) -> Callable[..., object] | None:
    """The function that a run calls, of a class unbound."""
    if interface.method == "__call__" or inspect.isroutine(found) or isinstance(found, functools.partial):
        if inspect.isclass(found):
            owner = next((base for base in found.__mro__ if "__call__" in vars(base)), None)
            return None if owner is None else vars(owner)["__call__"]
        return found if callable(found) else None
    method = getattr(found, interface.method, None)
    return method if callable(method) else None


def _needed(
    function: Callable[..., object], inputs: Iterable[str], kwargs: Mapping[str, object], skipped: int
) -> tuple[list[str], list[str]]:
    """(parameters without a default that neither `inputs` nor `kwargs` gives, names of `kwargs` that it does not take)."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[skipped:]
    except (TypeError, ValueError):
        return [], []
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    missing = [p.name for p in named if p.default is p.empty and p.name not in {*inputs, *kwargs}]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return missing, [] if takes_all else [name for name in kwargs if name not in {p.name for p in named}]


class Made(NamedTuple):
    """A component that is ready: the object (the function itself, where it is one), and the call of it that takes any of the
    interface's inputs."""

    component: Any
    call: Callable[..., Any]


def make_component(
    found: Any, kwargs: Mapping[str, object], interface: Interface, sections: Mapping[str, object]
) -> Made:
    """The component that passed `check_component`: a class is called with `kwargs`, and with the sections that it asks for."""
    if inspect.isclass(found):
        wanted = _taken(_constructor_of(found), sections)
        found = found(**wanted, **{key: value for key, value in kwargs.items() if key not in wanted})
        kwargs = {}
    method = _method_of(found, interface)
    assert method is not None
    fixed = dict(kwargs)
    return Made(found, lambda **inputs: method(**_taken(method, inputs), **fixed))


def _taken(function: Callable[..., object], inputs: Mapping[str, object]) -> dict[str, object]:
    """What of `inputs` a function takes."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return dict(inputs)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(inputs)
    names = {p.name for p in parameters}
    return {key: value for key, value in inputs.items() if key in names}
