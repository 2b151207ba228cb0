"""Mamba-2's recurrence, convolution and norm: values and gradients against torch, the same bits in chunks, packed and alone."""

import math

import pytest
import torch
from nemo_rl_cpp._native import C
from reference import gated_delta, mamba2
from test_gated_delta import SEQUENCES, TOKENS, TYPES, compare, draw, full, relative_gap
from threads import on_threads

#          P, U, dk, dv, W; the heads of Nemotron Nano v2 are of 128 and 80
SHAPES = [(2, 4, 16, 32, 4), (1, 2, 128, 80, 4), (2, 2, 48, 16, 2)]
FREE, LIMITED = (0.0, math.inf), (0.5, 1.0)


def inputs(shape, dtype, tokens=TOKENS):
    P, U, dk, dv, _ = shape
    sizes = ((tokens, U * dv + 2 * P * dk), (tokens, U), (U,), (U,), (U,))
    return [draw(*size, dtype=dtype, seed=1 + i) for i, size in enumerate(sizes)]


def compare_rule(shape, limits, arguments, d_out, bound):
    rest = (full(SEQUENCES), shape, limits)
    compare(
        lambda *x: C.mamba2(*x, *rest), lambda *x: C.mamba2_backward(*x, *rest),
        lambda *x: mamba2.mamba2(*x, SEQUENCES, shape, limits), arguments, d_out, bound,
    )  # fmt: skip


@pytest.mark.parametrize("limits", [FREE, LIMITED], ids=["free", "limited"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "bound"), TYPES)
def test_mamba2_and_its_gradients_match_a_slow_reference(shape, limits, dtype, bound):
    d_out = draw(TOKENS, shape[1] * shape[3], dtype=dtype, seed=9)
    compare_rule(shape, limits, inputs(shape, dtype), d_out, bound)


@pytest.mark.parametrize("rate", [-6.0, 3.0])
def test_mamba2_gradients_match_the_reference_for_slow_and_fast_decaying_states(rate):
    shape, arguments = SHAPES[0], inputs(SHAPES[0], torch.float64)
    arguments[2].fill_(rate)
    d_out = draw(TOKENS, shape[1] * shape[3], dtype=torch.float64, seed=9)
    for dtype, bound in TYPES[:2]:
        compare_rule(shape, FREE, [x.to(dtype) for x in arguments], d_out.to(dtype), bound)


@pytest.mark.parametrize(("dtype", "bound"), TYPES)
def test_short_convolution_with_a_bias_and_its_gradients_match_a_slow_reference(dtype, bound):
    sizes = [(TOKENS, 80), (80, 4), (80,), (TOKENS, 80)]
    x, w, bias, dy = (draw(*size, dtype=dtype, seed=i) for i, size in enumerate(sizes))
    compare(
        lambda x, w, bias: C.short_conv(x, w, full(SEQUENCES), bias=bias),
        lambda dy, x, w, bias: C.short_conv_backward(dy, x, w, full(SEQUENCES), bias),
        lambda x, w, bias: gated_delta.short_conv(x, w, SEQUENCES, bias), [x, w, bias], dy, bound,
    )  # fmt: skip


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(("dtype", "bound"), TYPES)
def test_rms_norm_after_the_gate_and_its_gradients_match_a_slow_reference(groups, dtype, bound):
    x, z, dy = (draw(TOKENS, 96, dtype=dtype, seed=i) for i in range(3))
    w = draw(96, dtype=dtype, seed=4)
    compare(
        lambda *a: C.gated_norm(*a, 1e-6, groups), lambda *a: C.gated_norm_backward(*a, 1e-6, groups),
        lambda *a: mamba2.gated_norm(*a, 1e-6, groups), [x, z, w], dy, bound,
    )  # fmt: skip
    assert torch.equal(C.gated_norm(x[7:9], z[7:9], w, 1e-6, groups), C.gated_norm(x, z, w, 1e-6, groups)[7:9])


def in_chunks(arguments, w, bias, shape, chunk):
    """Convolution and recurrence over the states of one sequence, `chunk` tokens at a time."""
    P, U, dk, dv, W = shape
    vkq, a, *heads = arguments
    state = torch.full((3, U, dk * dv), float("nan"))
    before = torch.full((3, W - 1, vkq.shape[1]), float("nan"), dtype=vkq.dtype)
    out = []
    for begin in range(0, len(vkq), chunk):
        piece = slice(begin, begin + chunk)
        sequences = [(0, len(vkq[piece]), -1, 1, begin > 0)]
        mixed = C.short_conv(vkq[piece].contiguous(), w, sequences, before, bias)
        out.append(C.mamba2(mixed, a[piece], *heads, sequences, shape, LIMITED, state))
    assert state[[0, 2]].isnan().all() and before[[0, 2]].isnan().all()
    return torch.cat(out)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mamba2_output_is_bit_identical_for_any_chunks_packing_prefix_and_threads(shape, dtype):
    vkq, a, *heads = inputs(shape, dtype)
    w, bias = draw(vkq.shape[1], shape[4], dtype=dtype, seed=7), draw(vkq.shape[1], dtype=dtype, seed=8)

    def compare():
        mixed = C.short_conv(vkq, w, full(SEQUENCES), bias=bias)
        packed = C.mamba2(mixed, a, *heads, full(SEQUENCES), shape, LIMITED)
        for index, (_, length, _) in enumerate(SEQUENCES):
            rows = gated_delta.rows_of(SEQUENCES, index)
            for chunk in (1, 2, 7, 64, 200):
                alone = in_chunks([vkq[rows], a[rows], *heads], w, bias, shape, chunk)[-length:]
                assert torch.equal(alone, packed[rows[-length:]]), (index, chunk)
        return packed

    assert torch.equal(*on_threads(compare, (1, 2)))


def test_mamba2_gradients_are_bit_identical_for_any_threads_and_packing():
    shape, limits = SHAPES[0], FREE
    arguments, d_out = inputs(shape, torch.float32), draw(TOKENS, 4 * 32, dtype=torch.float32, seed=9)
    results = on_threads(lambda: C.mamba2_backward(d_out, *arguments, full(SEQUENCES), shape, limits), (1, 2))
    assert all(torch.equal(x, y) for x, y in zip(*results))
    rows = slice(82, 152)
    own = [x[rows].contiguous() for x in arguments[:2]]
    alone = C.mamba2_backward(d_out[rows], *own, *arguments[2:], [(0, 70, -1, -1, False)], shape, limits)
    assert all(torch.equal(x, y[rows]) for x, y in zip(alone[:2], results[0][:2]))


def test_mamba2_ops_match_the_functions_of_transformers():
    modeling = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    P, U, dk, dv, _ = shape = SHAPES[0]
    vkq, a, A_log, dt_bias, D = inputs(shape, torch.float32, 100)
    x, B, C_ = vkq.split([U * dv, P * dk, P * dk], 1)
    theirs = modeling.mamba2_chunk_scan(
        x.view(1, 100, U, dv), a[None], -A_log.exp(), B.view(1, 100, P, dk), C_.view(1, 100, P, dk), chunk_size=16, D=D,
        dt_bias=dt_bias, dt_softplus=True, dt_limit=LIMITED,
    )  # fmt: skip
    ours = C.mamba2(vkq, a, A_log, dt_bias, D, [(0, 100, -1, -1, False)], shape, LIMITED)
    assert relative_gap(ours, theirs.reshape(100, -1).double()) < 1e-5
    norm = modeling.NemotronHRMSNormGated(96, 32, 1e-6)
    norm.weight.data = draw(96, dtype=torch.float32, seed=10)
    x, z = (draw(TOKENS, 96, dtype=torch.float32, seed=i) for i in (11, 12))
    assert relative_gap(C.gated_norm(x, z, norm.weight.data, 1e-6, 3), norm(x, z).detach().double()) < 1e-6
