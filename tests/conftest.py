"""Tests marked `gpu` run where there is a CUDA device and are deselected elsewhere."""

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if torch.cuda.is_available():
        return
    without = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=without)
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
