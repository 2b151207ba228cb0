"""Tokenizer, data sets, processors and the loader that feeds prompts to the training loop.

The names below load with the first use: a tokenizer alone needs no configuration schema.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_rl_cpp.config.data import DataConfig, EvalDataConfig
    from nemo_rl_cpp.config.data import DatasetConfig as ResponseDatasetConfig
    from nemo_rl_cpp.config.data import EvalDataConfig as EvalDataConfigType

__all__ = ["DataConfig", "EvalDataConfig", "EvalDataConfigType", "ResponseDatasetConfig"]

_NAMES_IN_CONFIG = {"EvalDataConfigType": "EvalDataConfig", "ResponseDatasetConfig": "DatasetConfig"}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nemo_rl_cpp.config import data

    return getattr(data, _NAMES_IN_CONFIG.get(name, name))
