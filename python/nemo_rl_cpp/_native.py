"""Load the native core once, after checking that the installed torch has the version for which it was built."""

import importlib
import importlib.util
import os
from types import ModuleType

import torch

from nemo_rl_cpp._torch_version import check_torch_version

CPU_CAPABILITIES = ("base", "avx2", "avx512", "avx512_bf16", "amx", "software_tiles")


def _load() -> ModuleType:
    asked = os.environ.get("NEMO_RL_CPU_CAPABILITY")  # checked here, because the core would ignore an unknown value
    if asked and asked not in CPU_CAPABILITIES:
        raise ValueError(f"NEMO_RL_CPU_CAPABILITY is {asked!r}, but must be one of {', '.join(CPU_CAPABILITIES)}")
    if importlib.util.find_spec("nemo_rl_cpp._C") is None:
        raise ImportError("nemo_rl_cpp's native core is missing: install the package with `pip install .` or `uv sync`")
    check_torch_version(torch.__version__)
    core = importlib.import_module("nemo_rl_cpp._C")
    is_built = core.cuda_compiled and importlib.util.find_spec("nemo_rl_cpp._cuda") is not None
    if is_built and torch.version.cuda is not None:
        importlib.import_module("nemo_rl_cpp._cuda")  # registers the CUDA kernels; needs no driver
    return core


C = _load()
