import math
from typing import NamedTuple

import pytest
import torch
from nemo_rl_cpp._native import C
from reference import gated_delta, mamba2
from threads import on_threads

TYPES = [(torch.float64, 1e-12), (torch.float32, 3e-6), (torch.bfloat16, 2e-2)]
#          a prompt of 37 tokens that two responses continue, a text alone, and one with a single token
SEQUENCES = [(0, 37, -1), (37, 40, 0), (77, 5, 0), (82, 70, -1), (152, 1, -1)]
TOKENS = 153
FULL = [(start, length, parent, -1, False) for start, length, parent in SEQUENCES]
LIMITED = (0.5, 1.0)


class Rule(NamedTuple):
    """A recurrence: the name of its native op, its reference `slow`, the number of its inputs with a row for each
    token, the number of its inputs with a number for each head (A_log is the first), and the limits of Mamba-2's time
    step."""

    op: str
    slow: object
    of_tokens: int
    of_heads: int
    limits: tuple = ()

    def inputs(self, shape, dtype, tokens=TOKENS):
        P, U, dk, dv, _ = shape
        sizes = (tokens, 2 * P * dk + U * dv), *[(tokens, U)] * (self.of_tokens - 1), *[(U,)] * self.of_heads
        return [draw(*size, dtype=dtype, seed=seed) for seed, size in enumerate(sizes, 1)]

    def forward(self, arguments, shape, sequences=FULL, *state):
        return getattr(C, self.op)(*arguments, sequences, shape, *self.limits, *state)

    def backward(self, d_out, arguments, shape, sequences=FULL):
        return getattr(C, f"{self.op}_backward")(d_out, *arguments, sequences, shape, *self.limits)

    def compare(self, shape, arguments, d_out, bound):
        compare(
            lambda *x: self.forward(x, shape), lambda d_out, *x: self.backward(d_out, x, shape),
            lambda *x: self.slow(*x, SEQUENCES, shape, *self.limits), arguments, d_out, bound,
        )  # fmt: skip


DELTA = Rule("gated_delta", gated_delta.gated_delta, 3, 2)
FREE = Rule("mamba2", mamba2.mamba2, 2, 3, ((0.0, math.inf),))
RULES = {"gated_delta": DELTA, "mamba2": FREE, "mamba2 limited": FREE._replace(limits=(LIMITED,))}
#        P, U, dk, dv, W; the heads of Nemotron Nano v2 are of 128 and 80
BOTH = [(2, 4, 16, 32, 4), (2, 2, 48, 16, 2)]
CASES = [
    (name, shape)
    for name in RULES
    for shape in (*BOTH, (1, 1, 128, 128, 4) if name == "gated_delta" else (1, 2, 128, 80, 4))
]


def draw(*shape, dtype, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


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


@pytest.mark.parametrize(("name", "shape"), CASES)
@pytest.mark.parametrize(("dtype", "bound"), TYPES)
def test_gated_recurrences_and_their_gradients_match_a_reference_implementation(name, shape, dtype, bound):
    d_out = draw(TOKENS, shape[1] * shape[3], dtype=dtype, seed=6)
    RULES[name].compare(shape, RULES[name].inputs(shape, dtype), d_out, bound)


@pytest.mark.parametrize("rule", [DELTA, FREE], ids=["gated_delta", "mamba2"])
@pytest.mark.parametrize("rate", [-6.0, 3.0])
def test_recurrence_gradients_match_the_reference_for_slowly_and_quickly_decaying_states(rate, rule):
    """The decay is near 1 over all tokens, or the state is forgotten within a few tokens."""
    shape = BOTH[0]
    arguments, d_out = rule.inputs(shape, torch.float64), draw(TOKENS, 4 * 32, dtype=torch.float64, seed=6)
    arguments[rule.of_tokens].fill_(rate)
    for dtype, bound in TYPES[:2]:
        rule.compare(shape, [x.to(dtype) for x in arguments], d_out.to(dtype), bound)


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), TYPES)
def test_short_convolution_and_its_gradients_match_a_reference_implementation(dtype, bound, with_bias, silu):
    x, w, dy, *bias = (
        draw(*size, dtype=dtype, seed=i)
        for i, size in enumerate([(TOKENS, 80), (80, 4), (TOKENS, 80), *[(80,)] * with_bias])
    )
    compare(
        lambda x, w, bias=None: C.short_conv(x, w, FULL, bias=bias, silu=silu),
        lambda dy, x, w, bias=None: C.short_conv_backward(dy, x, w, FULL, bias, silu)[: 2 + with_bias],
        lambda x, w, bias=0.0: gated_delta.short_conv(x, w, SEQUENCES, bias, silu), [x, w, *bias], dy, bound,
    )  # fmt: skip


@pytest.mark.parametrize("groups", [0, 1, 3])
@pytest.mark.parametrize(("dtype", "bound"), TYPES)
def test_gated_rms_norm_and_its_gradients_match_a_reference_implementation(groups, dtype, bound):
    """With groups the norm follows the gate (Mamba-2); without groups each head is normalised first."""
    x, z, dy = (draw(TOKENS, 96, dtype=dtype, seed=i) for i in range(3))
    w, more = draw(96 if groups else 32, dtype=dtype, seed=4), (1e-6, groups) if groups else (1e-6,)
    slow = mamba2.gated_norm if groups else gated_delta.gated_norm
    compare(
        lambda *a: C.gated_norm(*a, *more), lambda *a: C.gated_norm_backward(*a, *more), lambda *a: slow(*a, *more), [x, z, w], dy, bound,
    )  # fmt: skip
    assert torch.equal(C.gated_norm(x[7:9], z[7:9], w, *more), C.gated_norm(x, z, w, *more)[7:9])


def in_chunks(rule, arguments, w, bias, shape, chunk):
    """Return convolution and recurrence of one sequence, computed with states, `chunk` tokens at a time."""
    P, U, dk, dv, W = shape
    mixed, gates, heads = arguments[0], arguments[1 : rule.of_tokens], arguments[rule.of_tokens :]
    state = torch.full((3, U, dk * dv), float("nan"))
    before = torch.full((3, W - 1, mixed.shape[1]), float("nan"), dtype=mixed.dtype)
    out = []
    for begin in range(0, len(mixed), chunk):
        piece = slice(begin, begin + chunk)
        sequences = [(0, len(mixed[piece]), -1, 1, begin > 0)]
        convolved = C.short_conv(mixed[piece].contiguous(), w, sequences, before, bias)
        out.append(rule.forward([convolved, *(gate[piece] for gate in gates), *heads], shape, sequences, state))
    assert state[[0, 2]].isnan().all() and before[[0, 2]].isnan().all()
    return torch.cat(out)


@pytest.mark.parametrize(("name", "shape"), [case for case in CASES if case[0] != "mamba2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recurrence_outputs_are_bit_identical_for_any_chunking_packing_and_number_of_threads(name, shape, dtype):
    rule, of_tokens = RULES[name], RULES[name].of_tokens
    arguments = rule.inputs(shape, dtype)
    w = draw(arguments[0].shape[1], shape[4], dtype=dtype, seed=7)
    bias = None if rule is DELTA else draw(len(w), dtype=dtype, seed=8)

    def compare_chunks():
        packed = rule.forward([C.short_conv(arguments[0], w, FULL, bias=bias), *arguments[1:]], shape)
        for index, (_, length, _) in enumerate(SEQUENCES):
            rows = gated_delta.rows_of(SEQUENCES, index)
            own = [*(x[rows] for x in arguments[:of_tokens]), *arguments[of_tokens:]]
            for chunk in (1, 2, 7, 64, 200):
                alone = in_chunks(rule, own, w, bias, shape, chunk)[-length:]
                assert torch.equal(alone, packed[rows[-length:]]), (index, chunk)
        return packed

    assert torch.equal(*on_threads(compare_chunks, (1, 2)))


@pytest.mark.parametrize("rule", [DELTA, FREE], ids=["gated_delta", "mamba2"])
def test_recurrence_gradients_are_bit_identical_for_any_number_of_threads_and_any_packing(rule):
    shape, count, rows = BOTH[0], rule.of_tokens, slice(82, 152)
    arguments, d_out = rule.inputs(shape, torch.float32), draw(TOKENS, 4 * 32, dtype=torch.float32, seed=6)
    results = on_threads(lambda: rule.backward(d_out, arguments, shape), (1, 2))
    assert all(torch.equal(x, y) for x, y in zip(*results))
    own = [*(x[rows].contiguous() for x in arguments[:count]), *arguments[count:]]
    alone = rule.backward(d_out[rows], own, shape, [(0, 70, -1, -1, False)])
    assert all(torch.equal(x, y[rows]) for x, y in zip(alone[:count], results[0][:count]))


@pytest.mark.parametrize("rule", [DELTA, FREE], ids=["gated_delta", "mamba2"])
def test_nan_in_one_packed_sequence_does_not_change_the_recurrent_state_of_the_next_sequence(rule):
    arguments = rule.inputs(BOTH[0], torch.float32)
    before = rule.forward(arguments, BOTH[0])
    arguments[0][:82] = float("nan")
    after = rule.forward(arguments, BOTH[0])
    assert torch.equal(before[82:], after[82:]) and after[:82].isnan().all()


@pytest.mark.parametrize("shape", [(2, 3, 16, 16, 4), (1, 1, 24, 16, 4), (1, 1, 16, 16, 9)])
def test_unsupported_gated_delta_net_shapes_raise_value_error(shape):
    with pytest.raises(ValueError, match="a recurrent layer with"):
        DELTA.forward(DELTA.inputs(shape, torch.float32, 3), shape, [(0, 3, -1, -1, False)])


@pytest.mark.parametrize("head_dim", [8, 16, 40])
@pytest.mark.parametrize(("dtype", "bound"), TYPES)
def test_per_head_output_gate_and_its_gradients_match_torch(head_dim, dtype, bound):
    x, dy = (draw(50, 3 * head_dim, dtype=dtype, seed=i) for i in range(2))
    gate = draw(50, 3, 2 * head_dim, dtype=dtype, seed=3)[..., head_dim:]
    formula = lambda a, g: a * g.reshape(50, -1).sigmoid()
    compare(C.head_gate, C.head_gate_backward, formula, [x, gate], dy, bound)
    assert torch.equal(C.head_gate(x[7:9].clone(), gate[7:9].clone()), C.head_gate(x, gate)[7:9])
