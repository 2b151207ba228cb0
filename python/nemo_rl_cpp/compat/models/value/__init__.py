"""The value model of PPO. `Value` and its interface load torch, so they are imported when they are asked for."""

from importlib import import_module
from typing import Any

from nemo_rl_cpp.config.value import ValueConfig

_EXPORTS = {"Value": "value.lm_value", "ValueInterface": "interfaces", "ValueOutputSpec": "interfaces"}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"nemo_rl_cpp.models.{_EXPORTS[name]}"), name)
