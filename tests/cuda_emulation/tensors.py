"""Tensors and bounds that the tests of emulated and of real CUDA kernels share."""

import torch


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normal numbers that are drawn in float32, whatever the dtype."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def table(rows: list) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


def packed() -> tuple[list[tuple[int, int, int, int]], int]:
    """Return (sequences, number of rows): three separate sequences, and a prompt of 45 tokens that two sequences
    share."""
    return [(0, 70, 0, 0), (70, 45, 0, 0), (115, 33, 70, 45), (148, 1, 70, 40), (149, 5, 0, 0)], 154


def close(got: torch.Tensor, expected: torch.Tensor, bound: float = 1e-6) -> None:
    """Assert that the difference is at most `bound` of the expected tensor, by their norms."""
    difference, size = (got.double() - expected.double()).norm(), expected.double().norm()
    assert difference <= bound * size, float(difference / size)
