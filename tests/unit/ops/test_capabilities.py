"""Every set of instructions that this machine has, and the tiles in software, keep the promise: a row's bits do not depend on the
rows beside it, and what generation and training compute from the same weights is equal. A process decides for one set when it
loads, so each set is a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from nemo_rl_cpp import _native
from nemo_rl_cpp._native import CPU_CAPABILITIES, C

ROOT = Path(__file__).resolve().parents[3]

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
            for rows in range(1, 301, 1 if threads == 2 and dtype is torch.bfloat16 else 13):
                assert torch.equal(op(x[:rows], w), whole[:rows]), (dtype, threads, rows)
                assert torch.equal(op(x[300 - rows :], w), whole[300 - rows :]), (dtype, threads, rows)
print(C.cpu_capability())
"""


def under(capability: str, *command: str) -> str:
    """What a process that may use this set prints."""
    run = subprocess.run(
        [sys.executable, *command], env=os.environ | {"NEMO_RL_CPU_CAPABILITY": capability}, capture_output=True, text=True, timeout=300
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.fixture(params=CPU_CAPABILITIES)
def capability(request):
    used = under(request.param, "-c", "from nemo_rl_cpp._native import C; print(C.cpu_capability())").strip()
    if used != request.param:
        pytest.skip(f"this machine has no {request.param}, {used} would be used")
    return request.param


@pytest.mark.slow
def test_rows_are_independent(capability):
    assert under(capability, "-c", PRODUCTS).strip() == capability


@pytest.mark.slow
def test_generation_equals_training(capability, tmp_path):
    under(
        capability, "-m", "nemo_rl_cpp.run_grpo_math", "--config", str(ROOT / "configs" / "grpo_tiny.yaml"),
        "policy.precision=bfloat16", "grpo.max_num_steps=3", "grpo.val_period=0", "checkpointing.enabled=false",
        f"logger.log_dir={tmp_path}",
    )  # fmt: skip
    rows = [json.loads(line) for line in next(tmp_path.rglob("metrics.jsonl")).read_text().splitlines()]
    steps = [row for row in rows if "train/max_logprob_gap" in row]
    assert len(steps) == 3
    assert all(row["train/max_logprob_gap"] == 0 and row["train/token_mult_prob_error"] == 1 for row in steps)


def test_an_unknown_set_is_said(monkeypatch):
    monkeypatch.setenv("NEMO_RL_CPU_CAPABILITY", "avx1024")
    with pytest.raises(ValueError, match="NEMO_RL_CPU_CAPABILITY is 'avx1024', but must be one of base, avx2"):
        _native._load()


def test_the_set_in_use_is_one_of_these():
    assert C.cpu_capability() in CPU_CAPABILITIES
