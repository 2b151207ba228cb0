"""For every CPU capability, a row's result does not depend on other rows, and generation equals training. A process
chooses its capability when it loads the core, so each is tested in a separate process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from nemo_rl_cpp import _native
from nemo_rl_cpp._native import CPU_CAPABILITIES, C
from test_weight_blocks import PRODUCTS as BLOCK_PRODUCTS
from test_weight_blocks import SHAPES

ROOT = Path(__file__).resolve().parents[3]
HIGHER = CPU_CAPABILITIES[CPU_CAPABILITIES.index(C.cpu_capability()) + 1 : -1]
AVAILABLE = [name for name in CPU_CAPABILITIES if name not in HIGHER]  # a machine has all sets up to its best one

# every number of rows that a tile (of at most 32) leaves over, and some where threads share many tiles; and few
ROWS = """
EACH = (*range(1, 67), 95, 97, 127, 129, 145, 191, 193, 255, 257, 287, 289, 299, 300)
FEW = range(1, 301, 23)
"""
PRODUCTS = """
import torch
from nemo_rl_cpp._native import C

def product(x, w):
    y = torch.empty(len(x), len(w), dtype=x.dtype)
    C.linear_forward(x, w, None, y, False)
    return y

def gated(x, w):
    gate_up, act = torch.empty(len(x), len(w), dtype=x.dtype), torch.empty(len(x), len(w) // 2, dtype=x.dtype)
    C.linear_swiglu(x, w, None, gate_up, act)
    assert torch.equal(gate_up, product(x, w))
    return act

for dtype in (torch.bfloat16, torch.float32):
    x, w = (torch.randn(n, 200, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (300, 146))
    expected = x.double() @ w.double().T
    assert (product(x, w).double() - expected).abs().max() < (0.4 if dtype is torch.bfloat16 else 1e-4)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for op in (product, gated):
            whole = op(x, w)
            for rows in EACH if threads == 2 and dtype is torch.bfloat16 else FEW:
                assert torch.equal(op(x[:rows], w), whole[:rows]), (dtype, threads, rows)
                assert torch.equal(op(x[300 - rows :], w), whole[300 - rows :]), (dtype, threads, rows)
"""

ATTENTION = """
import math
import torch
from nemo_rl_cpp._native import C

N, K, H = 6, 2, 24

def packed(qkv, sequences):
    return C.attention_forward(qkv, sequences, heads)

def gradient(qkv, sequences):
    out, lse = packed(qkv, sequences)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return C.attention_backward(qkv, out, d_out, lse, sequences, heads)

def chunked(qkv, chunk):
    blocks = -(-len(qkv) // C.KEY_TILE)
    cache = torch.full((blocks, K, 2, H * C.KEY_TILE), math.nan, dtype=qkv.dtype)
    table, pieces = list(reversed(range(blocks))), qkv.split(chunk)
    return torch.cat([C.attention_paged(piece, [(0, len(piece), i * chunk, table)], heads, cache) for i, piece in enumerate(pieces)])

for dtype, window in ((d, w) for d in (torch.bfloat16, torch.float32) for w in (0, 1, 40)):
    sinks = torch.linspace(-3, 3, N).to(dtype) if window == 40 else None
    heads = C.AttentionHeads(N, K, H, 1 / math.sqrt(H), window, 2.0 if window == 40 else 0.0, sinks)
    qkv = torch.randn(400, (N + 2 * K) * H, generator=torch.Generator().manual_seed(0)).to(dtype)
    shared = [(0, 300, 0, 0), (300, 33, 0, 45), (333, 67, 0, 130)]
    gradients = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        whole = packed(qkv[:300], [(0, 300, 0, 0)])
        for rows in EACH if threads == 2 and dtype is torch.bfloat16 and window != 1 else FEW:
            alone, beside = packed(qkv[:rows], [(0, rows, 0, 0)]), packed(qkv, [(300, 100, 0, 0), (0, rows, 0, 0)])
            assert all(torch.equal(a, w[:rows]) and torch.equal(b[:rows], w[:rows]) for a, b, w in zip(alone, beside, whole)), rows
        for chunk in (1, 5, 32, 33, 300):
            assert torch.equal(chunked(qkv[:300], chunk), whole[0]), (dtype, threads, chunk)
        for start, length, _, prefix in shared[1:]:
            own = packed(torch.cat([qkv[:prefix], qkv[start : start + length]]), [(0, prefix + length, 0, 0)])
            together = packed(qkv, shared)
            assert all(torch.equal(a[prefix:], b[start : start + length]) for a, b in zip(own, together)), (dtype, threads, prefix)
        gradients.append(gradient(qkv, shared))
    assert torch.equal(*gradients) and gradients[0].isfinite().all()
"""
BLOCKS = BLOCK_PRODUCTS + SHAPES.format(140) + "check(300, (300, *EACH[:-1]), (2,), ((146, 224),))\n"
RUN = """
from nemo_rl_cpp import run_grpo_math
assert run_grpo_math.main(sys.argv[1:]) == 0
"""


def under(capability: str, *command: str) -> str:
    """Return the output of a process that runs Python's `command` with the CPU capability `capability`."""
    run = subprocess.run(
        [sys.executable, *command], env=os.environ | {"NEMO_RL_CPU_CAPABILITY": capability}, capture_output=True, text=True, timeout=300
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


USED = """
import sys
from nemo_rl_cpp._native import C
print(C.cpu_capability(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", AVAILABLE)
def test_kernels_of_every_cpu_capability_give_results_independent_of_the_batch(capability, tmp_path):
    """Test matrix products, attention with any packing, chunks, prefixes and threads, products with quantised weights,
    which must have the bits of those with dequantised weights, and a run of three steps."""
    said = under(
        capability, "-c", USED + ROWS + PRODUCTS + ATTENTION + BLOCKS + RUN, "--config", str(ROOT / "configs" / "grpo_tiny.yaml"),
        "policy.precision=bfloat16", "grpo.max_num_steps=3", "grpo.val_period=0", "checkpointing.enabled=false",
        f"logger.log_dir={tmp_path}",
    )  # fmt: skip
    assert said.partition("\n")[0] == capability
    rows = [json.loads(line) for line in next(tmp_path.rglob("metrics.jsonl")).read_text().splitlines()]
    steps = [row for row in rows if "train/max_logprob_gap" in row]
    assert len(steps) == 3
    assert all(row["train/max_logprob_gap"] == 0 and row["train/token_mult_prob_error"] == 1 for row in steps)


@pytest.mark.slow
def test_avx512_bf16_kernels_are_used_on_a_cpu_without_amx():
    amx, without = (under(name, "-c", USED).strip() for name in ("amx", "avx512_bf16"))
    assert amx in ("amx", without)


def test_unknown_name_of_a_cpu_capability_is_an_error(monkeypatch):
    monkeypatch.setenv("NEMO_RL_CPU_CAPABILITY", "avx1024")
    with pytest.raises(ValueError, match="NEMO_RL_CPU_CAPABILITY is 'avx1024', but must be one of base, avx2"):
        _native._load()
