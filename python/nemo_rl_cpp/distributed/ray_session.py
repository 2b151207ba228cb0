"""Ray itself: imported only where it is asked for, started where none runs, ended by the last who holds it."""

import os
import sys
import threading
from collections.abc import Mapping
from types import ModuleType

# Variables that actors do not take over from the run. The others are arguments of an actor, not of its `runtime_env`, which Ray writes
# into its logs and onto command lines: keys of services are among them.
_OF_A_MACHINE = {
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "SHLVL", "HOSTNAME", "PWD", "OLDPWD", "_", "TMPDIR", "VIRTUAL_ENV",
    "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES",
}  # fmt: skip
_OF_A_PROCESS = ("RAY_", "SLURM_", "LD_")

_lock = threading.Lock()
_held = {"holders": 0, "ours": False}


def ray_module() -> ModuleType:
    """Ray. Under `uv run` it would start workers by `uv run` too, in copies of the project; here they share this environment.

    Raises ImportError, which says what to install.
    """
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # read when ray is imported
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            "ray is not installed: run `pip install 'nemo_rl_cpp[ray]'`, or set cluster.executor to processes or auto"
        ) from error
    return ray


def ray_in_use() -> ModuleType | None:
    """Ray where this program has started or joined one; None else. It is never imported here."""
    ray = sys.modules.get("ray")
    return ray if ray is not None and hasattr(ray, "is_initialized") and ray.is_initialized() else None


def start_ray(cpus: int) -> bool:
    """Joins or starts a Ray cluster; whether one was started, for at least so many CPUs. One that runs already is used."""
    ray = ray_module()
    if ray.is_initialized():
        return False
    if os.environ.get("RAY_ADDRESS"):
        ray.init(address="auto", logging_level="warning")
        return False
    # "local": not one that somebody else has started on this machine, which Ray would join
    cpus = max(cpus, os.cpu_count() or 1)
    ray.init(address="local", num_cpus=cpus, include_dashboard=False, logging_level="warning")
    return True


def hold_ray(cpus: int) -> ModuleType:
    """Ray, joined or started. It stays until `let_ray_go` has been called as often as this."""
    with _lock:
        started = start_ray(cpus)
        _held["ours"] = started or (_held["ours"] and _held["holders"] > 0)
        _held["holders"] += 1
    return ray_module()


def let_ray_go() -> None:
    """Ends Ray where nobody holds it any more and `hold_ray` has started it."""
    with _lock:
        _held["holders"] -= 1
        if _held["holders"] == 0 and _held["ours"]:
            _held["ours"] = False
            ray_module().shutdown()


def surroundings() -> tuple[str, dict[str, str]]:
    """Returns the working folder of this process, and its environment variables without those of its machine or process."""
    return os.getcwd(), {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_A_MACHINE and not name.startswith(_OF_A_PROCESS)
    }


def enter(folder: str, variables: Mapping[str, str]) -> None:
    """Gives an actor the `surroundings` of the run. What a `runtime_env` of Ray sets keeps its value.

    A node without the folder prints a warning and keeps its own, in which relative paths lead elsewhere.
    """
    import ray

    given = ray.get_runtime_context().runtime_env.get("env_vars", {})
    os.environ.update({name: value for name, value in variables.items() if name not in given})
    try:
        os.chdir(folder)
    except OSError as error:
        print(
            f"warning: this node has no working folder {folder} ({error.strerror}): relative paths lead elsewhere here",
            file=sys.stderr,
            flush=True,
        )
