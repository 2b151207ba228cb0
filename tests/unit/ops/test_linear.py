"""Matrix products: each output is one chain of multiply-adds along K, and a row's bits do not depend on other rows,
tiling or threads. The fused linear SwiGLU has the bits of the two ops that it joins."""

import pytest
import torch
from nemo_rl_cpp._native import C
from threads import on_threads

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
def test_linear_layer_output_matches_a_float64_reference(dtype, K):
    x, w, bias = tensors(7, 37, K, dtype)
    exact = x.double() @ w.double().T + bias.double()
    limit = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float64: 1e-14}[dtype] * K**0.5
    got = product(x, w, bias)
    assert (got.double() - exact).abs().max() <= limit + limit * exact.abs().max()
    add_to = torch.ones_like(got)
    assert (product(x, w, bias, add_to).double() - exact - 1).abs().max() <= limit + limit * exact.abs().max()


@pytest.mark.parametrize("K", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matrix_product_of_a_row_is_bit_identical_alone_and_in_a_batch(dtype, K):
    x, w, bias = tensors(70, 70, K, dtype)
    whole, on_two = on_threads(lambda: product(x, w, bias), (1, 2))
    assert torch.equal(on_two, whole)
    for i in (0, 3, 68, 69):
        assert torch.equal(product(x[i : i + 1], w, bias)[0], whole[i])
    for rows in (2, 3, 5, 66):
        assert torch.equal(product(x[:rows], w, bias), whole[:rows])
    assert torch.equal(product(x, w[5:6], bias[5:6])[:, 0], whole[:, 5])


@pytest.mark.slow
@pytest.mark.parametrize(
    "M, N, K",
    [(384, 1, 1), (385, 47, 5), (401, 97, 1023), (500, 48, 1024), (481, 49, 1027), (390, 100, 2052), (200, 50, 2305)],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matrix_product_of_many_rows_is_bit_identical_to_separate_products_of_few_rows(dtype, M, N, K):
    """For so many rows w is packed too, in chunks whose ends are at any row, column and term."""
    x, w, bias = tensors(M, N, K, dtype)
    y = tensors(M, N, 1, dtype)[0] * torch.ones(1, N, dtype=dtype)

    def compare():
        for b, add_to in ((None, None), (bias, None), (None, y), (bias, y)):
            few = [product(x[m : m + 50], w, b, None if add_to is None else y[m : m + 50]) for m in range(0, M, 50)]
            assert torch.equal(product(x, w, b, add_to), torch.cat(few))

    on_threads(compare, (1, 2))


@pytest.mark.parametrize("rows", [1, 40, 400])
def test_matrix_product_with_empty_inner_dimension_adds_only_the_bias_to_the_output(rows):
    x, w, bias, y = torch.empty(rows, 0), torch.empty(50, 0), torch.arange(50.0), torch.full((rows, 50), 3.0)
    assert torch.equal(product(x, w), torch.zeros(rows, 50))
    assert torch.equal(product(x, w, bias, y), y + bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_matrix_product_of_strided_views_reads_and_writes_only_columns_of_the_views(dtype):
    x, w, _ = tensors(450, 60, 40, dtype)
    wide_x, wide_w, wide_y = (
        torch.full((450, 50), float("nan"), dtype=dtype),
        torch.full((60, 45), float("nan"), dtype=dtype),
        torch.zeros(450, 70, dtype=dtype),
    )
    wide_x[:, :40], wide_w[:, :40] = x, w
    C.linear_forward(wide_x[:, :40], wide_w[:, :40], None, wide_y[:, :60], False)
    assert torch.equal(wide_y[:, :60], product(x, w)) and not wide_y[:, 60:].any()


@pytest.mark.parametrize("rows", [1, 8, 9, 40, 64, 130, 401])
def test_float32_matrix_product_adds_its_terms_sequentially_in_ascending_order(rows):
    """2^24 + 1 is 2^24 in float32, so the sum shows in which order its terms were added."""
    K = 97
    x, w = torch.ones(rows, K), torch.ones(50, K)
    w[:, 40], w[:, 80] = 2.0**24, -(2.0**24)
    # 40 ones and 2^24 make 2^24 + 40; of the 39 ones that follow each is a tie, rounded to even: none counts; then 40, and 16 more
    assert torch.equal(product(x, w), torch.full((rows, 50), 56.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_matrix_product_split_into_several_buffers_of_rows_is_bit_identical(dtype):
    """So many rows and terms do not fit into the memory for packed rows at once."""
    x, w, _ = tensors(700, 200, 16384, dtype)
    whole = product(x, w)
    for i in (0, 255, 256, 500, 699):
        assert torch.equal(product(x[i : i + 1], w)[0], whole[i])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("M,I,K", [(1, 16, 32), (2, 5, 7), (3, 33, 48), (70, 48, 64), (300, 40, 96), (401, 100, 1030)])
def test_fused_linear_swiglu_is_bit_identical_to_linear_followed_by_swiglu(M, I, K, activation, dtype, bias):  # noqa: E741
    x, w, b = tensors(M, 2 * I, K, dtype)
    b = b if bias else None
    gate_up, act = torch.empty(M, 2 * I, dtype=dtype), torch.empty(M, I, dtype=dtype)
    C.linear_forward(x, w, b, gate_up)
    C.swiglu_forward(gate_up, act, activation)

    def compare():
        kept, joined, alone = torch.empty_like(gate_up), torch.empty_like(act), torch.empty_like(act)
        C.linear_swiglu(x, w, b, kept, joined, activation=activation)
        C.linear_swiglu(x, w, b, None, alone, activation=activation)
        assert torch.equal(kept, gate_up) and torch.equal(joined, act) and torch.equal(alone, act)

    on_threads(compare, (1, 2))


def test_fused_linear_swiglu_with_an_output_of_wrong_shape_or_dtype_is_an_error():
    x, w, _ = tensors(4, 16, 16, torch.float32)
    wrong = (None, torch.empty(4, 9)), (torch.empty(4, 8), torch.empty(4, 8)), (None, torch.empty(4, 8).bfloat16())
    for gate_up, act in wrong:
        with pytest.raises(ValueError, match="linear_swiglu"):
            C.linear_swiglu(x, w, None, gate_up, act)
