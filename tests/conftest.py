"""Which tests a run takes: those marked `gpu` where there is a CUDA device, those marked `long` by `-m long` alone, those of slow
folders but in the fast tier. With `-n`, which tests stay in one process: those of a file, and all that compile the CUDA kernels
for the CPU."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import forked_workers as forking
import nemo_rl_cpp  # noqa: F401 - before a test imports torch: it bounds how long waiting threads spin
import pytest
from tiers import SLOW_FIXTURES, is_in_a_slow_folder, scheduler, seconds_of, unit_of


def pytest_configure(config: pytest.Config) -> None:
    """Where PYTHONDONTWRITEBYTECODE is set, torch's 1,500 files would be compiled anew by every process that a test starts, which takes
    seconds: compiled files go into pytest's cache instead. A shell's background job ignores Ctrl-C, and so would all that it starts: the
    tests of Ctrl-C hear it there, too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "PYTHONDONTWRITEBYTECODE" in os.environ and hasattr(config, "cache"):
        del os.environ["PYTHONDONTWRITEBYTECODE"]
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(config.cache.mkdir("bytecode"))
        sys.dont_write_bytecode = False


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The fast tier imports no file whose tests it leaves out."""
    return True if config.option.markexpr == "not slow" and is_in_a_slow_folder(collection_path) else None


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if is_in_a_slow_folder(item.path) or SLOW_FIXTURES.keys() & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)
    if hasattr(
        config, "workerinput"
    ):  # one of several processes: what takes long comes first, so that none ends long after the others
        items.sort(key=lambda item: -seconds_of(unit_of(item.nodeid)))
    if "long" not in config.option.markexpr:
        _deselect(config, items, "long")
    if any(item.get_closest_marker("gpu") for item in items):
        _deselect_without_a_gpu(config, items)


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return scheduler(config, log) if config.getvalue("dist") == "loadfile" else None  # another one was asked for


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes of runs start in a moment: where their start is not what is tested."""
    forking.in_place(monkeypatch)


def _deselect_without_a_gpu(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        _deselect(config, items, "gpu")


def _deselect(config: pytest.Config, items: list[pytest.Item], mark: str) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker(mark)])
    items[:] = [item for item in items if not item.get_closest_marker(mark)]
