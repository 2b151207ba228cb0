"""Import of the transformers library, which only `backend: hf` needs, and code for the differences between its
versions."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

INSTALL = "pip install 'nemo_rl_cpp[hf]'"
OLDEST = 5
"""The oldest supported major version of transformers: it is known to separate packed sequences."""


@lru_cache(maxsize=1)
def transformers() -> ModuleType:
    """Import and return transformers. If it is missing or too old, raise ValueError with the install command."""
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(f"backend hf: transformers is not installed: {INSTALL}")
    import transformers

    if int(transformers.__version__.partition(".")[0]) < OLDEST:
        raise ValueError(
            f"backend hf needs transformers {OLDEST} or newer, and {transformers.__version__} is installed: {INSTALL} --upgrade"
        )
    return transformers


@contextmanager
def quietly() -> Iterator[None]:
    """Silence transformers' progress bars and notices inside the context; this package prints what users need to
    know."""
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def accepts(module: nn.Module, *names: str) -> str | None:
    """Return the first of `names` that is a parameter of the module's forward method; None if none is."""
    known = inspect.signature(module.forward).parameters
    return next((name for name in names if name in known), None)
