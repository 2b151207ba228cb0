"""What the tests of emulated kernels share: random tensors, tables of int64, and a bound on a difference."""

import torch


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normal numbers that are drawn in float32, whatever the dtype."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def table(rows: list) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def close(got: torch.Tensor, expected: torch.Tensor, bound: float = 1e-6) -> None:
    """Assert that the difference is at most `bound` of the expected tensor, by their norms."""
    difference, size = (got.double() - expected.double()).norm(), expected.double().norm()
    assert difference <= bound * size, float(difference / size)
