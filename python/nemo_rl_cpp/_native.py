"""Loads the native core once, after checking that it meets the torch it was built for."""

import importlib
import importlib.util
from types import ModuleType


def _load() -> ModuleType:
    import torch

    if importlib.util.find_spec("nemo_rl_cpp._C") is None:
        raise ImportError("nemo_rl_cpp's native core is missing: install the package with `pip install .` or `uv sync`")
    built_for = _built_for_torch()
    if built_for is not None and built_for.split("+")[0] != torch.__version__.split("+")[0]:
        raise ImportError(
            f"nemo_rl_cpp was built for torch {built_for}, but torch {torch.__version__} is installed: "
            f"install torch=={built_for.split('+')[0]} or build nemo_rl_cpp again in this environment"
        )
    core = importlib.import_module("nemo_rl_cpp._C")
    if core.cuda_compiled and torch.version.cuda is not None and importlib.util.find_spec("nemo_rl_cpp._cuda") is not None:
        importlib.import_module("nemo_rl_cpp._cuda")  # registers the CUDA kernels; needs no driver
    return core


def _built_for_torch() -> str | None:
    """The torch version written beside the extension when it was built (readable without loading it)."""
    from importlib import resources

    stamp = resources.files("nemo_rl_cpp").joinpath("_torch_version.txt")
    try:
        return stamp.read_text().strip()
    except FileNotFoundError:
        spec = importlib.util.find_spec("nemo_rl_cpp._C")
        from pathlib import Path

        beside = Path(spec.origin).with_name("_torch_version.txt") if spec and spec.origin else None
        return beside.read_text().strip() if beside is not None and beside.exists() else None


C = _load()
