import math

import pytest
import torch
from cuda_emulation.tensors import bits, packed, randn
from nemo_rl_cpp._native import C

pytestmark = pytest.mark.gpu
DTYPES = [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)]
#         N, K, H
HEADS = [(3, 1, 16), (4, 4, 64), (9, 3, 64), (7, 1, 128), (2, 1, 8), (3, 3, 24), (2, 2, 256)]
TILE = C.KEY_TILE


def close(gpu, cpu, bound):
    assert gpu.is_cuda
    difference, size = (gpu.cpu().double() - cpu.double()).norm(), cpu.double().norm()
    assert difference <= bound * size + 1e-6, float(difference / size)


def on_both(op, *tensors):
    """Return (op(*tensors) on the CPU, op(*tensors) on CUDA). The CUDA call gets copies, since an op may change its
    arguments."""
    on_gpu = [t.cuda() if isinstance(t, torch.Tensor) else t for t in tensors]
    return op(*tensors), op(*on_gpu)


@pytest.mark.parametrize("dtype, bound", DTYPES)
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 64, 64), (70, 96, 40), (300, 1024, 256), (5, 1, 48)], ids=str)
def test_linear_layer_on_cuda_matches_the_cpu(shape, dtype, bound, out):
    if dtype == torch.float32 and out != dtype:
        pytest.skip("float32 has no bfloat16 result")
    M, N, K = shape

    def forward(x, w, bias, y):
        C.linear_forward(x, w, None, y)
        C.linear_forward(x, w, bias, y, True)
        return y

    cpu, gpu = on_both(
        forward, randn(M, K, dtype=dtype), randn(N, K, dtype=dtype, seed=1), randn(N, dtype=dtype, seed=2),
        torch.empty(M, N, dtype=out),
    )  # fmt: skip
    close(gpu, cpu, bound)


@pytest.mark.parametrize(
    "dtype, out", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]
)
@pytest.mark.parametrize("N, K", [(64, 64), (96, 40), (64, 33), (2048, 1024), (4099, 256)])
def test_cuda_matrix_product_of_a_row_is_bit_identical_in_every_batch(dtype, out, N, K):
    x, w = randn(9000, K, dtype=dtype).cuda(), randn(N, K, dtype=dtype, seed=1).cuda()
    whole = torch.empty(9000, N, device="cuda", dtype=out)
    C.linear_forward(x, w, None, whole)
    for begin, count in [(0, 1), (8999, 1), (700, 8), (3, 64), (100, 257), (0, 1499), (40, 4096)]:
        part = torch.empty(count, N, device="cuda", dtype=out)
        C.linear_forward(x[begin : begin + count], w, None, part)
        assert torch.equal(bits(part), bits(whole[begin : begin + count])), (begin, count)


@pytest.mark.parametrize("dtype, bound", DTYPES)
def test_linear_layer_gradients_on_cuda_match_the_cpu_and_are_reproducible(dtype, bound):
    dy, x, w = randn(333, 96, dtype=dtype), randn(333, 72, dtype=dtype, seed=1), randn(96, 72, dtype=dtype, seed=2)

    def of_input(dy, w, dx):
        C.linear_backward_input(dy, w, dx)
        return dx

    def of_weight(dy, x, dw):
        C.linear_backward_weight(dy, x, dw)
        return dw

    for real in (dtype, torch.float32):
        close(*reversed(on_both(of_input, dy, w, torch.empty(333, 72, dtype=real))), bound)
    cpu, gpu = on_both(of_weight, dy, x, torch.ones(96, 72))
    close(gpu, cpu, bound)
    assert torch.equal(gpu, of_weight(dy.cuda(), x.cuda(), torch.ones(96, 72).cuda()))


@pytest.mark.parametrize("dtype, bound", DTYPES)
def test_fused_linear_swiglu_on_cuda_matches_the_cpu(dtype, bound):
    def run(x, w, bias, act):
        C.linear_swiglu(x, w, bias, None, act)
        return act

    cpu, gpu = on_both(
        run, randn(40, 64, dtype=dtype), randn(2 * 56, 64, dtype=dtype, seed=1), randn(2 * 56, dtype=dtype, seed=2),
        torch.empty(40, 56, dtype=dtype),
    )  # fmt: skip
    close(gpu, cpu, bound)


@pytest.mark.parametrize("dtype, bound", DTYPES)
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh", "clamped", "relu_squared"])
def test_swiglu_gelu_and_squared_relu_on_cuda_match_the_cpu(gate, dtype, bound):
    columns = 37 if gate == "relu_squared" else 74
    gate_up, d_act = 5 * randn(40, columns, dtype=dtype), randn(40, 37, dtype=dtype, seed=1)

    def run(gate_up, d_act):
        act, d_gate_up = torch.empty_like(d_act), torch.empty_like(gate_up)
        C.swiglu_forward(gate_up, act, gate)
        C.swiglu_backward(d_act, gate_up, d_gate_up, gate)
        return torch.cat([act, d_gate_up], 1)

    cpu, gpu = on_both(run, gate_up, d_act)
    close(gpu, cpu, bound)


def test_adamw_on_cuda_matches_the_cpu():
    state = [randn(1003, dtype=torch.float32, seed=i) for i in range(3)] + [
        randn(1003, dtype=torch.float32, seed=3).abs(),
        torch.empty(1003, dtype=torch.bfloat16),
    ]
    results = []
    for device in ("cpu", "cuda"):
        w, g, m, v, compute = (t.clone().to(device) for t in state)
        for step in (1, 2, 3):
            C.adamw_step(w, g, m, v, compute, lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=step)
        assert torch.equal(compute, w.to(torch.bfloat16))
        results.append((w, m, v))
    for cpu, gpu in zip(*results, strict=True):
        close(gpu, cpu, 1e-6)


@pytest.mark.parametrize("dtype, bound", DTYPES)
@pytest.mark.parametrize("shape", HEADS, ids=str)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_packed_attention_on_cuda_matches_the_cpu(with_sinks, shape, dtype, bound):
    N, K, H = shape
    sinks = torch.linspace(-4, 6, N).to(dtype) if with_sinks else None
    heads, gpu_heads = (
        C.AttentionHeads(N, K, H, 1 / math.sqrt(H), sinks=None if sinks is None else sinks.to(device))
        for device in ("cpu", "cuda")
    )
    sequences, T = packed()
    qkv, d_out = randn(T, (N + 2 * K) * H, dtype=dtype), randn(T, N * H, dtype=dtype, seed=1)
    out, lse = C.attention_forward(qkv, sequences, heads)
    gpu_out, gpu_lse = C.attention_forward(qkv.cuda(), sequences, gpu_heads)
    close(gpu_out, out, bound)
    close(gpu_lse, lse, 1e-5)
    d_qkv = C.attention_backward(qkv, out, d_out, lse, sequences, heads)
    runs = [C.attention_backward(qkv.cuda(), gpu_out, d_out.cuda(), gpu_lse, sequences, gpu_heads) for _ in range(3)]
    if with_sinks:
        d_sinks = C.attention_sinks_backward(gpu_out, d_out.cuda(), gpu_lse, gpu_heads)
        close(d_sinks, C.attention_sinks_backward(out, d_out, lse, heads), bound)
    close(runs[0], d_qkv, bound)
    assert all(torch.equal(bits(r), bits(runs[0])) for r in runs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", HEADS, ids=str)
@pytest.mark.parametrize("chunks", [[100], [1] * 100, [33, 1, 1, 30, 35]], ids=["whole", "single", "mixed"])
def test_paged_and_packed_attention_on_cuda_are_bit_identical(shape, dtype, chunks):
    N, K, H = shape
    sinks = torch.linspace(-4, 6, N).to(dtype).cuda() if len(chunks) == 5 else None
    heads = C.AttentionHeads(N, K, H, 1 / math.sqrt(H), sinks=sinks)
    qkv = randn(100, (N + 2 * K) * H, dtype=dtype).cuda()
    whole, _ = C.attention_forward(qkv, [(0, 100, 0, 0)], heads)
    cache, table = torch.full((9, K, 2, H * TILE), float("nan"), dtype=dtype, device="cuda"), [5, 2, 8, 1]
    done = 0
    for n in chunks:
        part = C.attention_paged(qkv[done : done + n].contiguous(), [(0, n, done, table)], heads, cache)
        assert torch.equal(bits(part), bits(whole[done : done + n])), done
        done += n


def test_copying_a_kv_cache_block_on_cuda_copies_the_same_positions_as_on_the_cpu():
    cache = randn(4, 2, 2, 16 * TILE, dtype=torch.float32).cuda()
    expected = cache.cpu()
    C.kv_cache_copy(cache, 1, 3, 7)
    C.kv_cache_copy(expected, 1, 3, 7)
    assert torch.equal(cache.cpu(), expected)


@pytest.mark.parametrize("dtype, bound", DTYPES)
@pytest.mark.parametrize("rule", ["gated_delta", "mamba2"])
def test_gated_recurrences_on_cuda_match_the_cpu_and_are_bit_identical_in_chunks(rule, dtype, bound):
    (P, U, dk, dv), (sequences, T) = (2, 4, 32, 48), ([(0, 80, -1, -1, False), (80, 40, 0, -1, False)], 120)
    qkv, a, b = (randn(T, n, dtype=dtype, seed=n) for n in (2 * P * dk + U * dv, U, U))
    heads = [randn(U, dtype=dtype, seed=i) for i in range(3)]
    d_out = randn(T, U * dv, dtype=dtype, seed=3)

    def inputs(device, begin, end):
        rows = [x[begin:end].contiguous().to(device) for x in ((qkv, b, a) if rule == "gated_delta" else (qkv, a))]
        return *rows, *(h.to(device) for h in (heads[:2] if rule == "gated_delta" else heads))

    def limits():
        return ((0.01, 2.0),) if rule == "mamba2" else ()

    def run(device):
        arguments = (*inputs(device, 0, T), sequences, (P, U, dk, dv, 4), *limits())
        out = getattr(C, rule)(*arguments)
        return out, getattr(C, f"{rule}_backward")(d_out.to(device), *arguments)

    (out, gradients), (cpu_out, cpu_gradients) = run("cuda"), run("cpu")
    close(out, cpu_out, bound)
    for ours, theirs in zip(gradients, cpu_gradients, strict=True):
        close(ours, theirs, 10 * bound)
    state, done = torch.full((2, U, dk * dv), float("nan"), device="cuda"), 0
    for n in (1, 30, 1, 48):
        part = getattr(C, rule)(
            *inputs("cuda", done, done + n), [(0, n, -1, 1, done > 0)], (P, U, dk, dv, 4), *limits(), state
        )
        assert torch.equal(bits(part), bits(out[done : done + n])), done
        done += n


RULES = [
    dict(), dict(temperature=0.6), dict(top_p=0.9), dict(top_k=40), dict(top_p=0.8, top_k=40),
    dict(top_p=0.999, temperature=2.0),
]  # fmt: skip


@pytest.mark.parametrize("dtype, bound", DTYPES)
@pytest.mark.parametrize("shape", [(1, 7, 16), (70, 4099, 24), (2100, 2500, 8)], ids=str)
def test_lm_head_logprobs_and_gradients_on_cuda_match_the_cpu(shape, dtype, bound):
    U, V, D = shape
    x, w, g = randn(U, D, dtype=dtype), randn(V, D, dtype=dtype, seed=1), randn(U, dtype=torch.float32, seed=2)
    targets = torch.randint(0, V, (U,), generator=torch.Generator().manual_seed(3))

    def run(device, fused):
        head, logprobs, d_x, d_w = (
            C.VocabularyHead(),
            torch.empty(U, device=device),
            torch.empty(U, D, device=device),
            torch.zeros(V, D, device=device),
        )
        entropy = torch.empty(U, device=device)
        if fused:
            head.forward_backward(x.to(device), w.to(device), targets, g, 0.7, logprobs, d_x, d_w)
            return logprobs, d_x, d_w
        head.forward(x.to(device), w.to(device), targets, 0.7, logprobs, entropy)
        head.backward(x.to(device), w.to(device), targets, g.to(device), 0.7, d_x, d_w)
        return logprobs, d_x, d_w, entropy

    cpu, gpu, fused = run("cpu", False), run("cuda", False), run("cuda", True)
    for i, (a, b) in enumerate(zip(gpu, cpu, strict=True)):
        close(a, b, bound if i in (1, 2) else 1e-5)
    assert all(torch.equal(a, b) for a, b in zip(gpu, fused))


@pytest.mark.parametrize("dtype, bound", DTYPES)
def test_lm_head_entropy_gradient_on_cuda_matches_the_cpu(dtype, bound):
    U, V, D = 70, 4099, 24
    x, w, g = randn(U, D, dtype=dtype), randn(V, D, dtype=dtype, seed=1), randn(U, dtype=torch.float32, seed=2)
    h, targets = randn(U, dtype=torch.float32, seed=4), torch.arange(U)

    def run(device):
        head, logprobs, entropy = C.VocabularyHead(), torch.empty(U, device=device), torch.empty(U, device=device)
        d_x, d_w = torch.empty(U, D, device=device), torch.zeros(V, D, device=device)
        head.forward(x.to(device), w.to(device), targets, 0.7, logprobs, entropy)
        head.backward(x.to(device), w.to(device), targets, g.to(device), 0.7, d_x, d_w, d_entropy=h.to(device))
        return d_x, d_w

    for ours, theirs in zip(run("cuda"), run("cpu"), strict=True):
        close(ours, theirs, bound)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_sampling_and_scoring_on_cuda_are_bit_identical_and_match_the_cpu(rule):
    rule = C.SamplingRule(**{**dict(temperature=1.0, top_p=1.0, top_k=0, greedy=False), **rule})
    logits = 3 * randn(200, 3000, dtype=torch.float32)
    uniform = torch.rand(200, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tokens, logprobs, _ = C.sample_rows(logits.cuda(), uniform, rule)
    again, scored, _ = C.score_rows(logits.cuda(), tokens, rule)
    assert torch.equal(again, tokens) and torch.equal(bits(scored), bits(logprobs))
    cpu_tokens, cpu_logprobs, _ = C.sample_rows(logits, uniform, rule)
    same = tokens == cpu_tokens  # a sum that is rounded otherwise may move a draw to its neighbour
    assert same.float().mean() > 0.97
    assert torch.allclose(logprobs[same], cpu_logprobs[same], atol=1e-4)


def test_greedy_sampling_on_cuda_takes_the_first_maximum_and_flags_non_finite_logits():
    logits = randn(3, 50, dtype=torch.float32)
    logits[0, 7] = logits[0, 9] = 9.0
    logits[1, 3] = float("nan")
    logits[2, :] = float("-inf")
    greedy = C.SamplingRule(temperature=1.0, top_p=1.0, top_k=0, greedy=True)
    assert C.sample_rows(logits.cuda(), torch.zeros(3, dtype=torch.float64), greedy)[0].tolist() == [7, -1, -1]


def test_error_for_float64_on_cuda_names_the_key_to_change():
    x = torch.zeros(2, 4, dtype=torch.float64, device="cuda")
    with pytest.raises(ValueError, match="policy.precision"):
        C.swiglu_forward(x, torch.zeros(2, 2, dtype=torch.float64, device="cuda"))
