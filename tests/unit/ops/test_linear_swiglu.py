"""The gated product against the two ops that it joins: the same bits, whatever the sizes, bias, threads and whether gate_up is kept."""

import pytest
import torch
from nemo_rl_cpp._native import C
from threads import on_threads


def tensors(M: int, I: int, K: int, dtype, bias: bool):  # noqa: E741
    generator = torch.Generator().manual_seed(M * 1000 + I * 10 + K)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    return normal(M, K), normal(2 * I, K), normal(2 * I) if bias else None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("M,I,K", [(1, 16, 32), (2, 5, 7), (3, 33, 48), (70, 48, 64), (300, 40, 96), (401, 100, 1030)])
def test_linear_swiglu_is_bit_identical_to_linear_followed_by_swiglu(M, I, K, dtype, bias):  # noqa: E741
    x, w, b = tensors(M, I, K, dtype, bias)
    gate_up, act = torch.empty(M, 2 * I, dtype=dtype), torch.empty(M, I, dtype=dtype)
    C.linear_forward(x, w, b, gate_up)
    C.swiglu_forward(gate_up, act)

    def compare():
        kept, joined, alone = torch.empty_like(gate_up), torch.empty_like(act), torch.empty_like(act)
        C.linear_swiglu(x, w, b, kept, joined)
        C.linear_swiglu(x, w, b, None, alone)
        assert torch.equal(kept, gate_up) and torch.equal(joined, act) and torch.equal(alone, act)

    on_threads(compare, (1, 2))


def test_linear_swiglu_agrees_with_torch():
    x, w, b = tensors(9, 20, 24, torch.float64, True)
    act = torch.empty(9, 20, dtype=torch.float64)
    C.linear_swiglu(x, w, b, None, act)
    gate, up = torch.nn.functional.linear(x, w, b).chunk(2, dim=1)
    torch.testing.assert_close(act, torch.nn.functional.silu(gate) * up, rtol=1e-12, atol=1e-12)


def test_linear_swiglu_rejects_outputs_of_wrong_shape_or_dtype():
    x, w, _ = tensors(4, 8, 16, torch.float32, False)
    with pytest.raises(ValueError, match="linear_swiglu"):
        C.linear_swiglu(x, w, None, None, torch.empty(4, 9))
    with pytest.raises(ValueError, match="linear_swiglu"):
        C.linear_swiglu(x, w, None, torch.empty(4, 8), torch.empty(4, 8))
    with pytest.raises(ValueError, match="linear_swiglu"):
        C.linear_swiglu(x, w, None, None, torch.empty(4, 8, dtype=torch.bfloat16))
