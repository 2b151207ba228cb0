"""The forward product: right, one chain of multiply-adds along K, and the same bits for a row whatever the rows beside it, tiling and threads."""

import pytest
import torch

from nemo_rl_cpp._native import C

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
LENGTHS = [1, 7, 33, 576, 1023, 1024, 1030, 1536, 2100, 4099]


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


@pytest.mark.parametrize("rows", [1, 8, 9, 40, 64, 130])
def test_float32_sums_are_one_chain_in_ascending_order(rows):
    """A small term is lost beside a large one, and what is lost tells the order: 2^24 + 1 is 2^24 in float32."""
    K = 97
    x, w = torch.ones(rows, K), torch.ones(50, K)
    w[:, 40], w[:, 80] = 2.0**24, -(2.0**24)
    # 40 ones and 2^24 make 2^24 + 40; of the 39 ones that follow each is a tie, rounded to even: none counts; then 40, and 16 more
    assert torch.equal(product(x, w), torch.full((rows, 50), 56.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_x_may_be_packed_in_several_goes(dtype):
    """So many rows of so many terms that they do not fit into the memory for packed rows at once."""
    x, w, _ = tensors(700, 50, 16384, dtype)
    whole = product(x, w)
    for i in (0, 255, 256, 500, 699):
        assert torch.equal(product(x[i : i + 1], w)[0], whole[i])
