"""Check torch's version, without importing torch. The native core crashes with any but the one it was built for."""

import importlib.util
from importlib import resources
from pathlib import Path


def check_torch_version(installed: str) -> None:
    """Raise ImportError unless `installed`, without suffixes such as +cpu, is the torch version built for."""
    built_for = _built_for_torch()
    if built_for is not None and built_for.split("+")[0] != installed.split("+")[0]:
        what_to_do = f"install torch=={built_for.split('+')[0]} or build nemo_rl_cpp again"
        raise ImportError(f"nemo_rl_cpp was built for torch {built_for}, not the installed {installed}: {what_to_do}")


def _built_for_torch() -> str | None:
    """Return the torch version for which this package was built, without loading the C++ extension; None: unknown."""
    stamp = resources.files("nemo_rl_cpp").joinpath("_torch_version.txt")
    try:
        return stamp.read_text().strip()
    except FileNotFoundError:
        spec = importlib.util.find_spec("nemo_rl_cpp._C")
        beside = Path(spec.origin).with_name("_torch_version.txt") if spec and spec.origin else None
        return beside.read_text().strip() if beside is not None and beside.exists() else None
