import numpy as np
import pytest
import torch
from nemo_rl_cpp import ops
from nemo_rl_cpp.algorithms.loss import ClippedPGLossConfig, ClippedPGLossFn, MseValueLossFn
from reference import loss_cases as cases

pytestmark = pytest.mark.gpu
DTYPES = [(torch.float64, 1e-9), (torch.float32, 2e-5)]


def to(value, device):
    return value.to(device) if isinstance(value, torch.Tensor) else value


def near(gpu, cpu, rtol, note=None):
    scale = float(cpu.abs().max()) if cpu.numel() else 0.0
    assert gpu.is_cuda and torch.allclose(gpu.cpu(), cpu, rtol=rtol, atol=rtol * max(scale, 1e-9)), note


@pytest.mark.parametrize("dtype, rtol", DTYPES)
def test_clipped_pg_loss_on_cuda_matches_the_cpu(dtype, rtol):
    for seed in range(300):
        rng = np.random.default_rng(seed)
        c = cases.config(rng)
        x, data = cases.batch(rng, max_len=700)
        toks, seqs = cases.counts(data)
        fn = ClippedPGLossFn(ClippedPGLossConfig(**c))
        data = {k: torch.as_tensor(v, dtype=dtype) for k, v in data.items()}
        x = torch.as_tensor(x, dtype=dtype)
        cpu = fn.native(x, data, seqs, toks)
        gpu = fn.native(x.cuda(), {k: v.cuda() for k, v in data.items()}, seqs, toks)
        near(gpu.grad_logprobs, cpu.grad_logprobs, rtol, (seed, c))
        if cpu.grad_unfiltered is not None:
            near(gpu.grad_unfiltered, cpu.grad_unfiltered, rtol, (seed, c))
        assert gpu.nonfinite == cpu.nonfinite
        for name, value in cpu.metrics.items():
            assert gpu.metrics[name] == pytest.approx(value, rel=rtol * 10, abs=rtol * 10), (seed, name)


@pytest.mark.parametrize("dtype, rtol", DTYPES)
def test_advantage_estimators_on_cuda_match_the_cpu(dtype, rtol):
    rng = np.random.default_rng(0)
    for _ in range(100):
        B, S = int(rng.integers(1, 20)), int(rng.integers(1, 3000))
        mask = torch.as_tensor(rng.random((B, S)) < 0.8)
        r, v = torch.as_tensor(rng.normal(size=B), dtype=dtype), torch.as_tensor(rng.normal(size=(B, S)), dtype=dtype)
        lp, ref = (torch.as_tensor(cases.logprobs(rng, (B, S), 1.0), dtype=dtype) for _ in range(2))
        k = ops.GAEConfig(gamma=0.99, gae_lambda=0.95, gae_lambda_value=(None, 1.0)[rng.integers(2)], length_adaptive_alpha=(0.0, 0.05)[rng.integers(2)],
                          kl_coef=0.1, normalize=bool(rng.random() < 0.5))  # fmt: skip
        cpu = ops.gae(r, v, mask, k, logprobs=lp, reference_logprobs=ref)
        gpu = ops.gae(r.cuda(), v.cuda(), mask.cuda(), k, logprobs=lp.cuda(), reference_logprobs=ref.cuda())
        near(gpu.advantages, cpu.advantages, rtol)
        near(gpu.returns, cpu.returns, rtol)
        assert gpu.degenerate == cpu.degenerate
        cpu = ops.reinforce_plus_plus(r, mask, logprobs=lp, reference_logprobs=ref, kl_coef=0.1)
        gpu = ops.reinforce_plus_plus(
            r.cuda(), mask.cuda(), logprobs=lp.cuda(), reference_logprobs=ref.cuda(), kl_coef=0.1
        )
        near(gpu.advantages, cpu.advantages, rtol)


@pytest.mark.parametrize("dtype, rtol", DTYPES)
def test_value_loss_on_cuda_matches_the_cpu(dtype, rtol):
    rng = np.random.default_rng(1)
    for _ in range(50):
        B, S = int(rng.integers(1, 20)), int(rng.integers(1, 2000))
        data = {k: torch.as_tensor(rng.normal(size=(B, S)), dtype=dtype) for k in ("returns", "values")}
        data |= {"token_mask": torch.as_tensor(rng.random((B, S)) < 0.8), "sample_mask": torch.ones(B)}
        v = torch.as_tensor(rng.normal(size=(B, S)), dtype=dtype)
        fn = MseValueLossFn({"cliprange": 0.3})
        cpu, gpu = fn.native(v, data, B, B * S), fn.native(v.cuda(), {k: t.cuda() for k, t in data.items()}, B, B * S)
        near(gpu.grad_values, cpu.grad_values, rtol)
        for name, value in cpu.metrics.items():
            assert gpu.metrics[name] == pytest.approx(value, rel=rtol * 10, abs=rtol), name


def test_repeated_losses_and_advantages_on_cuda_are_bit_identical():
    rng = np.random.default_rng(2)
    x, data = cases.batch(rng, max_rows=5, max_len=700)
    data = {k: torch.as_tensor(v, dtype=torch.float32).cuda() for k, v in data.items()}
    fn = ClippedPGLossFn(ClippedPGLossConfig())
    runs = [fn.native(torch.as_tensor(x, dtype=torch.float32).cuda(), data, 5.0, 100.0) for _ in range(5)]
    assert all(torch.equal(r.grad_logprobs, runs[0].grad_logprobs) and r.metrics == runs[0].metrics for r in runs)


def test_error_for_loss_inputs_on_two_devices_names_the_devices():
    with pytest.raises(ValueError, match="mask is on cpu; expected cuda"):
        ops.gae(
            torch.zeros(1).cuda(), torch.zeros(1, 2).cuda(), torch.ones(1, 2), ops.GAEConfig(gamma=1.0, gae_lambda=1.0)
        )
