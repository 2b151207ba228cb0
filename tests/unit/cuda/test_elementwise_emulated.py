import math
from functools import partial

import pytest
import torch
from block_matrices import dense, matrix_of
from cuda_emulation.tensors import close, randn, table
from nemo_rl_cpp._native import C
from nemo_rl_cpp.models.hf_config import native_config
from reference import optimizer_state

F32, BF16 = torch.float32, torch.bfloat16
# float32: sums of at most 2,049 terms in a tree. bfloat16: the result's rounding, at most 2^-9 of each number.
BOUND = {F32: 1e-6, BF16: 2**-8}


def parts(rows, columns):
    return torch.full((math.ceil(rows / 64), columns), math.nan)


@pytest.mark.parametrize("x_dtype, w_dtype", [(F32, F32), (F32, BF16), (BF16, BF16)], ids=str)
@pytest.mark.parametrize(
    "D, inner, offset", [(40, 1, 0.0), (128, 3, 1.0), (513, 1, 1.0), (896, 1, 0.0), (2049, 1, 0.0)], ids=str
)
def test_emulated_cuda_rms_norm_and_its_gradient_match_autograd(kernels, D, inner, offset, x_dtype, w_dtype):
    """A warp a row up to 512 entries, a block a row above; sizes that vectors divide and others; groups in more than one part."""
    groups = 70 if D < 200 else 3
    types, size = (x_dtype == BF16, w_dtype == BF16), (inner, D, groups)
    x, w = randn(groups, inner, D, dtype=x_dtype), randn(D, seed=1, dtype=w_dtype)
    y, rstd = torch.zeros_like(x, dtype=w_dtype), torch.zeros(groups, inner)
    kernels.rms_norm_forward(x, w, offset, y, rstd, *size, *types)
    leaf_x, leaf_w = x.double().requires_grad_(), w.double().requires_grad_()
    expected = leaf_x * torch.rsqrt((leaf_x**2).mean(-1, keepdim=True) + 1e-6) * (offset + leaf_w)
    close(y, expected.detach(), BOUND[w_dtype])
    dy = randn(groups, inner, D, seed=2, dtype=x_dtype)
    (expected * dy.double()).sum().backward()
    for accumulate in (0, 1):
        dx, dw = torch.ones_like(x), torch.ones(D)
        kernels.rms_norm_backward(dy, x, w, offset, rstd, dx, accumulate, *size, parts(groups, D), dw, *types)
        close(dx, leaf_x.grad + accumulate, 2 * BOUND[x_dtype])
        close(dw - 1, leaf_w.grad, 1e-6)  # float32 in all types
    dx = dy.clone()
    kernels.rms_norm_backward(dx, x, w, offset, rstd, dx, 0, *size, parts(groups, D), torch.ones(D), *types)  # in place
    close(dx, leaf_x.grad, 2 * BOUND[x_dtype])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("H, R", [(16, 16), (24, 24), (128, 128), (128, 96), (24, 12)])
@pytest.mark.parametrize("interleaved", [0, 1])
def test_emulated_cuda_rope_matches_the_formula_and_its_backward_is_the_inverse(kernels, interleaved, H, R, dtype):
    """The first R dimensions of each head, those i and i + R / 2 or 2 i and 2 i + 1 as pairs."""
    T, heads = 9, 3
    x, positions, angles = randn(T, heads * H + 8, dtype=dtype), table(range(3, 3 + T)), randn(20, R // 2)
    got, cos, sin = x.clone(), angles.cos(), angles.sin()
    kernels.rope(got, x.stride(0), positions, cos, sin, heads, H, R, 0, interleaved, T, dtype == BF16)
    whole = x[:, : heads * H].double().view(T, heads, H)
    a, b = whole[..., :R].unflatten(-1, (R // 2, 2) if interleaved else (2, R // 2)).unbind(-1 if interleaved else 2)
    c, s = cos[positions][:, None], sin[positions][:, None]
    pairs = torch.stack([a * c - b * s, b * c + a * s], -1 if interleaved else 2).flatten(2)
    turned = torch.cat([pairs, whole[..., R:]], -1)
    close(got[:, : heads * H], turned.reshape(T, -1), BOUND[dtype])
    kernels.rope(got, x.stride(0), positions, cos, sin, heads, H, R, 1, interleaved, T, dtype == BF16)
    close(got, x, 2 * BOUND[dtype])
    assert torch.equal(got[:, heads * H :], x[:, heads * H :])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("size", [56, 37])
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh", "clamped"])
def test_emulated_cuda_swiglu_and_its_gradient_match_autograd(kernels, gate, size, dtype):
    """Some gates and ups are beyond the limits of the clamped activation."""
    gate_up, d_act = 5 * randn(5, 2 * size, dtype=dtype), randn(5, size, seed=1, dtype=dtype)
    gate_up[gate_up.abs() == 7] = 8  # at a limit itself torch's gradient is another
    act = torch.zeros(5, size, dtype=dtype)
    kind = ["silu", "gelu_tanh", "clamped"].index(gate)
    kernels.swiglu_forward(gate_up, act, size, 5, kind, dtype == BF16)
    leaf = gate_up.double().requires_grad_()
    x, up = leaf[:, :size], leaf[:, size:]
    if gate == "clamped":
        x, up = x.clamp(max=7), 1 + up.clamp(-7, 7)
        expected = x * torch.sigmoid(1.702 * x) * up
    else:
        f = torch.nn.functional.silu if gate == "silu" else partial(torch.nn.functional.gelu, approximate="tanh")
        expected = f(x) * up
    close(act, expected.detach(), BOUND[dtype])
    expected.backward(d_act.double())
    kernels.swiglu_backward(d_act, gate_up, gate_up, size, 5, kind, dtype == BF16)  # in place
    close(gate_up, leaf.grad, BOUND[dtype])


@pytest.mark.parametrize("bias_dtype, y_dtype", [(F32, F32), (BF16, F32), (BF16, BF16)], ids=str)
def test_emulated_cuda_bias_addition_rounds_each_element_only_once(kernels, bias_dtype, y_dtype):
    bias, y = randn(37, dtype=bias_dtype), randn(11, 40, seed=1, dtype=y_dtype)
    for accumulate in (0, 1):
        got = y.clone()
        kernels.bias_rows(bias, got, 40, 11, 37, accumulate, bias_dtype == BF16, y_dtype == BF16)
        expected = y.clone()
        expected[:, :37] = bias.float() + accumulate * y[:, :37].float()
        assert torch.equal(got, expected)  # one addition


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("D", [40, 21])
def test_emulated_cuda_embedding_returns_the_weight_rows_of_the_token_ids(kernels, D, dtype):
    rows, ids, h = randn(7, D, dtype=dtype), table([4, 1, 4, 0]), torch.zeros(4, D)
    kernels.embedding_forward(rows, ids, h, 4, D, dtype == BF16)
    assert torch.equal(h, rows[ids].float())


KINDS = ("q8_0", "q4_0", "nf4")


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_emulated_cuda_unpacking_of_blocks_has_the_bits_of_the_cpu(kernels, kind, dtype):
    """Parts that begin and end within a tile of 16 rows; more blocks of a row than one block of threads takes."""
    N, K = 37, 18 * 32
    matrix = matrix_of(randn(N, K), kind)
    expected = dense(matrix, K, dtype)
    for first, rows in [(0, N), (16, 21), (5, 1), (3, 30)]:
        got = torch.full((rows, K + 8), math.nan, dtype=dtype)
        kernels.unpack_blocks(KINDS.index(kind), matrix, first, rows, K, got, K + 8, dtype == BF16)
        assert torch.equal(got[:, :K], expected[first : first + rows])
        assert got[:, K:].isnan().all()
    ids, h = table([36, 0, 17, 36]), torch.zeros(4, K)
    kernels.embedding_blocks(KINDS.index(kind), matrix, ids, h, 4, K, dtype == BF16)
    assert torch.equal(h, expected[ids].float())


@pytest.mark.parametrize("kind", ("q8_0", "q4_0"))
def test_emulated_cuda_unpacking_reads_every_float16_scale(kernels, kind):
    """All 65,536 scales, subnormal and infinite ones and NaN among them."""
    scales = torch.arange(65536, dtype=torch.int32).to(torch.int16)[:, None].contiguous().view(torch.uint8)
    codes = torch.randint(
        0, 256, (65536, {"q8_0": 32, "q4_0": 16}[kind]), generator=torch.Generator().manual_seed(1), dtype=torch.uint8
    )
    matrix = C.zero_blocks(65536, 32, kind)
    C.write_block_rows(torch.cat([scales, codes], 1), matrix, 32)
    got = torch.empty(65536, 32)
    kernels.unpack_blocks(KINDS.index(kind), matrix, 0, 65536, 32, got, 32, 0)
    assert torch.equal(got.nan_to_num(1.5), dense(matrix, 32).nan_to_num(1.5))


@pytest.mark.parametrize("D", [40, 21, 1100])
def test_emulated_cuda_embedding_gradient_is_summed_over_equal_tokens(kernels, D):
    ids, dh, got = table([4, 1, 4, 4, 0, 1]), randn(6, D), torch.ones(7, D)
    kernels.embedding_backward(dh, table([0, 1, 4]), table([0, 1, 3, 6]), table([4, 1, 5, 0, 2, 3]), got, 3, D)
    assert torch.equal(got, torch.ones(7, D).index_add(0, ids, dh))  # the same order of additions


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("rows", [1, 64, 150, 1300])
def test_emulated_cuda_column_sums_match_float64_up_to_rounding(kernels, rows, dtype):
    x, got = randn(rows, 80, dtype=dtype), torch.ones(70)
    kernels.column_sums(x, 80, rows, 70, parts(rows, 70), got, dtype == BF16)
    close(got - 1, x[:, :70].double().sum(0), 1e-5)  # the one that is there costs digits of small sums


@pytest.mark.parametrize("n", [0, 5, 16384, 40001])
def test_emulated_cuda_sums_of_squares_of_blocks_match_a_float64_reference(kernels, n):
    x, block = randn(n), 16384
    out = torch.full((-(-n // block),), math.nan, dtype=torch.float64)
    kernels.block_squares(x, n, block, out)
    wanted = [float((part.double() ** 2).sum()) for part in x.split(block) if n]
    assert out.tolist() == pytest.approx(wanted, rel=1e-13)  # float64 in another order


@pytest.mark.parametrize("moments", [torch.float32, BF16, torch.uint8], ids=str)
@pytest.mark.parametrize("with_copy", [False, True])
def test_emulated_cuda_adamw_step_matches_the_cpu_kernel(kernels, with_copy, moments):
    n = 1003
    state = [randn(n, seed=i) for i in range(3)] + [randn(n, seed=3).abs(), torch.zeros(n, dtype=BF16)]
    state[2:4] = [
        torch.zeros(n, dtype=moments) if moments == torch.uint8 else moment.to(moments) for moment in state[2:4]
    ]
    if not with_copy:
        state[4] = None
    cpu, got = ([t if t is None else t.clone() for t in state] for _ in range(2))
    for step in (1, 2, 3):
        C.adamw_step(*cpu, lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=step)
        kernels.adamw(*got, 1e-2, 0.9, 0.99, 1e-8, 0.1, step, n, moments.itemsize, None)
    if moments == torch.uint8:  # codes; a drawn one may differ by one
        assert all(float((got[i] != cpu[i]).float().mean()) < 0.01 for i in (2, 3))
        got[2:4] = cpu[2:4]
    for a, b in zip(got[:4], cpu[:4], strict=True):
        # either side may fuse a multiplication with an addition, which may turn a draw
        close(a.float(), b.float(), 1e-6 if a.dtype == torch.float32 and moments == torch.float32 else 1e-2)
    if with_copy:
        assert torch.equal(got[4], got[0].to(BF16))


def test_emulated_cuda_adamw_step_with_bfloat16_weights_and_remainders_matches_the_cpu_kernel(kernels):
    n = 1003
    w, g, m, v = *(randn(n, seed=i) for i in range(3)), randn(n, seed=3).abs()
    compute, remainders = torch.empty(n, dtype=BF16), torch.empty(n, dtype=torch.int16)
    C.split_weights(w, compute, remainders)
    state = [compute, remainders, m, v]
    cpu, got = ([t.clone() for t in state] for _ in range(2))
    for step in (1, 2, 3):
        C.adamw_step(
            cpu[0], g, cpu[2], cpu[3], None, lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=step, remainders=cpu[1],
        )  # fmt: skip
        kernels.adamw(None, g, got[2], got[3], got[0], 1e-2, 0.9, 0.99, 1e-8, 0.1, step, n, 4, got[1])
    whole = [optimizer_state.joined(*t[:2]) for t in (cpu, got)]
    close(whole[1], whole[0], 1e-6)
    assert not torch.equal(whole[0], w)


def combined_digest(blocks):
    """As ops/weight_digest.cpp puts the digests of the blocks together."""
    digest, mask = 14695981039346656037, 2**64 - 1
    for block in blocks:
        digest = ((digest ^ (block & mask)) * 1099511628211) & mask
        digest ^= digest >> 29
    return digest


def test_emulated_cuda_weight_digest_equals_the_digest_computed_on_the_cpu(kernels):
    config = dict(vocab_size=3101, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                  rms_norm_eps=1e-6, rope_theta=10000.0, model_type="llama", tie_word_embeddings=False)  # fmt: skip
    model = C.DecoderModel(native_config(config), F32, True)
    model.compute.copy_(randn(*model.compute.shape))
    size = model.compute.nbytes
    blocks = torch.zeros(math.ceil(size / 2**20), dtype=torch.int64)
    assert len(blocks) > 1
    kernels.weight_digest(model.compute, size, blocks)
    assert combined_digest(blocks.tolist()) == model.digest()
