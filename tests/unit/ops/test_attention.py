import math
import random

import numpy as np
import pytest
import torch
from nemo_rl_cpp._native import C
from reference import attention as reference
from threads import on_threads

TILE = C.KEY_TILE
#         N, K, H
HEADS = [(3, 1, 16), (4, 4, 64), (9, 3, 64), (10, 2, 80), (7, 1, 128), (2, 1, 8), (3, 3, 24), (2, 2, 256), (4, 2, 512)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
WINDOWS = [0, 1, 9, 40, 64]  # keys that a row sees: all, itself, less than a tile of 32, more, two tiles
# every pair of a shape, a type and a window
CASES = [(shape, DTYPES[(i + j) % 3], window) for i, shape in enumerate(HEADS) for j, window in enumerate(WINDOWS)]


def softcap_of(window):
    """Return the softcap of attention scores; only the window 40 has one."""
    return 2.0 if window == 40 else 0.0


def sinks_of(shape, window, dtype=torch.float64):
    """Return the attention sinks of the windows 9 and 64: some outweigh all keys, some have almost no weight."""
    return torch.linspace(-4, 6, shape[0], dtype=torch.float64).to(dtype) if window in (9, 64) else None


def heads_of(shape, window=0, dtype=torch.bfloat16):
    n, k, h = shape
    return C.AttentionHeads(n, k, h, 1.0 / math.sqrt(h), window, softcap_of(window), sinks_of(shape, window, dtype))


def random_qkv(tokens, shape, dtype, seed=0):
    n, k, h = shape
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, (n + 2 * k) * h, generator=generator, dtype=torch.float64).to(dtype)


def packed(lengths):
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return [(int(s), int(n), 0, 0) for s, n in zip(starts, lengths)], int(starts[-1])


def bits(x):
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def assert_same_bits(a, b):
    assert a.shape == b.shape and torch.equal(bits(a), bits(b)), f"{int((bits(a) != bits(b)).sum())} values differ"


class Cache:
    """A KV cache of one layer that assigns blocks in random order and holds NaN at unwritten positions."""

    def __init__(self, shape, dtype, blocks, seed, window=0):
        n, k, h = shape
        self.heads, self.head_dim = heads_of(shape, window, dtype), h
        self.storage = torch.full((blocks, k, 2, h * TILE), math.nan, dtype=dtype)
        self.in_pairs = dtype == torch.bfloat16 and C.cpu_capability() in ("amx", "software_tiles")
        self.free = list(range(blocks))
        random.Random(seed).shuffle(self.free)

    def table(self, length):
        return [self.free.pop() for _ in range(-(-length // TILE))]

    def keys(self, block):
        """Return the keys of a block as [K, H, TILE]. The cache holds the terms of a head in rows, or for tile
        instructions in pairs."""
        tiles, h = self.storage[block, :, 0], self.head_dim
        if self.in_pairs:
            return tiles.unflatten(-1, (h // 2, TILE, 2)).transpose(-1, -2).flatten(-3, -2)
        return tiles.unflatten(-1, (h, TILE))

    def run(self, qkv, slices):
        return C.attention_paged(qkv, slices, self.heads, self.storage)


def paged_in_chunks(sequence_qkv, shape, seed, decode_from=None, window=0):
    """Compute all sequences with one cache, several per step, in random chunks (single tokens from `decode_from` on).
    Blocks before the window of the next token are released. Return the outputs of each sequence."""
    rng = random.Random(seed)
    dtype = sequence_qkv[0].dtype
    cache = Cache(shape, dtype, sum(-(-len(x) // TILE) for x in sequence_qkv) + 3, seed, window)
    tables = [cache.table(len(x)) for x in sequence_qkv]
    done = [0] * len(sequence_qkv)
    outs = [[] for _ in sequence_qkv]
    while any(d < len(x) for d, x in zip(done, sequence_qkv)):
        live = [i for i, x in enumerate(sequence_qkv) if done[i] < len(x)]
        chosen = rng.sample(live, rng.randint(1, len(live)))
        rows, slices, start = [], [], 0
        for i in chosen:
            left = len(sequence_qkv[i]) - done[i]
            decodes = decode_from is not None and done[i] >= decode_from
            take = 1 if decodes else min(left, rng.choice([1, 2, 5, 31, 32, 33, 90, 300]))
            rows.append(sequence_qkv[i][done[i] : done[i] + take])
            slices.append((start, take, done[i], tables[i]))
            start += take
        out = cache.run(torch.cat(rows), slices)
        for i, (at, take, _, _) in zip(chosen, slices):
            outs[i].append(out[at : at + take])
            done[i] += take
            for block in range((done[i] - window + 1) // TILE if window else 0):
                tables[i][block] = -1
    return [torch.cat(o) for o in outs]


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape, dtype, window", CASES, ids=str)
def test_attention_output_matches_a_float64_reference(shape, dtype, window):
    sequences, tokens = packed([1, 5, 32, 33, 70])
    sequences.append((tokens, 20, sequences[4][0], 37))  # shares the first 37 rows of the last one
    qkv = random_qkv(tokens + 20, shape, dtype)
    out, lse = C.attention_forward(qkv, sequences, heads_of(shape, window, qkv.dtype))
    want, want_lse = reference.attention(
        qkv.double().numpy(), sequences, *shape, 1.0 / math.sqrt(shape[2]), window, softcap_of(window),
        None if window not in (9, 64) else sinks_of(shape, window, dtype).double().numpy(),
    )  # fmt: skip
    limit = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float64: 1e-13}[dtype]
    assert out.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert np.abs(out.double().numpy() - want).max() <= limit * max(1.0, np.abs(want).max())
    assert np.abs(lse.double().numpy() - want_lse).max() <= (1e-12 if dtype == torch.float64 else 3e-6)


def test_attention_with_large_scores_does_not_overflow():
    shape = (1, 1, 16)
    qkv = random_qkv(100, shape, torch.float32) * 60
    out, lse = C.attention_forward(qkv, [(0, 100, 0, 0)], heads_of(shape))
    want, want_lse = reference.attention(qkv.numpy(), [(0, 100, 0, 0)], *shape, 0.25)
    assert torch.isfinite(out).all()
    np.testing.assert_allclose(lse.numpy(), want_lse, rtol=1e-5)
    np.testing.assert_allclose(out.numpy(), want, atol=0.2)  # scores near 1e4 carry float32 errors near 1e-3


def test_attention_output_of_padding_rows_is_zero():
    shape = (2, 1, 16)
    out, lse = C.attention_forward(random_qkv(10, shape, torch.float32), [(2, 3, 0, 0)], heads_of(shape))
    keep = torch.zeros(10, dtype=torch.bool)
    keep[2:5] = True
    assert (out[~keep] == 0).all() and (lse[~keep] == 0).all() and (out[keep] != 0).any()


@pytest.mark.slow
@pytest.mark.parametrize("shape, dtype, window", CASES, ids=str)
def test_paged_and_packed_attention_outputs_are_bit_identical(shape, dtype, threads, window):
    rng = random.Random(f"{shape}{dtype}")
    lengths = [1, 31, 32, 33, 64, 300] + [rng.randint(1, 300) for _ in range(4)]
    sequences, tokens = packed(lengths)
    qkv = random_qkv(tokens, shape, dtype)
    out, _ = C.attention_forward(qkv, sequences, heads_of(shape, window, qkv.dtype))
    parts = [qkv[s : s + n] for s, n, _, _ in sequences]
    for seed in range(2):
        chunked = paged_in_chunks(parts, shape, seed, decode_from=260 if seed else None, window=window)
        for (s, n, _, _), got in zip(sequences, chunked):
            assert_same_bits(got, out[s : s + n])


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 16, 33, 70])
def test_attention_of_a_decode_step_does_not_depend_on_other_sequences_in_the_batch(batch, threads):
    window = 33 * (batch % 2)
    shape, rng = (9, 3, 64), random.Random(batch)
    lengths = [rng.randint(1, 300) for _ in range(batch)]
    sequences, tokens = packed(lengths)
    qkv = random_qkv(tokens, shape, torch.bfloat16, seed=batch)
    last = [s + n - 1 for s, n, _, _ in sequences]
    cache = Cache(shape, torch.bfloat16, sum(-(-n // TILE) for n in lengths), batch, window)
    tables = [cache.table(n) for n in lengths]
    cache.run(qkv, [(s, n - 1, 0, t) for (s, n, _, _), t in zip(sequences, tables)])
    got = cache.run(qkv[last], [(i, 1, n - 1, t) for i, (n, t) in enumerate(zip(lengths, tables))])
    want, _ = C.attention_forward(qkv, sequences, heads_of(shape, window, qkv.dtype))
    assert_same_bits(got, want[last])
    heads = heads_of(shape, window, qkv.dtype)
    alone, _ = C.attention_forward(qkv[sequences[-1][0] :], [(0, lengths[-1], 0, 0)], heads)
    assert_same_bits(got[-1], alone[-1])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(9, 3, 64), (10, 2, 80)], ids=str)
@pytest.mark.parametrize("window", [0, 9, 64])
def test_attention_over_a_shared_prefix_is_bit_identical_to_that_over_a_copied_prefix(shape, dtype, threads, window):
    rng = random.Random(7)
    for prefix in [1, 17, 32, 45, 64, 130, 300]:
        lengths = [rng.randint(1, 120) for _ in range(5)]
        qkv = random_qkv(prefix + sum(lengths), shape, dtype, seed=prefix)
        starts = prefix + np.concatenate([[0], np.cumsum(lengths)])
        sequences = [(0, prefix, 0, 0)] + [(int(s), n, 0, prefix) for s, n in zip(starts, lengths)]
        heads = heads_of(shape, window, qkv.dtype)
        out, lse = C.attention_forward(qkv, sequences, heads)
        for start, length, _, _ in sequences[1:]:
            whole = torch.cat([qkv[:prefix], qkv[start : start + length]])
            want, want_lse = C.attention_forward(whole, [(0, prefix + length, 0, 0)], heads)
            assert_same_bits(out[start : start + length], want[prefix:])
            assert_same_bits(lse[start : start + length], want_lse[prefix:])


def test_attention_is_bit_identical_for_any_number_of_threads_and_any_sequence_packing():
    shape = (6, 2, 64)
    sequences, tokens = packed([700, 1, 250, 64, 31, 90])
    qkv = random_qkv(tokens, shape, torch.float32)
    results = on_threads(lambda: C.attention_forward(qkv, sequences, heads_of(shape)))
    for out, lse in results[1:]:
        assert_same_bits(out, results[0][0])
        assert_same_bits(lse, results[0][1])
    shuffled, _ = C.attention_forward(qkv, sequences[::-1], heads_of(shape))
    assert_same_bits(shuffled, results[0][0])
    for start, length, _, _ in sequences:
        alone, _ = C.attention_forward(qkv[start : start + length].clone(), [(0, length, 0, 0)], heads_of(shape))
        assert_same_bits(alone, results[0][0][start : start + length])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_in_later_tokens_does_not_change_the_attention_output_of_earlier_tokens(dtype):
    shape = (4, 2, 64)
    qkv = random_qkv(200, shape, dtype)
    clean, _ = C.attention_forward(qkv, [(0, 200, 0, 0)], heads_of(shape))
    for cut in (1, 40, 64, 129):
        poisoned = qkv.clone()
        poisoned[cut:] = math.nan
        out, _ = C.attention_forward(poisoned, [(0, 200, 0, 0)], heads_of(shape))
        assert_same_bits(out[:cut], clean[:cut])
        assert out[cut:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_over_a_copied_kv_cache_block_is_the_same_as_without_sharing(dtype):
    """The block is the last of a prompt, after which two responses continue."""
    shape, prompt, more = (9, 3, 64), 45, 30
    heads = heads_of(shape)
    qkv = random_qkv(prompt + 2 * more, shape, dtype)
    cache = Cache(shape, dtype, 6, 0)
    first = cache.table(prompt + more)
    cache.run(qkv[:prompt], [(0, prompt, 0, first)])
    second = [first[0], *cache.table(prompt + more - TILE)]
    C.kv_cache_copy(cache.storage, first[1], second[1], prompt - TILE)
    assert cache.keys(second[1])[..., : prompt - TILE].equal(cache.keys(first[1])[..., : prompt - TILE])
    assert cache.keys(second[1])[..., prompt - TILE :].isnan().all()
    got = cache.run(qkv[prompt:], [(0, more, prompt, first), (more, more, prompt, second)])
    sequences = [(0, prompt, 0, 0), (prompt, more, 0, prompt), (prompt + more, more, 0, prompt)]
    want, _ = C.attention_forward(qkv, sequences, heads)
    assert_same_bits(got, want[prompt:])


def test_invalid_attention_arguments_raise_value_error():
    shape = (4, 2, 16)
    heads, qkv = heads_of(shape), random_qkv(64, shape, torch.float32)
    cache, windowed = Cache(shape, torch.float32, 2, 0), Cache(shape, torch.float32, 2, 0, window=8)
    windowed.run(qkv, [(0, 1, 39, [-1, 0])])  # position 39 reads 32..39
    for call, words in [
        (lambda: C.attention_forward(qkv, [(0, 65, 0, 0)], heads), "rows 0..65 of 64"),
        (lambda: C.attention_forward(qkv, [(0, 10, 0, 0), (9, 5, 0, 0)], heads), "overlap"),
        (lambda: C.attention_forward(qkv, [(0, 10, 0, 0), (20, 5, 3, 4)], heads), "prefix"),
        (lambda: C.attention_forward(qkv, [(0, 10, 0, 0), (20, 5, 0, 11)], heads), "prefix"),
        (lambda: C.attention_forward(qkv.half(), [(0, 10, 0, 0)], heads), "Half"),
        (lambda: C.attention_forward(qkv[:, :-1], [(0, 10, 0, 0)], heads), "qkv must be"),
        (lambda: C.attention_forward(qkv, [(0, 10, 0, 0)], C.AttentionHeads(4, 3, 16, 1.0)), "evenly"),
        (lambda: C.attention_forward(qkv, [(0, 10, 0, 0)], C.AttentionHeads(4, 2, 12, 1.0)), "multiple of 8"),
        (lambda: cache.run(qkv, [(0, 33, 0, [0])]), "needs 2 cache blocks"),
        (lambda: cache.run(qkv, [(0, 33, 0, [0, 2])]), "names cache block 2 of 2"),
        (lambda: windowed.run(qkv, [(0, 1, 38, [-1, 0])]), "names cache block -1 of 2"),
        (lambda: windowed.run(qkv, [(0, 1, 39, [-2, 0])]), "names cache block -2 of 2"),
        (lambda: windowed.run(qkv, [(0, 1, 39, [0, -1])]), "names cache block -1 of 2"),
        (lambda: cache.run(qkv.double(), [(0, 33, 0, [0, 1])]), "cache must be"),
        (lambda: C.kv_cache_copy(cache.storage, 0, 1, 33), "33 positions"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()
