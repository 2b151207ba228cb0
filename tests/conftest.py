"""Selection and distribution of the tests.

Tests marked `gpu` run only if there is a CUDA device, and tests marked `long` only with `-m long`. The fast tier
excludes slow folders. With `-n`, the tests of a file stay in one process, and so do all tests that compile the CUDA
kernels for the CPU."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import forked_workers as forking
import nemo_rl_cpp  # noqa: F401 - imported before torch, to limit how long waiting threads spin
import pytest
from tiers import SLOW_FIXTURES, is_in_a_slow_folder, scheduler, seconds_of, unit_of


def pytest_configure(config: pytest.Config) -> None:
    """Make the bytecode cache and Ctrl-C work in the processes that tests start.

    If PYTHONDONTWRITEBYTECODE is set, every such process would compile torch's 1,500 files again, which takes seconds.
    So compiled files are written to pytest's cache. A shell's background job ignores Ctrl-C, and so would its child
    processes; the tests of Ctrl-C need the default handler."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "PYTHONDONTWRITEBYTECODE" in os.environ and hasattr(config, "cache"):
        del os.environ["PYTHONDONTWRITEBYTECODE"]
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(config.cache.mkdir("bytecode"))
        sys.dont_write_bytecode = False


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files whose tests the fast tier excludes."""
    return True if config.option.markexpr == "not slow" and is_in_a_slow_folder(collection_path) else None


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if is_in_a_slow_folder(item.path) or SLOW_FIXTURES.keys() & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)
    if hasattr(
        config, "workerinput"
    ):  # one of several processes: the longest units come first, so that all processes end at similar times
        items.sort(key=lambda item: -seconds_of(unit_of(item.nodeid)))
    if "long" not in config.option.markexpr:
        _deselect(config, items, "long")
    if any(item.get_closest_marker("gpu") for item in items):
        _deselect_without_a_gpu(config, items)


@pytest.hookimpl(optionalhook=True)  # a hook of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return scheduler(config, log) if config.getvalue("dist") == "loadfile" else None  # None: --dist's scheduler


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the worker processes of runs, which takes a moment, for tests that do not test how workers start."""
    forking.in_place(monkeypatch)


def _deselect_without_a_gpu(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        _deselect(config, items, "gpu")


def _deselect(config: pytest.Config, items: list[pytest.Item], mark: str) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker(mark)])
    items[:] = [item for item in items if not item.get_closest_marker(mark)]
