import math

import numpy as np
import pytest
import torch
from nemo_rl_cpp._native import C
from reference import attention as reference
from test_attention import HEADS, softcap_of
from threads import on_threads

#        activations, gradients, relative error allowed
TYPES = [
    (torch.float32, torch.float32, 3e-6),
    (torch.float64, torch.float64, 1e-13),
    (torch.bfloat16, torch.float32, 2e-2),  # out is rounded to bfloat16 before its dot product with d_out
    (torch.bfloat16, torch.bfloat16, 2e-2),
]
# every pair of a shape, the types and a window
CASES = [
    (shape, *TYPES[(i + j) % 4], window) for i, shape in enumerate(HEADS) for j, window in enumerate([0, 2, 9, 40, 64])
]


def sinks_of(shape, window, dtype):
    """Return the attention sinks of the windows 9 and 50; others have none."""
    return torch.linspace(-3, 3, shape[0], dtype=torch.float64).to(dtype) if window in (9, 50) else None


def heads_of(shape, window=0, dtype=torch.float32):
    sinks = sinks_of(shape, window, dtype)
    return C.AttentionHeads(*shape, 1.0 / math.sqrt(shape[2]), window, softcap_of(window), sinks)


def random_rows(tokens, columns, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, columns, generator=generator, dtype=torch.float64).to(dtype)


def inputs(tokens, shape, dtype, grad_dtype, seed=0):
    n, k, h = shape
    return random_rows(tokens, (n + 2 * k) * h, dtype, seed), random_rows(tokens, n * h, grad_dtype, seed + 1)


def gradient(qkv, d_out, sequences, heads):
    out, lse = C.attention_forward(qkv, sequences, heads)
    return C.attention_backward(qkv, out, d_out, lse, sequences, heads)


def relative_gap(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


def group_layout(prompt, lengths, first=0):
    """Return (sequences, number of rows): a prompt at row `first`, then responses with the lengths `lengths` that share
    it."""
    starts = first + prompt + np.concatenate([[0], np.cumsum(lengths)])
    return [(first, prompt, 0, 0)] + [(int(s), n, first, prompt) for s, n in zip(starts, lengths)], int(starts[-1])


@pytest.mark.parametrize("shape, dtype, grad_dtype, limit, window", CASES, ids=str)
def test_attention_gradients_match_a_float64_reference(shape, dtype, grad_dtype, limit, window):
    group, end = group_layout(37, [20, 1, 40])
    sequences = [*group, (end, 33, 0, 0), (end + 33, 5, end, 12)]  # the last shares only a part of its prompt
    qkv, d_out = inputs(end + 38, shape, dtype, grad_dtype)
    got = gradient(qkv, d_out, sequences, heads_of(shape, window, dtype))
    n, k, h = shape
    sinks = sinks_of(shape, window, dtype)
    want, want_sinks = reference.attention_backward(
        qkv.double().numpy(), d_out.double().numpy(), sequences, n, k, h, 1 / math.sqrt(h), window, softcap_of(window),
        None if sinks is None else sinks.double().numpy(),
    )  # fmt: skip
    assert got.dtype == grad_dtype
    if sinks is not None:
        heads = heads_of(shape, window, dtype)
        out, lse = C.attention_forward(qkv, sequences, heads)
        d_sinks = C.attention_sinks_backward(out, d_out, lse, heads)
        assert relative_gap(d_sinks, torch.from_numpy(want_sinks)) <= limit
    for columns in (slice(0, n * h), slice(n * h, (n + k) * h), slice((n + k) * h, None)):  # queries, keys, values
        assert relative_gap(got[:, columns], torch.from_numpy(want[:, columns])) <= limit


def test_bfloat16_attention_gradients_match_float64_up_to_rounding():
    """The softmax's weights, P, dS and d_out may be rounded to bfloat16 in between."""
    n, k, h = shape = (6, 2, 64)
    sequences = [(0, 150, 0, 0), (150, 60, 0, 33)]
    qkv, d_out = inputs(210, shape, torch.bfloat16, torch.float32)
    out, lse = C.attention_forward(qkv, sequences, heads_of(shape))
    want, _ = reference.attention(qkv.double().numpy(), sequences, *shape, 1 / math.sqrt(h))
    assert relative_gap(out, torch.from_numpy(want)) <= 2.5e-3  # rounding the result alone: 1.6e-3
    got = C.attention_backward(qkv, out, d_out, lse, sequences, heads_of(shape))
    want, _ = reference.attention_backward(
        qkv.double().numpy(), d_out.double().numpy(), sequences, *shape, 1 / math.sqrt(h)
    )
    assert relative_gap(got, torch.from_numpy(want)) <= 3.5e-3


@pytest.mark.parametrize("dtype,limit", [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize("prompt,lengths", [(45, [30, 64, 7]), (64, [1, 2, 90]), (3, [60] * 8), (200, [128] * 16)])
@pytest.mark.parametrize("window", [0, 50])
def test_attention_gradient_of_a_shared_prefix_is_the_sum_over_its_sequences(dtype, limit, prompt, lengths, window):
    shape = (6, 2, 64)
    sequences, tokens = group_layout(prompt, lengths)
    qkv, d_out = inputs(tokens, shape, dtype, dtype)
    got = gradient(qkv, d_out, sequences, heads_of(shape, window, dtype))
    # without sharing: the prompt's rows stand before every generation, with no gradient of their own but once
    want = torch.zeros_like(got)
    heads = heads_of(shape, window, dtype)
    want[:prompt] += gradient(qkv[:prompt].clone(), d_out[:prompt].clone(), [(0, prompt, 0, 0)], heads)
    for start, length, _, _ in sequences[1:]:
        rows = torch.cat([torch.arange(prompt), torch.arange(start, start + length)])
        grad = d_out[rows]
        grad[:prompt] = 0
        want.index_add_(0, rows, gradient(qkv[rows], grad, [(0, len(rows), 0, 0)], heads))
    assert relative_gap(got, want) <= limit


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_gradient_is_bit_identical_for_any_number_of_threads(dtype):
    """The batches are split into several jobs: a long sequence, and a prompt with many responses."""
    shape = (9, 3, 64)
    long = [(0, 1500, 0, 0), (1500, 100, 0, 0)]
    group, end = group_layout(150, [90] * 24)
    for sequences, tokens in [(long, 1600), (group, end)]:
        qkv, d_out = inputs(tokens, shape, dtype, torch.float32)
        results = on_threads(lambda: gradient(qkv, d_out, sequences, heads_of(shape)), (1, 2, 3, 2))
        for other in results[1:]:
            assert torch.equal(other.view(torch.int32), results[0].view(torch.int32))


def test_attention_gradient_of_padding_rows_is_zero():
    shape = (2, 1, 16)
    qkv, d_out = inputs(10, shape, torch.float32, torch.float32)
    got = gradient(qkv, d_out, [(2, 3, 0, 0)], heads_of(shape))
    keep = torch.zeros(10, dtype=torch.bool)
    keep[2:5] = True
    assert (got[~keep] == 0).all() and (got[keep] != 0).any()


def test_invalid_attention_backward_arguments_raise_value_error():
    shape, sequences = (2, 1, 16), [(0, 10, 0, 0)]
    heads = heads_of(shape)
    qkv, d_out = inputs(10, shape, torch.float32, torch.float32)
    out, lse = C.attention_forward(qkv, sequences, heads)
    for grad, of_rows, said in [
        (d_out.double(), lse, "d_out is Double"), (d_out[:9], lse, "d_out must be"), (d_out, lse[:, :1].contiguous(), "lse must be"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=said):
            C.attention_backward(qkv, out, grad, of_rows, sequences, heads)
