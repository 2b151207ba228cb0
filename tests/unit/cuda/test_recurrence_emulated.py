import math

import pytest
import torch
from cuda_emulation.tensors import close, randn, table
from nemo_rl_cpp._native import C

F32, BF16 = torch.float32, torch.bfloat16
# float32: sums of at most 64 terms in another order, over at most 70 tokens. bfloat16: results are rounded to 8 bits.
BOUND = {F32: 2e-5, BF16: 2**-7}
NONE = -1
# (start, length, parent, slot, continues): a prompt of 37 tokens that two continue, and a text of more than two chunks
SHARED = [(0, 37, NONE, NONE, 0), (37, 5, 0, NONE, 0), (42, 1, 0, NONE, 0), (43, 70, NONE, NONE, 0)]
ROWS = 113
# P, U, dk, dv
SHAPES = [(1, 2, 16, 48), (2, 2, 48, 16)]


def before_rows(sequences, rows, W):
    """Where the W - 1 inputs before each row lie: rows of x, -1 for none, -2 - i for row i of the states."""
    before = torch.full((rows, W - 1), -1)
    for start, length, parent, slot, continues in sequences:
        for t in range(length):
            for i in range(W - 1):
                token = t - (W - 1) + i
                if token >= 0:
                    before[start + t, i] = start + token
                elif parent != NONE and sequences[parent][1] + token >= 0:
                    before[start + t, i] = sequences[parent][0] + sequences[parent][1] + token
                elif continues:
                    before[start + t, i] = -2 - (slot * (W - 1) + W - 1 + token)
    return before


def readers_of(before):
    """(first [rows + 1], readers): the taps t · W + i that read each row."""
    rows, W = len(before), before.shape[1] + 1
    of = [[] for _ in range(rows)]
    for t in range(rows):
        for i, row in enumerate(before[t].tolist()):
            if row >= 0:
                of[row].append(t * W + i)
        of[t].append(t * W + W - 1)
    return table([0, *(sum(map(len, of[: r + 1])) for r in range(rows))]), table(sum(of, []))


def conv(kernels, x, w, bias, sequences, state=None, silu=True):
    y, (channels, W) = torch.empty_like(x), w.shape
    before = before_rows(sequences, len(x), W)
    all_sequences = table(sequences)
    kernels.short_conv_forward(
        x, len(x), channels, W, before, w, bias, state, y, all_sequences, len(sequences), silu, x.dtype == BF16
    )
    return y


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("has_bias, silu", [(False, True), (True, True), (False, False)])
def test_emulated_cuda_short_convolution_and_its_gradient_match_the_cpu_kernel(kernels, has_bias, silu, dtype):
    channels, W = 48, 4
    x, w, dy = randn(ROWS, channels, dtype=dtype), randn(channels, W, seed=1, dtype=dtype), randn(ROWS, channels, seed=2, dtype=dtype)  # fmt: skip
    bias = randn(channels, seed=3, dtype=dtype) if has_bias else None
    ours = conv(kernels, x, w, bias, SHARED, silu=silu)
    close(ours, C.short_conv(x, w, SHARED, bias=bias, silu=silu), BOUND[dtype])
    before = before_rows(SHARED, ROWS, W)
    first, readers = readers_of(before)
    dx, dw, d_bias = torch.full_like(x, math.nan), torch.ones(channels, W), torch.ones(channels)
    du, parts = torch.empty(ROWS, channels), torch.empty(2, channels * W)
    kernels.short_conv_backward(
        dy, x, ROWS, channels, W, before, first, readers, w, bias, dx, dw, d_bias if has_bias else None, du, parts,
        silu, dtype == BF16,
    )  # fmt: skip
    expected = C.short_conv_backward(dy, x, w, SHARED, bias, silu)
    close(dx, expected[0], BOUND[dtype])
    close(dw - 1, expected[1], BOUND[F32])
    if has_bias:
        close(d_bias - 1, expected[2], BOUND[F32])


@pytest.mark.parametrize("chunks", [[13], [1] * 13, [2, 7, 1, 3]], ids=str)
def test_emulated_cuda_short_convolution_is_bit_identical_in_chunks_and_over_the_whole_sequence(kernels, chunks):
    x, w, done = randn(13, 32), randn(32, 4, seed=1), 0
    whole, state = conv(kernels, x, w, None, [(0, 13, NONE, NONE, 0)]), torch.full((3, 3, 32), math.nan)
    for n in chunks:
        part = conv(kernels, x[done : done + n].contiguous(), w, None, [(0, n, NONE, 2, int(done > 0))], state)
        assert torch.equal(part, whole[done : done + n]), done
        done += n
    assert torch.equal(state[2], x[-3:])


def families_of(sequences):
    """(CudaFamily of each root, the children of all)."""
    children, families = [], []
    for i, s in enumerate(sequences):
        if s[2] == NONE:
            mine = [j for j, other in enumerate(sequences) if other[2] == i]
            families.append([i, len(children), len(children) + len(mine)])
            children += mine
    return table(families), table([*children, 0]), len(families)


class Inputs:
    """Random inputs of a recurrence over `rows` tokens."""

    def __init__(self, shape, rows, mamba2, dtype):
        P, U, dk, dv = shape
        self.shape, self.rows, self.mamba2, self.dtype, self.limits = shape, rows, mamba2, dtype, (0.05, 1.5)
        self.sizes = table([*shape, int(mamba2)])
        self.qkv = randn(rows, 2 * P * dk + U * dv, dtype=dtype) * (0.3 if mamba2 else 1)
        self.b, self.a = (None if mamba2 else randn(rows, U, seed=1, dtype=dtype)), randn(rows, U, seed=2, dtype=dtype)
        self.A_log, self.dt_bias = 0.3 * randn(U, seed=3, dtype=dtype), randn(U, seed=4, dtype=dtype)
        self.D = randn(U, seed=5, dtype=dtype) if mamba2 else None

    def part(self, begin, end):
        other = Inputs(self.shape, 1, self.mamba2, self.dtype)
        other.rows = end - begin
        for name in ("qkv", "b", "a"):
            whole = getattr(self, name)
            setattr(other, name, None if whole is None else whole[begin:end].contiguous())
        return other

    def arguments(self, sequences):
        families, children, count = families_of(sequences)
        self.held = table(sequences), families, children  # until the call is over
        return self.sizes, *self.limits, *self.held, count, self.qkv, self.b, self.a, self.A_log, self.dt_bias, self.D

    def forward(self, kernels, sequences, slots=None):
        out = torch.full((self.rows, self.shape[1] * self.shape[3]), math.nan, dtype=self.dtype)
        kernels.recurrence_forward(*self.arguments(sequences), slots, out, self.dtype == BF16)
        return out

    def on_cpu(self, d_out, sequences):
        """(out, gradients of qkv, b, a, A_log, dt_bias, D) of the CPU's ops; without b or D where there is none."""
        shape = (*self.shape, 1)
        if self.mamba2:
            inputs = self.qkv, self.a, self.A_log, self.dt_bias, self.D, sequences, shape, self.limits
            return C.mamba2(*inputs), C.mamba2_backward(d_out, *inputs)
        inputs = self.qkv, self.b, self.a, self.A_log, self.dt_bias, sequences, shape
        return C.gated_delta(*inputs), C.gated_delta_backward(d_out, *inputs)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mamba2", [False, True])
def test_emulated_cuda_gated_recurrences_and_their_gradients_match_the_cpu_kernel(kernels, mamba2, shape, dtype):
    """With fewer thread blocks than heads of families; three chunks of 32 tokens; limits of the time step that hold some back."""
    P, U, dk, dv = shape
    inputs, bf16 = Inputs(shape, ROWS, mamba2, dtype), dtype == BF16
    d_out = randn(ROWS, U * dv, seed=6, dtype=dtype)
    expected, gradients = inputs.on_cpu(d_out, SHARED)
    close(inputs.forward(kernels, SHARED), expected, BOUND[dtype])
    d_qkv, d_a = torch.full_like(inputs.qkv, math.nan), torch.full_like(inputs.a, math.nan)
    d_b = None if mamba2 else torch.full_like(inputs.b, math.nan)
    shares, blocks = torch.full((3, ROWS, U), math.nan), 3
    states = torch.full((blocks * kernels.recurrence_state_size(inputs.sizes, 70),), math.nan)
    d_keys, d_gates = torch.full((2, ROWS, U, dk), math.nan), torch.full((ROWS, U, 3), math.nan)
    kernels.recurrence_backward(*inputs.arguments(SHARED), d_out, d_qkv, d_b, d_a, shares, states, 70, blocks, d_keys, d_gates, ROWS, bf16)  # fmt: skip
    sums = shares.sum(1)
    got = (d_qkv, d_a, *sums) if mamba2 else (d_qkv, d_b, d_a, *sums[:2])
    for ours, theirs in zip(got, gradients, strict=True):
        close(ours, theirs, 2 * BOUND[dtype] if ours.dim() == 2 else 10 * BOUND[F32])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("mamba2", [False, True])
@pytest.mark.parametrize("chunks", [[21], [1] * 21, [2, 9, 1, 9]], ids=str)
def test_emulated_cuda_gated_recurrences_are_bit_identical_in_chunks_and_in_any_batch(kernels, chunks, mamba2, dtype):
    shape = SHAPES[0]
    inputs, done = Inputs(shape, 21, mamba2, dtype), 0
    whole = inputs.forward(kernels, [(0, 21, NONE, NONE, 0)])
    slots = torch.full((2, shape[1], shape[2] * shape[3]), math.nan)
    for n in chunks:
        part = inputs.part(done, done + n).forward(kernels, [(0, n, NONE, 1, int(done > 0))], slots)
        assert torch.equal(part, whole[done : done + n]), done
        done += n
    shared = inputs.forward(kernels, [(0, 8, NONE, NONE, 0), (8, 13, 0, NONE, 0)])
    assert torch.equal(shared, whole)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("heads, D, groups", [(3, 48, 0), (2, 64, 2)])
def test_emulated_cuda_gated_rms_norm_and_its_gradient_match_the_cpu_kernel(kernels, heads, D, groups, dtype):
    rows, bf16 = 9, dtype == BF16
    x, z, dy = (randn(rows, heads * D, seed=i, dtype=dtype) for i in range(3))
    w = randn(heads * D if groups else D, seed=3, dtype=dtype)
    size, y = (rows, heads, D, int(groups > 0)), torch.empty_like(x)
    kernels.gated_norm_forward(x, z, w, *size, y, bf16)
    close(y, C.gated_norm(x, z, w, 1e-6, groups), BOUND[dtype])
    expected = C.gated_norm_backward(dy, x, z, w, 1e-6, groups)
    dx, dz, shares = dy.clone(), torch.empty_like(x), torch.empty(rows, heads * D)  # dx in the place of dy
    kernels.gated_norm_backward(dx, x, z, w, *size, dx, dz, shares, bf16)
    close(dx, expected[0], BOUND[dtype])
    close(dz, expected[1], BOUND[dtype])
    close(shares.view(-1, len(w)).sum(0), expected[2], BOUND[F32])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_emulated_cuda_attention_head_gate_and_its_gradient_match_the_cpu_kernel(kernels, dtype):
    rows, heads, D = 9, 3, 24
    x, dy, g = randn(rows, heads * D, dtype=dtype), randn(rows, heads * D, seed=1, dtype=dtype), randn(rows, heads, 2, D, seed=2, dtype=dtype)  # fmt: skip
    y, dx, dg = torch.empty_like(x), dy.clone(), torch.zeros_like(g)
    kernels.head_gate(dx, x, g, rows, heads, D, y, dx, dg, dtype == BF16)
    gate = g[:, :, 1]
    close(y, C.head_gate(x, gate), BOUND[dtype])
    expected_x, expected_g = C.head_gate_backward(dy, x, gate)
    close(dx, expected_x, BOUND[dtype])
    close(dg[:, :, 1], expected_g, BOUND[dtype])
    assert not dg[:, :, 0].any()
