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


@pytest.mark.parametrize(
    "new, message",
    [
        ("if (lane == 0) sum = __shfl_xor_sync(0xffffffffu, sum, 1); __syncthreads();", "shuffle that only 1 of 32 live lanes of a warp reach"),
        ("sum = __shfl_xor_sync(0xffffu, sum, 1); __syncthreads();", "mask that is not full"),
        ("sum = __shfl_sync(0xffffffffu, sum, 40); __syncthreads();", "shuffle from lane 40 of 32"),
        ("sum = __shfl_xor_sync(0xffffffffu, sum, 32); __syncthreads();", "reads lane"),
        ("if (warp == 0)\n __syncthreads();\n else\n __syncthreads();", "threads meet at different barriers"),
    ],
    ids=["divergent shuffle", "mask", "lane", "xor", "two barriers"],
)
def test_misuse_fails_with_a_message(objects, tmp_path, new, message):
    wrong = build.with_mistake(objects, "flat_reduce.cu", BARRIER, f"  sums[warp][lane] = sum;\n  {new}\n", tmp_path)
    with pytest.raises(RuntimeError, match=message):
        column_sums(wrong)
