"""Which tests a run takes: those marked `gpu` where there is a CUDA device, those of slow folders but in the fast tier. With `-n`,
which tests stay in one process: those of a file, and all that compile the CUDA kernels for the CPU."""

from pathlib import Path

import pytest
from tiers import SLOW_FIXTURES, TESTS, is_in_a_slow_folder

CUDA = TESTS / "unit" / "cuda"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The fast tier imports no file whose tests it leaves out."""
    return True if config.option.markexpr == "not slow" and is_in_a_slow_folder(collection_path) else None


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if is_in_a_slow_folder(item.path) or SLOW_FIXTURES.keys() & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)
        together = CUDA if item.path.is_relative_to(CUDA) else item.path
        item.add_marker(pytest.mark.xdist_group(str(together)))
    if any(item.get_closest_marker("gpu") for item in items):
        _deselect_without_a_gpu(config, items)


def _deselect_without_a_gpu(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    if torch.cuda.is_available():
        return
    without = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=without)
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
