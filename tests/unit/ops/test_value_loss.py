import math

import numpy as np
import pytest
import torch
from nemo_rl_cpp.algorithms.loss import MseValueLossConfig, MseValueLossFn
from reference import losses as reference

CLIP = 205.5 / 1024


def case(rng):
    """Return (values, data) of a random case. All are multiples of 1/1024, between which the bounds of CLIP lie. So
    float32 holds all differences exactly, and no two squared errors are equal, for which the gradient would be
    halved."""
    B, S = int(rng.integers(1, 6)), int(rng.integers(1, 40))
    lengths = rng.integers(0, S + 1, B)
    mask = (np.arange(S)[None, :] < lengths[:, None]) & (rng.random((B, S)) < 0.9)
    exact = lambda v: np.round(v * 1024) / 1024  # noqa: E731
    old = exact(rng.normal(0, 1, (B, S)))
    v = exact(old + rng.normal(0, rng.choice([0.01, 0.5, 100.0]), (B, S)))
    data = {"returns": exact(rng.normal(0, rng.choice([1.0, 1e3]), (B, S))), "values": old,
            "token_mask": mask.astype(float), "sample_mask": (rng.random(B) < 0.8).astype(float)}  # fmt: skip
    if rng.random() < 0.3:
        hidden = (data["token_mask"] * data["sample_mask"][:, None]) == 0
        data["returns"][hidden] = v[hidden] = math.nan
    return v, data


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("dtype, rtol", [(torch.float64, 1e-6), (torch.float32, 1e-5)])
def test_value_loss_and_gradient_match_a_reference_implementation(dtype, rtol, count):
    rng = np.random.default_rng(0)
    for i in range(count):
        v, data = case(rng)
        scale, clip = float(rng.choice([1.0, 0.5])), (None, 0.0, CLIP)[rng.integers(3)]
        toks = float((data["token_mask"] * data["sample_mask"][:, None]).sum()) + float(rng.integers(0, 9))
        y = torch.as_tensor(v, dtype=torch.float64).requires_grad_()
        wide = {k: torch.as_tensor(a, dtype=torch.float64) for k, a in data.items()}
        loss, metrics = reference.mse_value_loss(y, wide, scale, clip, toks)
        fn = MseValueLossFn(MseValueLossConfig(scale=scale, cliprange=clip))
        tensors = {k: torch.as_tensor(a, dtype=dtype) for k, a in data.items()}
        x = torch.as_tensor(v, dtype=dtype).requires_grad_()
        got, found = fn(x, tensors, torch.tensor(1.0), torch.tensor(toks))
        assert set(found) == set(metrics)
        for name, value in metrics.items():
            near = rtol * math.sqrt(abs(metrics["returns_sq_mean"])) + 1e-12
            assert found[name] == pytest.approx(value, rel=rtol, abs=near), (i, name)
        assert float(got.detach()) == pytest.approx(metrics["loss"], rel=rtol, abs=1e-12)
        (grad,), (wanted,) = torch.autograd.grad(got, x), torch.autograd.grad(loss, y)
        assert torch.allclose(grad.double(), wanted, rtol=rtol, atol=rtol * max(float(wanted.abs().max()), 1e-12)), i


def test_value_loss_matches_hand_computed_values():
    """v 3, old 1, return 0, cliprange 0.5: max(9, 1.5^2) = 9 with the slope 2*3; v 1.2 is within the range: the full
    slope."""
    data = {"returns": torch.zeros(1, 2), "values": torch.ones(1, 2)}
    data |= {"token_mask": torch.ones(1, 2), "sample_mask": torch.ones(1)}
    fn = MseValueLossFn(MseValueLossConfig(cliprange=0.5))
    r = fn.native(torch.tensor([[3.0, 1.2]]), data, 1.0, 2.0)
    assert float(r.loss) == pytest.approx((9 + 1.44) / 4)
    assert r.grad_values[0].tolist() == pytest.approx([3.0 / 2, 1.2 / 2])
    low = fn.native(torch.tensor([[0.0, 0.2]]), data, 1.0, 2.0)  # clamped to 0.5: the clipped square is larger
    assert float(low.loss) == pytest.approx((0.25 + 0.25) / 4) and low.grad_values[0].tolist() == [0.0, 0.0]
    assert low.metrics["vf_clipfrac"] == pytest.approx(1.0)


def test_value_loss_sums_over_micro_batches_and_accepts_values_with_a_trailing_dimension():
    rng = np.random.default_rng(1)
    v = torch.as_tensor(rng.normal(size=(6, 30)))
    data = {k: torch.as_tensor(rng.normal(size=(6, 30))) for k in ("returns", "values")}
    data |= {"token_mask": torch.as_tensor(rng.random((6, 30)) < 0.7), "sample_mask": torch.ones(6)}
    fn = MseValueLossFn({"scale": 1.0, "cliprange": 0.2})
    whole, _ = fn(v.unsqueeze(-1), data, torch.tensor(6.0), torch.tensor(100.0))
    parts = [
        fn(v[i : i + 2], {k: t[i : i + 2] for k, t in data.items()}, torch.tensor(6.0), torch.tensor(100.0))[0]
        for i in (0, 2, 4)
    ]
    assert float(whole) == pytest.approx(float(sum(parts)), rel=1e-12)


def test_value_loss_is_zero_without_valid_tokens_and_raises_for_non_finite_values():
    data = {name: torch.zeros(2, 3) for name in ("returns", "values", "token_mask")} | {"sample_mask": torch.ones(2)}
    fn = MseValueLossFn(MseValueLossConfig())
    r = fn.native(torch.ones(2, 3), data, 2.0, 0.0)
    assert float(r.loss) == 0 and r.metrics["values_min"] == r.metrics["values_max"] == 0 and r.nonfinite is None
    data["token_mask"][1, 2] = 1
    bad = torch.ones(2, 3)
    bad[1, 2] = math.inf
    assert fn.native(bad, data, 2.0, 1.0).nonfinite == (1, 2)
