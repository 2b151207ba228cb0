"""Quantised weights match ggml and bitsandbytes, and products with them have the bits of products with the dequantised
matrix. Without bfloat16 instructions that matrix is float32. On AVX2 the codes of q8_0 and q4_0 are multiplied, and
each block's sum by its scale."""

import gguf
import numpy as np
import pytest
import torch
from block_matrices import SINGLE, blocks_of, dense, matrix_of
from nemo_rl_cpp._native import C
from reference import weight_blocks

GGML = ("q8_0", "q4_0")
FORMATS = (*GGML, "nf4")


def normal(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def from_rows(raw, columns, kind):
    matrix = C.zero_blocks(len(raw), columns, kind)
    C.write_block_rows(raw, matrix, columns)
    return matrix


def weights_of_every_kind():
    """Return rows of ordinary weights, zeros, ties, both signs of the largest weight, and scales that float16
    rounds."""
    w = normal(12, 96, seed=1, scale=0.05)
    w[1] = 0.0
    w[2], w[3] = torch.arange(96) % 16 - 8.0, -(torch.arange(96) % 16 - 8.0)
    w[4, 5], w[4, 6] = 1.0, -1.0
    w[5] *= 1e-5  # scales are subnormal in float16
    w[6] *= 1e-8  # and 0
    w[7] *= 1e5
    w[8] = (torch.arange(96) % 33 - 16) * 0.5
    w[9, ::2] = -0.0
    return w


@pytest.mark.parametrize("kind", GGML)
def test_weights_quantised_to_q8_0_and_q4_0_are_bit_identical_to_ggml(kind):
    w = weights_of_every_kind()
    ours = blocks_of(w, kind)
    theirs = gguf.quants.quantize(w.numpy(), gguf.GGMLQuantizationType[kind.upper()])
    assert np.array_equal(ours.numpy(), theirs)
    slow = b"".join(weight_blocks.encoded(row[k : k + 32].tolist(), kind) for row in w for k in range(0, 96, 32))
    assert ours.numpy().tobytes() == slow


@pytest.mark.parametrize("kind", FORMATS)
def test_bfloat16_and_equal_float32_weights_are_quantised_to_the_same_blocks(kind):
    w = normal(64, 128, seed=2, scale=0.1).bfloat16()
    assert torch.equal(blocks_of(w, kind), blocks_of(w.float(), kind))


def test_weights_quantised_to_nf4_match_a_reference_implementation():
    assert np.allclose(weight_blocks.NORMAL_FLOATS, weight_blocks.normal_floats(), atol=1e-6)
    w = weights_of_every_kind()
    slow = [weight_blocks.encoded_nf4(row[k : k + 32].tolist()) for row in w for k in range(0, 96, 32)]
    assert blocks_of(w, "nf4").numpy().tobytes() == b"".join(slow)
    assert not blocks_of(torch.full((1, 64), 2.0**-121), "nf4")[0, :4].any()  # smaller scales are 0


def test_dequantised_nf4_weights_match_a_reference_implementation():
    draw = np.random.default_rng(0)
    raw = draw.integers(0, 256, (4096, 20), dtype=np.uint8)
    scales = np.exp2(draw.uniform(-120, 120, len(raw))).astype(np.float32)
    scales[:3] = 0.0, np.finfo(np.float32).max, 2.0**-120
    raw[:, :4] = scales.view(np.uint8).reshape(-1, 4)
    matrix = from_rows(torch.from_numpy(raw), 32, "nf4")
    ours = dense(matrix, 32)
    assert ours.tolist() == [weight_blocks.decoded(row.tobytes(), "nf4") for row in raw]
    assert torch.equal(dense(matrix, 32, torch.bfloat16), ours.bfloat16())


def blocks_of_every_scale(kind):
    """Return a block for every finite float16 scale, with random codes."""
    size, scales = weight_blocks.BYTES[kind], np.arange(1 << 16, dtype=np.uint16)
    scales = scales[(scales & 0x7C00) != 0x7C00]
    raw = np.zeros((len(scales), size), dtype=np.uint8)
    raw[:, :2] = scales.view(np.uint8).reshape(-1, 2)
    raw[:, 2:] = np.random.default_rng(0).integers(0, 256, (len(scales), size - 2), dtype=np.uint8)
    return raw


@pytest.mark.parametrize("kind", GGML)
def test_dequantised_weights_of_every_format_match_reference_decoders(kind):
    raw = blocks_of_every_scale(kind)
    matrix = from_rows(torch.from_numpy(raw), 32, kind)
    ours = dense(matrix, 32)
    assert np.array_equal(ours.numpy(), gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind.upper()]))
    assert torch.equal(dense(matrix, 32, torch.bfloat16), ours.bfloat16())
    for row in range(0, len(raw), 997):
        assert ours[row].tolist() == weight_blocks.decoded(raw[row].tobytes(), kind)


@pytest.mark.parametrize("kind", GGML)
@pytest.mark.parametrize("rows", [1, 8])
def test_products_of_unit_vectors_with_quantised_weights_equal_the_dequantised_weights(kind, rows):
    blocks = from_rows(torch.from_numpy(blocks_of_every_scale(kind)), 32, kind)
    w = dense(blocks, 32, torch.float32 if SINGLE else torch.bfloat16).float()
    for x in torch.eye(32, dtype=torch.bfloat16).split(rows):
        y = torch.empty(rows, len(blocks))
        C.linear_forward(x, blocks, None, y, False)
        assert torch.equal(y, x.float() @ w.T)


PRODUCTS = """
import itertools
import torch
from nemo_rl_cpp._native import C

def matrix_of(w, kind):
    matrix = C.zero_blocks(*w.shape, kind)
    C.pack_blocks(w, matrix)
    return matrix

def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

def bits(t):
    return t.view(torch.int16 if t.dtype == torch.bfloat16 else torch.int32)

def same(a, b, *where):
    assert torch.equal(bits(a), bits(b)), where

SINGLE = C.cpu_capability() in ("base", "avx2", "avx512")
CODES = C.cpu_capability() == "avx2"

class Codes:  # w in q8_0 or q4_0 where its codes are multiplied
    dtype = torch.float32
    def __init__(self, blocks, kind):
        self.blocks, self.kind = blocks, kind
        self.zero, bits = (128, 8) if kind == "q8_0" else (8, 4)
        at = [(run, place) for run in range(bits) for place in range(32 // bits)]
        if kind == "q8_0":
            order = [run // 2 * 8 + run % 2 + 2 * place for run, place in at]
        else:
            order = [4 * run + (0, 2, 1, 3)[place // 2] + place % 2 * 16 for run, place in at]
        self.order = torch.tensor(order)
        self.places = torch.tensor([2.0 ** (bits * (place % (32 // bits - 1))) for _, place in at])

    def words(self, x):  # [M, blocks, 33] by csrc/kernels/cpu/block_codes.h: -zero times the sum of a block, then its terms
        x = x.float().view(len(x), -1, 8, 4)
        lanes = torch.zeros_like(x[:, :, 0])
        for i in range(4):
            lanes = lanes + (x[:, :, i] + x[:, :, i + 4])
        sums = -self.zero * ((lanes[..., 0] + lanes[..., 2]) + (lanes[..., 1] + lanes[..., 3]))
        return torch.cat([sums[..., None], x.flatten(2)[..., self.order] / self.places], 2)

    def times(self, x, n):  # x[M, K] times n rows: a chain of multiply-adds in each block, and one over the blocks
        raw = C.read_block_rows(self.blocks, x.shape[1], 0, n).view(n, x.shape[1] // 32, -1)
        scales, codes = raw[..., :2].contiguous().view(torch.float16)[..., 0].double(), raw[..., 2:]
        codes = codes ^ 128 if self.kind == "q8_0" else torch.cat([codes & 15, codes >> 4], 2)
        codes, words, total = codes[..., self.order].float() * self.places, self.words(x), torch.zeros(len(x), n)
        for b in range(raw.shape[1]):
            y = torch.empty(len(x), n)
            C.linear_forward(words[:, b].contiguous(), torch.cat([torch.ones(n, 1), codes[:, b]], 1), None, y, False)
            total = (y.double() * scales[:, b] + total.double()).float()
        return total

def forward(x, w, n, bias, dtype, add_to):
    if isinstance(w, Codes):
        y = w.times(x, n) + (0 if bias is None else bias.float())
        return (y if add_to is None else y + add_to).to(dtype)
    if w.dtype == torch.float32 and x.dtype == torch.bfloat16:
        return forward(x.float(), w, n, bias if bias is None else bias.float(), torch.float32, add_to).to(dtype)
    y = torch.full((len(x), n), float("nan"), dtype=dtype) if add_to is None else add_to.clone()
    C.linear_forward(x, w, bias, y, add_to is not None)
    return y

def gated(x, w, i, bias, keep, activation):
    gate_up, act = torch.empty(len(x), 2 * i, dtype=x.dtype), torch.empty(len(x), i, dtype=x.dtype)
    if w.dtype == torch.float32 and x.dtype == torch.bfloat16:
        C.swiglu_forward(gate_up.copy_(forward(x, w, 2 * i, bias, x.dtype, None)), act, activation)
    else:
        C.linear_swiglu(x, w, bias, gate_up if keep else None, act, activation=activation)
    return torch.cat([gate_up, act], 1) if keep else act

def backward(dy, w, k, dtype, add_to):
    dx = torch.full((len(dy), k), float("nan"), dtype=dtype) if add_to is None else add_to.clone()
    C.linear_backward_input(dy, w, dx, add_to is not None)
    return dx

def check(MOST, ROWS, THREADS, SHAPES):
    for kind, dtype, (N, K) in itertools.product(("q8_0", "q4_0", "nf4"), (torch.bfloat16, torch.float32), SHAPES):
        x, dy = normal(MOST, K, seed=0).to(dtype), normal(MOST, N, seed=4).to(dtype)
        blocks = matrix_of(normal(N, K, seed=1) * 0.1, kind)
        w, bias, h = torch.empty(N, K, dtype=dtype), normal(N, seed=2).to(dtype), normal(MOST, max(N, K), seed=3)
        C.unpack_blocks(blocks, w)
        of_backward, whole = w, None
        if SINGLE:
            w = torch.empty(N, K)
            C.unpack_blocks(blocks, w)
            w = Codes(blocks, kind) if CODES and kind != "nf4" and dtype == torch.bfloat16 else w
        for rows in ROWS:
            for threads in THREADS:
                torch.set_num_threads(threads)
                where = kind, dtype, N, K, rows, threads
                a = x[:rows]
                y = forward(a, blocks, N, None, dtype, None)
                same(y, forward(a, w, N, None, dtype, None), *where)
                if whole is not None:
                    same(y, whole[:rows], "rows", *where)
                same(forward(a, blocks, N, bias, torch.float32, h[:rows, :N]), forward(a, w, N, bias, torch.float32, h[:rows, :N]), *where)
                for how in ((True, "silu"), (False, "silu"), (False, "gelu_tanh")):
                    same(gated(a, blocks, N // 2, bias, *how), gated(a, w, N // 2, bias, *how), "gated", *where)
                for out in (dtype, torch.float32):
                    same(backward(dy[:rows], blocks, K, out, None), backward(dy[:rows], of_backward, K, out, None), "backward", *where)
                same(backward(dy[:rows], blocks, K, torch.float32, h[:rows, :K]), backward(dy[:rows], of_backward, K, torch.float32, h[:rows, :K]), *where)
            whole = y if rows == MOST else whole
"""
SHAPES = "check({0}, ({0}, 1, 2, 7, 9, 16, 65), (1, 2), ((146, 96), (96, 2048), (1100, 64)))\n"


@pytest.mark.parametrize("kind", GGML)
def test_sums_of_codes_are_as_near_to_float64_as_products_with_dequantised_weights(kind):
    """x has a large mean and outliers, multiples of which the sums of codes subtract. With bfloat16 instructions
    dequantised weights are rounded."""
    w, x = normal(256, 4096, seed=11, scale=0.05), (normal(12, 4096, seed=12) + 2).bfloat16()
    x[:, ::512] *= 300
    blocks = matrix_of(w, kind)
    weights, y, plain = dense(blocks, 4096), torch.empty(12, 256), torch.empty(12, 256)
    weights = weights if SINGLE else weights.bfloat16().float()
    C.linear_forward(x, blocks, None, y, False)
    C.linear_forward(x.float(), weights, None, plain, False)
    exact = x.double() @ weights.double().T
    assert (y - exact).norm() < max(1.5 * (plain - exact).norm(), 1e-6 * exact.norm())


def test_products_with_quantised_and_dequantised_matrices_are_bit_identical_on_the_current_cpu():
    exec(compile(PRODUCTS + SHAPES.format(70), "products", "exec"), {})  # noqa: S102


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("rows", [1, 5, 12])
def test_underflow_and_overflow_in_products_are_equal_for_quantised_and_dequantised_weights(kind, rows):
    """Weights are zero with both signs of the scale, products are below the smallest number, and scales are
    infinite."""
    w = normal(70, 128, seed=8)
    w[3], w[4], w[20:25, ::2] = 0.0, 1e-8, 0.0
    if kind != "nf4":
        w[50] = 1e7  # its scale is infinite in float16 (q4_0), or nearly
    blocks = matrix_of(w, kind)
    x = normal(rows, 128, seed=9).bfloat16()
    x[0] *= 2.0**-125
    x[-1, 7] = 0.0 if rows == 1 else float("inf")
    if rows > 5:
        x[2], x[3], x[4, 1:] = 0.0, -(2.0**-126), 0.0
    y, expected = torch.empty(rows, 70), torch.empty(rows, 70)
    C.linear_forward(x, blocks, None, y, False)
    if C.cpu_capability() == "avx2" and kind != "nf4":  # sums of codes are not finite where a factor is not
        space = {}
        exec(PRODUCTS, space)  # noqa: S102
        expected = space["Codes"](blocks, kind).times(x, 70)
        assert torch.equal(y.isfinite(), expected.isfinite()) and not y.isfinite().all()
        y, expected = y.nan_to_num(), expected.nan_to_num()
    else:
        dtype = torch.float32 if SINGLE else torch.bfloat16
        C.linear_forward(x.to(dtype), dense(blocks, 128, dtype), None, expected, False)
    assert torch.equal(y.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("kind", FORMATS)
def test_quantised_matrix_written_in_parts_equals_a_matrix_written_at_once(kind):
    """The parts begin and end within tiles of 16 rows."""
    w, parts = normal(75, 96, seed=10), C.zero_blocks(75, 96, kind)
    whole, first = blocks_of(w, kind), 0
    for part in w.split((7, 30, 3, 35)):
        C.pack_blocks(part, parts, first)
        assert torch.equal(C.read_block_rows(parts, 96, first, len(part)), whole[first : first + len(part)])
        rows = torch.empty_like(part)
        C.unpack_blocks(parts, rows, first)
        assert torch.equal(rows, dense(matrix_of(w, kind), 96)[first : first + len(part)])
        first += len(part)
    assert torch.equal(C.read_block_rows(parts, 96, 0, 75), whole)


def test_unsupported_quantisation_formats_and_shapes_are_errors():
    with pytest.raises(ValueError, match="q8_0, q4_0 or nf4, not q5_1"):
        C.block_bytes("q5_1")
    with pytest.raises(ValueError, match="a matrix of 32 columns in blocks"):
        dense(torch.zeros(2, 35, dtype=torch.uint8), 32)
    with pytest.raises(ValueError, match="a matrix of 16 columns in blocks"):
        dense(torch.zeros(2, 17, dtype=torch.uint8), 16)
    with pytest.raises(ValueError, match="in whole tiles of 16 rows, which take 544 bytes, not 68: .* zero_blocks"):
        dense(torch.zeros(2, 34, dtype=torch.uint8), 32)
    blocks = C.zero_blocks(2, 32, "q8_0")
    with pytest.raises(ValueError, match="rows from 1 on of blocks"):
        C.pack_blocks(torch.zeros(2, 32), blocks, 1)
    with pytest.raises(ValueError, match="float32 or bfloat16, not in Double"):
        C.linear_forward(torch.zeros(1, 32).double(), blocks, None, torch.zeros(1, 2).double())


def test_nf4_quantisation_error_is_smaller_than_the_error_of_bitsandbytes():
    """There 64 weights have the scale that the largest gives."""
    w, levels = normal(64, 256, seed=3), torch.tensor(weight_blocks.NORMAL_FLOATS)
    groups = w.view(-1, 64, 1)
    scale = groups.abs().amax(1, keepdim=True)
    theirs = levels[(groups / scale - levels).abs().argmin(2)] * scale[..., 0]
    ours = dense(matrix_of(w, "nf4"), 256)
    assert (ours - w).norm() < 0.85 * (theirs.view(w.shape) - w).norm()
