"""The gated delta rule, its convolution and its norm: values and gradients against torch, the same bits in chunks, packed and alone."""

import pytest
import torch
from nemo_rl_cpp._native import C
from reference import gated_delta as reference
from threads import on_threads

#          P, U, dk, dv, W
SHAPES = [(2, 4, 16, 32, 4), (1, 1, 128, 128, 4), (2, 2, 48, 16, 2)]
TYPES = [(torch.float64, 1e-12), (torch.float32, 3e-6), (torch.bfloat16, 2e-2)]
#          a prompt of 37 tokens that two responses continue, a text alone, and one with a single token
SEQUENCES = [(0, 37, -1), (37, 40, 0), (77, 5, 0), (82, 70, -1), (152, 1, -1)]
TOKENS = 153


def full(sequences):
    return [(start, length, parent, -1, False) for start, length, parent in sequences]


def draw(*shape, dtype, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)


def inputs(shape, dtype, tokens=TOKENS):
    P, U, dk, dv, _ = shape
    shapes = (tokens, 2 * P * dk + U * dv), (tokens, U), (tokens, U), (U,), (U,)
    return [draw(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes, 1)]


def relative_gap(ours, expected):
    return float((ours.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def compare(forward, backward, function, arguments, d_out, bound):
    """Compare `forward(*arguments)` and `backward(d_out, *arguments)` with autograd through `function`."""
    leaves = [x.double().requires_grad_() for x in arguments]
    out = function(*leaves)
    assert relative_gap(forward(*arguments), out.detach()) < bound
    expected = torch.autograd.grad(out, leaves, d_out.double())
    for mine, theirs in zip(backward(d_out, *arguments), expected, strict=True):
        assert relative_gap(mine, theirs) < bound


def compare_rule(shape, arguments, d_out, bound):
    compare(
        lambda *x: C.gated_delta(*x, full(SEQUENCES), shape), lambda *x: C.gated_delta_backward(*x, full(SEQUENCES), shape),
        lambda *x: reference.gated_delta(*x, SEQUENCES, shape), arguments, d_out, bound,
    )  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "bound"), TYPES)
def test_gated_delta_rule_and_its_gradients_match_a_slow_reference(shape, dtype, bound):
    compare_rule(shape, inputs(shape, dtype), draw(TOKENS, shape[1] * shape[3], dtype=dtype, seed=6), bound)


@pytest.mark.parametrize("rate", [-6.0, 3.0])
def test_gated_delta_gradients_match_the_reference_for_slow_and_fast_decaying_states(rate):
    """A decay near 1 over all tokens, and states that are forgotten within a few of them."""
    shape, arguments = SHAPES[0], inputs(SHAPES[0], torch.float64)
    arguments[3].fill_(rate)
    d_out = draw(TOKENS, shape[1] * shape[3], dtype=torch.float64, seed=6)
    for dtype, bound in TYPES[:2]:
        compare_rule(shape, [x.to(dtype) for x in arguments], d_out.to(dtype), bound)


@pytest.mark.parametrize(("dtype", "bound"), TYPES)
def test_short_convolution_and_its_gradients_match_a_slow_reference(dtype, bound):
    x, w, dy = (draw(*s, dtype=dtype, seed=i) for i, s in enumerate([(TOKENS, 80), (80, 4), (TOKENS, 80)]))
    compare(
        lambda *a: C.short_conv(*a, full(SEQUENCES)), lambda *a: C.short_conv_backward(*a, full(SEQUENCES))[:2],
        lambda *a: reference.short_conv(*a, SEQUENCES), [x, w], dy, bound,
    )  # fmt: skip


@pytest.mark.parametrize(("dtype", "bound"), TYPES)
def test_gated_rms_norm_and_its_gradients_match_a_slow_reference(dtype, bound):
    x, z, dy = (draw(TOKENS, 96, dtype=dtype, seed=i) for i in range(3))
    w = draw(32, dtype=dtype, seed=4)
    compare(
        lambda *a: C.gated_norm(*a, 1e-6), lambda *a: C.gated_norm_backward(*a, 1e-6),
        lambda *a: reference.gated_norm(*a, 1e-6), [x, z, w], dy, bound,
    )  # fmt: skip


def test_gated_delta_ops_match_the_functions_of_transformers():
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    shape = P, U, dk, dv, W = (2, 4, 16, 32, 4)
    qkv, b, a, A_log, dt_bias = inputs(shape, torch.float32, 100)
    q, k, v = (x.view(1, 100, -1, d) for x, d in zip(qkv.split([P * dk, P * dk, U * dv], 1), (dk, dk, dv)))
    g = -A_log.exp() * torch.nn.functional.softplus(a + dt_bias)
    for rule in (modeling.torch_recurrent_gated_delta_rule, modeling.torch_chunk_gated_delta_rule):
        theirs, _ = rule(q, k, v, g=g[None], beta=b.sigmoid()[None], use_qk_l2norm_in_kernel=True)
        ours = C.gated_delta(qkv, b, a, A_log, dt_bias, [(0, 100, -1, -1, False)], shape)
        assert relative_gap(ours, theirs.reshape(100, -1).double()) < 1e-5
    w = draw(qkv.shape[1], W, dtype=torch.float32, seed=9)
    theirs = modeling.causal_conv1d_fn(qkv.T[None], w, activation="silu")[0].T
    assert relative_gap(C.short_conv(qkv, w, [(0, 100, -1, -1, False)]), theirs.double()) < 1e-6
    norm = modeling.Qwen3_5RMSNormGated(dv)
    norm.weight.data = draw(dv, dtype=torch.float32, seed=10)
    x, z = draw(400, dv, dtype=torch.float32, seed=11), draw(400, dv, dtype=torch.float32, seed=12)
    assert relative_gap(C.gated_norm(x, z, norm.weight.data, 1e-6), norm(x, z).detach().double()) < 1e-6


def in_chunks(arguments, w, shape, chunk):
    """Convolution and rule over the states of one sequence, `chunk` tokens at a time."""
    P, U, dk, dv, W = shape
    qkv, b, a, A_log, dt_bias = arguments
    state = torch.full((3, U, dk * dv), float("nan"), dtype=torch.float32)
    inputs = torch.full((3, W - 1, qkv.shape[1]), float("nan"), dtype=qkv.dtype)
    out = []
    for begin in range(0, len(qkv), chunk):
        piece = slice(begin, begin + chunk)
        sequences = [(0, len(qkv[piece]), -1, 1, begin > 0)]
        mixed = C.short_conv(qkv[piece].contiguous(), w, sequences, inputs)
        out.append(C.gated_delta(mixed, b[piece], a[piece], A_log, dt_bias, sequences, shape, state))
    assert state[[0, 2]].isnan().all() and inputs[[0, 2]].isnan().all()
    return torch.cat(out)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_delta_output_is_bit_identical_for_any_chunks_packing_prefix_and_threads(shape, dtype):
    arguments = inputs(shape, dtype)
    qkv, b, a, A_log, dt_bias = arguments
    w = draw(qkv.shape[1], shape[4], dtype=dtype, seed=7)

    def compare_chunks():
        packed = C.gated_delta(C.short_conv(qkv, w, full(SEQUENCES)), b, a, A_log, dt_bias, full(SEQUENCES), shape)
        for index, (_, length, _) in enumerate(SEQUENCES):
            rows = reference.rows_of(SEQUENCES, index)
            own = [qkv[rows], b[rows], a[rows], A_log, dt_bias]
            for chunk in (1, 2, 7, 64, 200):
                alone = in_chunks(own, w, shape, chunk)[-length:]
                assert torch.equal(alone, packed[rows[-length:]]), (index, chunk)
        return packed

    assert torch.equal(*on_threads(compare_chunks, (1, 2)))


def test_gated_delta_gradients_are_bit_identical_for_any_threads_and_packing():
    shape = SHAPES[0]
    arguments, d_out = inputs(shape, torch.float32), draw(TOKENS, 4 * 32, dtype=torch.float32, seed=6)
    results = on_threads(lambda: C.gated_delta_backward(d_out, *arguments, full(SEQUENCES), shape), (1, 2))
    assert all(torch.equal(x, y) for x, y in zip(*results))
    rows = slice(82, 152)
    alone = C.gated_delta_backward(
        d_out[rows], *(x[rows].contiguous() for x in arguments[:3]), *arguments[3:], [(0, 70, -1, -1, False)], shape
    )
    assert all(torch.equal(x, y[rows]) for x, y in zip(alone[:3], results[0][:3]))


def test_nan_in_one_sequence_does_not_change_the_recurrent_state_of_the_next():
    shape = SHAPES[0]
    arguments = inputs(shape, torch.float32)
    before = C.gated_delta(*arguments, full(SEQUENCES), shape)
    arguments[0][:82] = float("nan")
    after = C.gated_delta(*arguments, full(SEQUENCES), shape)
    assert torch.equal(before[82:], after[82:]) and after[:82].isnan().all()


@pytest.mark.parametrize("shape", [(2, 3, 16, 16, 4), (1, 1, 24, 16, 4), (1, 1, 16, 16, 9)])
def test_unsupported_gated_delta_shapes_raise_value_error(shape):
    P, U, dk, dv, _ = shape
    with pytest.raises(ValueError, match="a recurrent layer with"):
        C.gated_delta(*inputs(shape, torch.float32, 3), [(0, 3, -1, -1, False)], shape)


@pytest.mark.parametrize("head_dim", [8, 16, 40])
@pytest.mark.parametrize(("dtype", "bound"), TYPES)
def test_gate_per_head_and_its_gradients_match_torch(head_dim, dtype, bound):
    x, dy = (draw(50, 3 * head_dim, dtype=dtype, seed=i) for i in range(2))
    gate = draw(50, 3, 2 * head_dim, dtype=dtype, seed=3)[..., head_dim:]
    formula = lambda a, g: a * g.reshape(50, -1).sigmoid()
    compare(C.head_gate, C.head_gate_backward, formula, [x, gate], dy, bound)
    assert torch.equal(C.head_gate(x[7:9].clone(), gate[7:9].clone()), C.head_gate(x, gate)[7:9])
