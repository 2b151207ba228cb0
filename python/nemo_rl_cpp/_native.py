"""Loads the native core once, after checking that it meets the torch it was built for."""

import importlib
import importlib.util
from types import ModuleType

from nemo_rl_cpp._torch_version import check_torch_version


def _load() -> ModuleType:
    import torch

    if importlib.util.find_spec("nemo_rl_cpp._C") is None:
        raise ImportError("nemo_rl_cpp's native core is missing: install the package with `pip install .` or `uv sync`")
    check_torch_version(torch.__version__)
    core = importlib.import_module("nemo_rl_cpp._C")
    if (
        core.cuda_compiled
        and torch.version.cuda is not None
        and importlib.util.find_spec("nemo_rl_cpp._cuda") is not None
    ):
        importlib.import_module("nemo_rl_cpp._cuda")  # registers the CUDA kernels; needs no driver
    return core


C = _load()
