import pytest
import torch
from nemo_rl_cpp._native import C
from threads import on_threads

ROWS = C.PackedWeights.most_rows()
PACKS = pytest.mark.skipif(ROWS == 0, reason="weights are packed on processors with AVX2 or AVX-512 only")


def normal(*shape, seed=0, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def bits(t):
    return t.view(torch.int32 if t.dtype == torch.float32 else torch.int16)


def forward(x, w, bias=None, dtype=torch.bfloat16, add_to=None, packed=None):
    y = torch.full((len(x), len(w)), float("nan"), dtype=dtype) if add_to is None else add_to.clone()
    C.linear_forward(x, w, bias, y, add_to is not None, packed)
    return bits(y)


def pack(w, gated=False):
    packed = C.PackedWeights()
    packed.pack(w, gated)
    return packed


@pytest.mark.parametrize("rows", [*range(1, 15), 16, 17, 20, 31, 48, 49, 61, 64, 65])
@pytest.mark.parametrize("N,K", [(32, 8), (96, 72), (640, 576), (64, 1032)])
def test_linear_layer_is_bit_identical_with_and_without_packed_weights(rows, N, K):
    x, w, bias, h = normal(rows, K), normal(N, K, seed=1, scale=0.1), normal(N, seed=2), torch.randn(rows, N)
    packed = pack(w)
    assert packed.holds(w) == (ROWS > 0)

    def compare():
        for options in ({}, {"bias": bias}, {"dtype": torch.float32, "add_to": h}):
            assert torch.equal(forward(x, w, packed=packed, **options), forward(x, w, **options))

    on_threads(compare)


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9, 12, 13, 16, 17, 40, 63, 64, 65])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_fused_linear_swiglu_is_bit_identical_with_and_without_packed_weights(rows, activation, bias):
    I, K = 160, 200  # noqa: E741
    x, w, b = normal(rows, K), normal(2 * I, K, seed=1, scale=0.1), normal(2 * I, seed=2) if bias else None
    packed, results = pack(w, gated=True), []
    assert packed.holds(w) == (ROWS > 0)
    for use in (packed, C.PackedWeights()):
        gate_up, act, alone = (torch.empty(rows, size).bfloat16() for size in (2 * I, I, I))
        C.linear_swiglu(x, w, b, gate_up, act, use, activation)
        C.linear_swiglu(x, w, b, None, alone, use, activation)
        assert torch.equal(bits(act), bits(alone))
        results.append((bits(gate_up), bits(act)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def special(kind):
    w = normal(64, 64, seed=3, scale=0.05)
    raw = w.view(torch.int16)
    if kind == "zeros of both signs":
        w[::3, ::2], w[1::3, ::5] = 0.0, -0.0
    elif kind == "subnormals":
        raw[:, ::7], raw[:, 3::7] = 0x0001, 0x807F - 0x10000
    elif kind == "smaller than what fits":
        w[torch.rand(64, 64, generator=torch.Generator().manual_seed(4)) < 0.004] = 1e-9
    elif kind == "many small ones in one block":
        w[:16, 8:10] = 3e-20
    elif kind == "one in the last place":
        w[63, 63] = 1e-12
    elif kind == "all equal":
        w[:] = -1.5
    elif kind == "all zero":
        w[:] = 0.0
    elif kind == "powers of two from end to end of what fits":
        w[:] = 2.0 ** -(torch.arange(64 * 64).view(64, 64) % 15).float()
    elif kind == "the largest":
        w[5, 5] = torch.finfo(torch.bfloat16).max
    return w


@PACKS
@pytest.mark.parametrize(
    "kind,fits",
    [("zeros of both signs", True), ("subnormals", True), ("smaller than what fits", True), ("many small ones in one block", True), ("one in the last place", True),
     ("all equal", True), ("all zero", True), ("powers of two from end to end of what fits", True), ("the largest", False)],
)  # fmt: skip
def test_matrix_products_with_packed_weights_return_zeros_and_subnormals_exactly(kind, fits):
    """Each row of x has a single 1, so that each product is one weight."""
    w = special(kind)
    packed, one = pack(w), torch.eye(64).bfloat16()
    assert packed.holds(w) == fits
    for k, rows in [(k, n) for n in (1, 2, 4, 12, 16, 64) if n <= ROWS for k in range(0, 64, n)]:
        x = one[k : k + rows]
        got, expected = forward(x, w, dtype=torch.float32, packed=packed), forward(x, w, dtype=torch.float32)
        assert torch.equal(got, expected)
        values = got.view(torch.float32)
        # some processors take subnormals for zero
        assert torch.equal(values, w.T[k : k + rows].float()) or kind == "subnormals"


@PACKS
def test_packed_weights_are_used_only_for_products_with_their_source_matrix():
    w = normal(64, 64, seed=5)
    packed = pack(w)
    x, expected = normal(2, 64), forward(normal(2, 64), w)
    w.zero_()  # what is read shows which
    assert torch.equal(forward(x, w, packed=packed), expected)
    assert torch.equal(forward(x, w), torch.zeros_like(expected))  # not given
    # another shape at the same place
    assert torch.equal(forward(x, w[:32], packed=packed), torch.zeros_like(expected[:, :32]))
    gated = pack(w, gated=True)
    act = torch.empty(2, 32).bfloat16()
    w.copy_(normal(64, 64, seed=6))
    plain = forward(x, w)
    assert torch.equal(forward(x, w, packed=gated), plain)  # packed for the other product
    C.linear_swiglu(x, w, None, None, act)
    other = torch.empty_like(act)
    C.linear_swiglu(x, w, None, None, other, packed)
    assert torch.equal(bits(other), bits(act))
    w.zero_()
    many = normal(ROWS + 1, 64)
    assert torch.equal(forward(many, w, packed=packed), torch.zeros_like(forward(many, w)))
    bytes_before = packed.bytes
    assert bytes_before > 0
    packed.clear()
    assert not packed.holds(w) and torch.equal(forward(x, w, packed=packed), torch.zeros_like(expected))
    packed.pack(w, False)
    assert packed.holds(w) and packed.bytes == bytes_before  # the memory was kept


@pytest.mark.parametrize("shape,dtype,gated", [((48, 64), torch.bfloat16, False), ((32, 64), torch.bfloat16, True), ((64, 60), torch.bfloat16, False),
                                               ((64, 64), torch.float32, False), ((0, 64), torch.bfloat16, False)])  # fmt: skip
def test_matrices_of_unsupported_shape_or_dtype_are_not_packed(shape, dtype, gated):
    w = torch.ones(shape, dtype=dtype)
    packed = pack(w, gated)
    assert not packed.holds(w) and packed.bytes == 0


@PACKS
def test_packed_weights_take_three_quarters_of_the_memory_of_bfloat16_weights():
    w = normal(4096, 512, seed=6, scale=0.02)
    packed = pack(w)
    assert 0.75 * w.nbytes <= packed.bytes <= 0.79 * w.nbytes
