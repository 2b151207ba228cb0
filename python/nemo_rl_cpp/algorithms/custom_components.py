"""Custom losses and advantage estimators, given by dotted name in a configuration or as objects from Python.

A wrapper passes to each component the inputs that it has parameters for, reports a wrong return value in one sentence,
and distinguishes exceptions of user code from those of this package."""

from __future__ import annotations

import functools
import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nemo_rl_cpp import dotted_names
from nemo_rl_cpp.algorithms.loss import ClippedPGLossFn, LossFunction, LossInputType, LossType, TopKDistillationLossFn
from nemo_rl_cpp.argument_checks import described
from nemo_rl_cpp.config.loop import AdvEstimatorConfig, GAEConfig
from nemo_rl_cpp.config.loss import ClippedPGLossConfig
from nemo_rl_cpp.dotted_names import LoadingError, PythonObjectRef, import_object, is_dotted, search_for_modules
from nemo_rl_cpp.errors import user_code
from nemo_rl_cpp.user_code import call_user


class AdvantageEstimator(Protocol):
    """The base class of advantage estimators, which turn the rewards of a batch into advantages of its tokens. Derive
    custom estimators from it.

    class Best(nemo_rl_cpp.AdvantageEstimator):
        def compute_advantage(self, rewards, group_id, **batch):
            return rewards - rewards.mean()

    `last_metrics` holds metrics of the last call, which are logged with the step."""

    last_metrics: Mapping[str, float] = MappingProxyType({})

    @abstractmethod
    def compute_advantage(
        self, prompt_ids: Tensor, rewards: Tensor, mask: Tensor, **batch: object
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Return advantages float32 [B, S] of B samples, padded to S tokens, from `rewards` [B]. `mask` [B, S] is 1 on
        the trained tokens.

        `batch` has the algorithm's other inputs. GRPO passes `group_id` [B], `valid_mask` [B] or None,
        `repeated_batch`, `logprobs_policy` [B, S], and `logprobs_reference` [B, S] or None. PPO passes `values`,
        `logprobs` and `reference_logprobs`, each [B, S] or None. With a teacher both also pass `teacher_logprobs` and
        `prev_logprobs`. PPO's estimators return (advantages, returns); without a critic, returns are None. If the
        method has a parameter `offsets`, int64 [B + 1], every input of shape [B, S] is passed as [T], the T tokens of
        all samples without padding."""


Estimator = AdvantageEstimator | Callable[..., Tensor] | Mapping[str, object] | str | None
"""The types that Python callers may pass as an advantage estimator."""
Loss = LossFunction | Callable[..., object] | Mapping[str, object] | str | None
"""The types that Python callers may pass as a loss."""


def component_name(found: object) -> str:
    """Return a component's name for messages: its qualified name, or without one that of its class."""
    return str(getattr(found, "__qualname__", None) or type(found).__qualname__)


class Made(NamedTuple):
    """A custom component, such as a loss, and the function `call`, which accepts any keyword arguments and passes on to
    the component those that it accepts."""

    component: Any
    call: Callable[..., Any]


def make_component(
    found: Any, what: str, base: str, method: str, kwargs: Mapping[str, object], sections: Mapping[str, object]
) -> Made:
    """Make a component from `found`: a class, a function, or an object with the method `method`. A class is constructed
    with the user's arguments `kwargs` and those of `sections` that its __init__ takes; a function or an object gets
    `kwargs` in each call. Every call gets those of `sections` for which the function has a parameter. Raise
    LoadingError if the method is missing; the message names the component (`what`) and the base class to derive it from
    (`base`)."""
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise LoadingError(f"{what} lacks {' and '.join(missing)}, which {base} asks for")
    with user_code(what):
        if inspect.isclass(found):
            # without its own __init__ a class has that of object or of Protocol, which takes no sections
            written = getattr(found.__init__, "__module__", None) not in (None, "typing")
            given = _taken(found.__init__, sections) if written else {}
            found = call_user(found, **{**kwargs, **given})
            kwargs = {}
    is_function = inspect.isroutine(found) or isinstance(found, functools.partial)
    function = found if is_function or method == "__call__" else getattr(found, method, None)
    if not callable(function):
        raise LoadingError(f"{what} is {described(found)} without {method}: derive it from {base}, or give a function")

    named = {p.name: sections[p.name] for p in _parameters(function) or () if p.name in sections}
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

    def call(**inputs: object) -> Any:
        taken = _taken(function, inputs) | named
        required = {p.name for p in _parameters(function) or () if p.default is p.empty and p.kind not in optional}
        if missing := sorted(required.difference(taken, kwargs)):
            raise ValueError(f"{what} asks for {', '.join(missing)}, but its inputs are {', '.join(inputs)}")
        return function(**taken, **kwargs)

    return Made(found, call)


def _parameters(function: Callable[..., object]) -> list[inspect.Parameter] | None:
    """Return the parameters of `function`, or None for a built-in function without a signature."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def _taken(function: Callable[..., object], inputs: Mapping[str, object]) -> dict[str, object]:
    parameters = _parameters(function)
    if parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(inputs)
    names = {p.name for p in parameters}
    return {key: value for key, value in inputs.items() if key in names}


class OwnEstimator(AdvantageEstimator):
    """A custom advantage estimator: an object with `compute_advantage`, or a function with the same inputs. Advantages
    of shape [B] apply to all tokens of each sample. A call raises ValueError if the result is no tensor, has another
    shape, or is not finite."""

    def __init__(
        self, found: object, algorithm: str, settings: AdvEstimatorConfig | GAEConfig, loss: ClippedPGLossConfig, name: str | None = None
    ) -> None:  # fmt: skip
        self.name = name or component_name(found)
        self._made = make_component(
            found, f"advantage estimator {self.name}", "nemo_rl_cpp.AdvantageEstimator", "compute_advantage", settings.kwargs,
            {"estimator_config": settings, "loss_config": loss},
        )  # fmt: skip
        self._gives_returns = algorithm == "ppo"
        self._needs_returns = algorithm == "ppo" and getattr(settings, "uses_critic", False)

    @property
    def last_metrics(self) -> Mapping[str, float]:  # type: ignore[override]
        return getattr(self._made.component, "last_metrics", {})

    def compute_advantage(
        self, prompt_ids: Tensor, rewards: Tensor, mask: Tensor, **batch: object
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        with user_code(f"advantage estimator {self.name}"):
            given = call_user(self._made.call, prompt_ids=prompt_ids, rewards=rewards, mask=mask, **batch)
        if not self._gives_returns:
            return self._checked(given, "advantages", mask)
        advantages, returns = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
        if returns is None and self._needs_returns:
            raise ValueError(
                f"advantage estimator {self.name} returned no returns, which the critic learns from: return (advantages, returns), or set "
                "ppo.adv_estimator.uses_critic to false"
            )
        checked = None if returns is None else self._checked(returns, "returns", mask)
        return self._checked(advantages, "advantages", mask), checked

    def _checked(self, given: object, what: str, mask: Tensor) -> Tensor:
        said = f"advantage estimator {self.name} must return {what} as a tensor of shape [{mask.shape[0]}] or {list(mask.shape)}"
        if not isinstance(given, Tensor):
            raise ValueError(f"{said}, but returned {described(given)}")
        if given.shape not in (mask.shape, mask.shape[:1]):
            raise ValueError(f"{said}, but returned one of {list(given.shape)}")
        values = given.detach().float()
        values = values[:, None].expand(mask.shape) if values.dim() == 1 else values
        wrong = ~torch.isfinite(values) & (mask != 0)
        if wrong.any():
            row, column = (int(i) for i in wrong.nonzero()[0])
            raise ValueError(
                f"advantage estimator {self.name} returned {float(values[row, column])} as {what} of sample {row}, token {column}"
            )
        return values


class OwnLoss(LossFunction):
    """A custom loss with the interface that the trainer expects. Other processes create it from its dotted name. A call
    raises ValueError for a result that is neither a scalar tensor nor (scalar tensor, metrics)."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB

    def __init__(self, found: object, section: ClippedPGLossConfig, name: str | None = None) -> None:
        self.name = name or component_name(found)
        self._section, self._by_name = section, name is not None
        sections = {"cfg": section, "loss_config": section}
        self._made = make_component(
            found, f"loss {self.name}", "nemo_rl_cpp.LossFunction", "__call__", section.kwargs, sections
        )
        self.loss_type = getattr(self._made.component, "loss_type", LossType.TOKEN_LEVEL)
        self.reference_policy_kl_penalty = 0 if section.use_kl_in_reward else section.reference_policy_kl_penalty

    def __call__(self, **inputs: Tensor | Mapping[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        with user_code(f"loss {self.name}"):
            given = call_user(self._made.call, **inputs)
        loss, metrics = given if isinstance(given, tuple) and len(given) == 2 else (given, {})
        if not isinstance(loss, Tensor) or loss.dim() != 0 or not isinstance(metrics, Mapping):
            shape = f" of shape {list(loss.shape)}" if isinstance(loss, Tensor) else ""
            raise ValueError(
                f"loss {self.name} must return a scalar tensor, or (scalar tensor, metrics), but returned {described(loss)}{shape}"
            )
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise ValueError(f"loss {self.name} does not depend on next_token_logprobs: its gradient would be zero")
        return loss, dict(metrics)

    def __reduce__(self) -> tuple[Callable[..., OwnLoss], tuple[ClippedPGLossConfig, list[str]]]:
        if not self._by_name:
            raise ValueError(
                f"loss {self.name} was given as an object, which other processes do not have: set loss_fn.name to its dotted name"
            )
        return _own_loss, (self._section, list(dotted_names.searched))


def _own_loss(section: ClippedPGLossConfig, folders: list[str]) -> OwnLoss:
    search_for_modules(*folders)
    return OwnLoss(import_object(section.name, "loss"), section, section.name)


def make_loss(section: ClippedPGLossConfig, candidates: int | None = None) -> LossFunction:
    """Return the loss of `section`, the section `loss_fn`: the custom loss that its name refers to, otherwise the
    clipped policy-gradient loss, or the distillation loss if `candidates`, the number of tokens that it compares at
    each position, is not None. Raise LoadingError (a ValueError) if a custom loss cannot be imported."""
    if isinstance(section.name, PythonObjectRef):
        return own_loss(section.name.component, section)
    if not is_dotted(section.name):
        return ClippedPGLossFn(section) if candidates is None else TopKDistillationLossFn(section)
    return OwnLoss(import_object(section.name, "loss"), section, section.name)


def own_loss(given: object, section: ClippedPGLossConfig) -> LossFunction:
    """Return a loss passed from Python as a `LossFunction`. Raise LoadingError (a ValueError) if it is unsuitable."""
    return given if type(given) is ClippedPGLossFn else OwnLoss(given, section)
