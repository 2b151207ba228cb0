"""The forward product: right, and the same bits for a row whatever the rows beside it, tiling, parts of K and threads."""

import pytest
import torch

from nemo_rl_cpp._native import C

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
LENGTHS = [1, 7, 33, 576, 1023, 1024, 1030, 1536, 2100, 4099]  # rows of 4 KiB and more are multiplied part by part


def tensors(M: int, N: int, K: int, dtype):
    generator = torch.Generator().manual_seed(M * 1000 + N * 10 + K)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    return normal(M, K), normal(N, K), normal(N)


def product(x, w, bias=None, add_to=None):
    y = torch.full((len(x), len(w)), float("nan"), dtype=x.dtype) if add_to is None else add_to.clone()
    C.linear_forward(x, w, bias, y, add_to is not None)
    return y


@pytest.mark.parametrize("K", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_forward_agrees_with_float64(dtype, K):
    x, w, bias = tensors(7, 37, K, dtype)
    exact = x.double() @ w.double().T + bias.double()
    limit = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float64: 1e-14}[dtype] * K**0.5
    got = product(x, w, bias)
    assert (got.double() - exact).abs().max() <= limit + limit * exact.abs().max()
    add_to = torch.ones_like(got)
    assert (product(x, w, bias, add_to).double() - exact - 1).abs().max() <= limit + limit * exact.abs().max()


@pytest.mark.parametrize("K", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_among_others(dtype, K):
    x, w, bias = tensors(70, 70, K, dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = product(x, w, bias)
        for i in (0, 3, 68, 69):
            assert torch.equal(product(x[i : i + 1], w, bias)[0], whole[i])
        for rows in (2, 3, 5, 66):
            assert torch.equal(product(x[:rows], w, bias), whole[:rows])
        assert torch.equal(product(x, w[5:6], bias[5:6])[:, 0], whole[:, 5])
        torch.set_num_threads(2)
        assert torch.equal(product(x, w, bias), whole)
    finally:
        torch.set_num_threads(before)
