"""Mistakes put into a kernel are noticed: by a wrong result, or by the emulator itself (tests/cuda_emulation)."""

import math

import pytest
import torch
from cuda_emulation import build


def column_sums(kernels):
    x, out = torch.randn(130, 40, generator=torch.Generator().manual_seed(0)), torch.zeros(40)
    kernels.column_sums(x, 40, 130, 40, torch.full((3, 40), math.nan), out, 0)
    return bool(torch.allclose(out.double(), x.double().sum(0), rtol=1e-4, atol=1e-4))


BARRIER = "  sums[warp][lane] = sum;\n  __syncthreads();\n"


@pytest.mark.parametrize(
    "old, new",
    [
        (BARRIER, "  sums[warp][lane] = sum;\n"),
        ("for (int w = 1; w < kPartRows; ++w) sum", "for (int w = 2; w < kPartRows; ++w) sum"),
    ],
    ids=["barrier removed", "constant changed"],
)
def test_a_mistake_gives_another_result(kernels, objects, tmp_path, old, new):
    assert column_sums(kernels)
    assert not column_sums(build.with_mistake(objects, "flat_reduce.cu", old, new, tmp_path))


# in the order of misuse.cu
MISUSES = [
    "shuffle that only 1 of 32 live lanes of a warp reach",
    "mask that is not full",
    "shuffle from lane 40 of 32",
    "reads lane 3[0-9]|reads lane [4-6][0-9]",
    "threads meet at different barriers",
    "reads lane 3, which takes no part",
]


@pytest.mark.parametrize("number, message", list(enumerate(MISUSES, 1)))
def test_misuse_fails_with_a_message(kernels, number, message):
    out = torch.zeros(64)
    with pytest.raises(RuntimeError, match=message):
        kernels.misuse(number, out)
    kernels.misuse(0, out)  # the next launch is a new one
    assert out.tolist() == [*range(32), *range(32)]
