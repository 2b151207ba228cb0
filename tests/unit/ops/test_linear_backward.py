import pytest
import torch
from nemo_rl_cpp._native import C
from threads import on_threads

# rows, columns and terms below, at and beyond what is packed together: 120 rows, 32 and 256 columns, 1,024 terms
SHAPES = [(1, 1, 1), (5, 7, 3), (120, 32, 64), (130, 1100, 300), (257, 33, 65), (1300, 64, 33), (64, 2100, 260)]
KINDS = [
    (torch.float32, torch.float32, 2e-6),
    (torch.float64, torch.float64, 1e-14),
    (torch.bfloat16, torch.float32, 2e-6),
    (torch.bfloat16, torch.bfloat16, 8e-3),
]


def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def assert_close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert (got.double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype, out, tolerance", KINDS, ids=str)
@pytest.mark.parametrize("T, N, K", SHAPES)
def test_linear_layer_input_gradient_matches_a_float64_reference(T, N, K, dtype, out, tolerance, accumulate):
    dy, w, dx = drawn(T, N, dtype=dtype), drawn(N, K, dtype=dtype), drawn(T, K, dtype=out)
    expected = dy.double() @ w.double() + (dx.double() if accumulate else 0)
    C.linear_backward_input(dy, w, dx, accumulate)
    assert_close(dx, expected, tolerance)


@pytest.mark.parametrize("dtype, out, tolerance", KINDS[:3], ids=str)
@pytest.mark.parametrize("T, N, K", SHAPES)
def test_linear_layer_weight_gradient_matches_a_float64_reference(T, N, K, dtype, out, tolerance):
    dy, x, dw = drawn(T, N, dtype=dtype), drawn(T, K, dtype=dtype), drawn(N, K, dtype=out)
    expected = dy.double().t() @ x.double() + dw.double()
    C.linear_backward_weight(dy, x, dw)
    assert_close(dw, expected, tolerance)


@pytest.mark.parametrize("dtype, out", [kind[:2] for kind in KINDS], ids=str)
def test_linear_gradients_are_bit_identical_for_any_number_of_threads(dtype, out):
    T, N, K = 700, 1100, 500
    dy, w, x = drawn(T, N, dtype=dtype), drawn(N, K, dtype=dtype), drawn(T, K, dtype=dtype)

    def gradients():
        dx, dw = torch.zeros(T, K, dtype=out), torch.zeros(N, K, dtype=torch.promote_types(dtype, torch.float32))
        C.linear_backward_input(dy, w, dx, True)
        C.linear_backward_weight(dy, x, dw)
        return dx, dw

    found = on_threads(gradients, (1, 2, 5))
    for dx, dw in found[1:]:
        assert torch.equal(dx, found[0][0]) and torch.equal(dw, found[0][1])


def test_linear_gradient_does_not_reuse_packed_inputs_of_an_earlier_call_with_equal_shape():
    first, w, results = drawn(60, 40, dtype=torch.float32), drawn(40, 20, dtype=torch.float32), []
    for dy in (first, -first):
        dx = torch.empty(60, 20)
        C.linear_backward_input(dy, w, dx, False)
        results.append(dx)
    assert torch.equal(results[0], -results[1])


def test_linear_input_gradient_writes_only_the_columns_of_its_output_view():
    dy, w, wide = drawn(9, 30, dtype=torch.float32), drawn(30, 50, dtype=torch.float32), torch.zeros(9, 80)
    C.linear_backward_input(dy[:, 5:20], w[5:20], wide[:, 10:60], False)
    assert_close(wide[:, 10:60], dy[:, 5:20].double() @ w[5:20].double(), 2e-6)
    assert not wide[:, :10].any() and not wide[:, 60:].any()
    C.linear_backward_input(dy[:, :0], w[:0], wide[:, 10:60], False)
    assert not wide.any()
