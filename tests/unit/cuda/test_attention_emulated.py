import math

import pytest
import torch
from cuda_emulation.tensors import bits, close, packed, randn, table
from nemo_rl_cpp._native import C

TILE = C.KEY_TILE
# float32: another order of summation over at most 154 keys. bfloat16: results are rounded to 8 bits, and either side may round a
# weight or an output the other way.
DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)]
#         N, K, H: heads that share keys or do not, and a head of every register layout (up to 64, 128 and 256)
HEADS = [(3, 1, 16), (2, 2, 64), (7, 1, 128), (3, 3, 24)]


def turned(cache, H, to_pairs):
    """A cache [blocks, K, 2, H * TILE] of rows as pairs, or of pairs as rows, where this processor keeps bfloat16 in pairs: of keys
    [H / 2][TILE] pairs of terms, of values [TILE / 2][H] pairs of positions (`PairCache`)."""
    if cache.dtype != torch.bfloat16 or C.cpu_capability() not in ("amx", "software_tiles"):
        return cache.clone()
    kinds = []
    for tiles, outer, inner in ((cache[:, :, 0], H // 2, TILE), (cache[:, :, 1], TILE // 2, H)):
        shape = (outer, 2, inner) if to_pairs else (outer, inner, 2)
        kinds.append(tiles.unflatten(-1, shape).transpose(-1, -2).flatten(-3))
    return torch.stack(kinds, 2)


def small():
    return [(0, 34, 0, 0), (34, 6, 0, 33), (40, 1, 0, 10)], 41


def query_blocks(sequences, step):
    """AttentionBlock of every `step` own tokens."""
    return table([
        [start + token, min(step, length - token), prefix + token, prefix_start, prefix, start, 0]
        for start, length, prefix_start, prefix in sequences
        for token in range(0, length, step)
    ])  # fmt: skip


def key_blocks(sequences, step):
    """(AttentionKeyBlock of every `step` own keys, the sequences that share each owner's keys)."""
    sharers, blocks = [], []
    for i, (start, length, _, prefix) in enumerate(sequences):
        mine = [j for j, (_, _, first, shared) in enumerate(sequences) if shared > 0 and prefix == 0 and first == start]
        begin = len(sharers)
        sharers += mine
        blocks += [[i, key, begin, len(sharers)] for key in range(0, length, step)]
    return table(blocks), table([*sharers, 0])


def is_bf16(t):
    return t.dtype == torch.bfloat16


def softcap_of(window):
    """One of the windows has a softcap of its scores, too."""
    return 2.0 if window in (37, 40) else 0.0


def sinks_of(window, N, dtype):
    """One of the windows has sinks, of which some outweigh all keys and some none."""
    return torch.linspace(-4, 6, N).to(dtype) if window in (37, 40) else None


def forward(kernels, qkv, sequences, N, K, H, window=0):
    blocks = query_blocks(sequences, kernels.block_rows(1, H, is_bf16(qkv)) // (N // K))
    out, lse = torch.zeros(len(qkv), N * H, dtype=qkv.dtype), torch.zeros(len(qkv), N)
    kernels.attention_forward(
        N, K, H, is_bf16(qkv), window, softcap_of(window), qkv, sinks_of(window, N, qkv.dtype), None, None, blocks,
        len(blocks), out, lse, 1,
    )  # fmt: skip
    return out, lse


def backward(kernels, qkv, out, d_out, lse, sequences, N, K, H, window=0):
    blocks = query_blocks(sequences, kernels.backward_rows(H, is_bf16(qkv)) // (N // K))
    (keys, sharers), dots = key_blocks(sequences, kernels.backward_keys(H, is_bf16(qkv))), torch.zeros(len(qkv), N)
    d_qkv = torch.full_like(qkv, math.nan)  # every entry is written
    kernels.attention_backward(N, K, H, is_bf16(qkv), window, softcap_of(window), qkv, out, d_out, lse, dots, table(sequences), sharers, blocks, len(blocks), keys, len(keys),
                               len(qkv), d_qkv)  # fmt: skip
    return d_qkv


def compare_with_the_cpu(kernels, sequences, tokens, shape, dtype, bound, window=0):
    N, K, H = shape
    sinks = sinks_of(window, N, dtype)
    heads = C.AttentionHeads(N, K, H, 1 / math.sqrt(H), window, softcap_of(window), sinks)
    qkv, d_out = randn(tokens, (N + 2 * K) * H, dtype=dtype), randn(tokens, N * H, dtype=dtype, seed=1)
    out, lse = C.attention_forward(qkv, sequences, heads)
    got_out, got_lse = forward(kernels, qkv, sequences, N, K, H, window)
    close(got_out, out, bound)
    close(got_lse, lse, 1e-5)  # float32 in both types
    # three products of rounded numbers instead of one
    got = backward(kernels, qkv, got_out, d_out, got_lse, sequences, N, K, H, window)
    close(got, C.attention_backward(qkv, out, d_out, lse, sequences, heads), 3 * bound)
    if sinks is not None:
        # the same out and lse on both sides: float32 in another order
        d_sinks, workspace = torch.ones(N), [torch.full((tokens, N), math.nan) for _ in range(2)]
        kernels.attention_sinks_backward(*shape, is_bf16(qkv), out, d_out, lse, sinks, *workspace, tokens, d_sinks)
        close(d_sinks - 1, C.attention_sinks_backward(out, d_out, lse, heads), 1e-5)


@pytest.mark.parametrize("dtype, bound", DTYPES)
@pytest.mark.parametrize("shape", HEADS, ids=str)
@pytest.mark.parametrize("window", [0, 2, 40])
def test_emulated_cuda_packed_attention_matches_the_cpu_kernel(kernels, shape, dtype, bound, window):
    if window and shape[2] > 64:
        pytest.skip("the same code as for smaller heads")
    compare_with_the_cpu(kernels, *(small() if shape[2] == 128 else packed()), shape, dtype, bound, window)


@pytest.mark.parametrize("dtype, bound", DTYPES)
def test_emulated_cuda_attention_with_the_largest_head_size_matches_the_cpu_kernel(kernels, dtype, bound):
    compare_with_the_cpu(kernels, *small(), (2, 1, 256), dtype, bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 1, 16), (2, 2, 64), (7, 1, 128), (2, 1, 256)], ids=str)
@pytest.mark.parametrize("chunks", [[40], [33, 1, 1, 5, 30], [97, 1, 34]], ids=["whole", "mixed", "long"])
def test_emulated_cuda_paged_and_packed_attention_are_bit_identical(kernels, shape, dtype, chunks):
    N, K, H = shape
    window = 37 if chunks[0] == 33 else 0
    tokens, bf16 = sum(chunks), dtype == torch.bfloat16
    qkv = randn(tokens, (N + 2 * K) * H, dtype=dtype)
    whole, _ = forward(kernels, qkv, [(0, tokens, 0, 0)], N, K, H, window)
    cache = torch.full((6, K, 2, H * TILE), math.nan, dtype=dtype)  # what no token has written must not matter
    block_table, done = torch.tensor([5, 2, 0, 4, 1], dtype=torch.int32), 0
    for n in chunks:
        new = qkv[done : done + n].contiguous()
        slots = table([int(block_table[p // TILE]) * TILE + p % TILE for p in range(done, done + n)])
        kernels.kv_write(N, K, H, bf16, new, slots, n, cache)
        many = n * (N // K) > kernels.block_rows(0, H, bf16)
        step = kernels.block_rows(many, H, bf16) // (N // K)
        blocks = table([[t, min(step, n - t), done + t, 0, 0, 0, 0] for t in range(0, n, step)])
        out = torch.zeros(n, N * H, dtype=dtype)
        kernels.attention_forward(
            N, K, H, bf16, window, softcap_of(window), new, sinks_of(window, N, dtype), cache, block_table, blocks,
            len(blocks), out, None, many,
        )  # fmt: skip
        assert torch.equal(bits(out), bits(whole[done : done + n])), done
        done += n


@pytest.mark.parametrize("dtype, bound", DTYPES)
# a group of 17 takes the kernel of many rows for one token, too
@pytest.mark.parametrize("shape", [(4, 2, 16), (17, 1, 24)], ids=str)
def test_emulated_cuda_attention_of_prefill_decode_and_padding_rows_matches_the_cpu(kernels, shape, dtype, bound):
    N, K, H = shape
    heads, rows = C.AttentionHeads(N, K, H, 1 / math.sqrt(H)), 24
    # (query_start, query_length, context_length, blocks): a prompt, two tokens of running sequences; rows 18 to 23 belong to nobody
    slices = [(0, 16, 20, [3, 1]), (16, 1, 40, [0, 5]), (17, 1, 0, [2])]
    cache = randn(6, K, 2, H * TILE, dtype=dtype, seed=3)
    qkv = randn(rows, (N + 2 * K) * H, dtype=dtype)
    expected_cache, got_cache = turned(cache, H, to_pairs=True), cache.clone()
    expected = C.attention_paged(qkv[:18].contiguous(), slices, heads, expected_cache)
    out, tables = torch.full((rows, N * H), 7.0, dtype=dtype), [entry for s in slices for entry in s[3]]
    flat = table([[*s[:3], sum(len(o[3]) for o in slices[:i]), len(s[3])] for i, s in enumerate(slices)])
    status = kernels.attention_paged(
        N, K, H, is_bf16(qkv), 0, 0.0, qkv, flat, len(slices), torch.tensor(tables, dtype=torch.int32), rows, got_cache,
        out,
    )  # fmt: skip
    assert status == 0
    close(out[:18], expected, bound)
    assert torch.equal(bits(got_cache), bits(turned(expected_cache, H, to_pairs=False)))
    assert (out[18:] == 7).all()


def test_emulated_cuda_attention_writes_nothing_to_the_kv_cache_for_padding_rows(kernels):
    N, K, H = 2, 1, 8
    cache = torch.zeros(2, K, 2, H * TILE)
    kernels.kv_write(N, K, H, 0, randn(2, (N + 2 * K) * H), table([-1, TILE + 3]), 2, cache)
    assert not cache[0].any() and int(cache.count_nonzero()) == 2 * H


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_emulated_cuda_copy_of_a_kv_cache_block_equals_that_of_the_cpu_kernel(kernels, dtype):
    got = randn(4, 2, 2, 16 * TILE, dtype=dtype)
    expected = turned(got, 16, to_pairs=True)
    C.kv_cache_copy(expected, 1, 3, 7)
    kernels.kv_copy(2, 16, dtype == torch.bfloat16, got, 1, 3, 7)
    expected = turned(expected, 16, to_pairs=False)
    values = got[3, :, 1].unflatten(-1, (TILE, 16)), expected[3, :, 1].unflatten(-1, (TILE, 16))
    values[1][:, 7] = values[0][:, 7]  # beyond the copy: pairs are copied whole
    assert torch.equal(got, expected)
