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


def test_cuda_emulator_exposes_a_missing_barrier_in_a_kernel_by_wrong_results(kernels, objects, tmp_path):
    assert column_sums(kernels)
    without = BARRIER.replace("  __syncthreads();\n", "")
    assert not column_sums(build.with_mistake(objects, "flat_reduce.cu", BARRIER, without, tmp_path))


# in the order of misuse.cu
MISUSES = [
    "shuffle that only 1 of 32 live lanes of a warp reach", "mask that is not full", "shuffle from lane 40 of 32",
    "reads lane 3[0-9]|reads lane [4-6][0-9]", "threads meet at different barriers",
    "reads lane 3, which takes no part", "matrix row that is not 16-byte aligned",
    "matrix row outside of shared memory", "matrix product without all lanes of a warp",
]  # fmt: skip


@pytest.mark.parametrize("number, message", list(enumerate(MISUSES, 1)))
def test_cuda_emulator_reports_each_kind_of_kernel_mistake(kernels, number, message):
    out = torch.zeros(64)
    with pytest.raises(RuntimeError, match=message):
        kernels.misuse(number, out)
    kernels.misuse(0, out)  # the next launch is a new one
    assert out.tolist() == [*range(32), *range(32)]


def test_emulated_async_copy_to_shared_memory_is_visible_only_after_waiting_for_the_copy(kernels):
    x, out = torch.randn(64, generator=torch.Generator().manual_seed(0)), torch.zeros(64)
    kernels.copied(x, 0, out)
    assert out.isnan().all()
    kernels.copied(x, 1, out)
    assert torch.equal(out, x)


def attends(kernels):
    """Whether two tiles of keys for one head give what float64 gives."""
    T, H = 50, 16
    qkv = torch.randn(T, 3 * H, generator=torch.Generator().manual_seed(0)).bfloat16()
    out, lse, blocks = torch.zeros(T, H).bfloat16(), torch.zeros(T, 1), torch.tensor([[0, T, 0, 0, 0, 0, 0]])
    kernels.attention_forward(1, 1, H, 1, 0, 0.0, qkv, None, None, None, blocks, 1, out, lse, 1)
    q, k, v = qkv.double().split(H, dim=1)
    weights = (q @ k.T / math.sqrt(H)).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
    right = torch.allclose(out.double(), weights.softmax(1) @ v, atol=2e-2)
    return right and torch.allclose(lse[:, 0].double(), weights.logsumexp(1), atol=1e-5)


def test_cuda_emulator_exposes_a_missing_warp_reduction_of_softmax_maxima_by_wrong_results(kernels, objects, tmp_path):
    assert attends(kernels)
    change = "best = row_all(best, fmaxf);", ""
    assert not attends(build.with_mistake(objects, "attention_forward_mma.cu", *change, tmp_path))
