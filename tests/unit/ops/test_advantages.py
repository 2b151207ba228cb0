import math

import numpy as np
import pytest
import torch
from nemo_rl_cpp import ops
from reference import advantages as reference
from reference import loss_cases as cases
from threads import on_threads

DTYPES = [(torch.float64, 1e-6), (torch.float32, 1e-5)]


def near(ours, wanted, rtol, note=None):
    wanted = torch.as_tensor(wanted, dtype=torch.float64)
    scale = float(wanted.abs().max()) if wanted.numel() else 0.0
    assert torch.allclose(ours.double(), wanted, rtol=rtol, atol=rtol * max(scale, 1e-9)), (note, ours, wanted)


def ragged(rng):
    B, S = int(rng.integers(1, 12)), int(rng.integers(1, 30))
    lengths = rng.integers(0, S + 1, B)
    mask = (np.arange(S)[None, :] < lengths[:, None]) & (rng.random((B, S)) < rng.choice([0.5, 0.9, 1.0]))
    if rng.random() < 0.08:
        mask[:] = False
        if rng.random() < 0.5:
            mask[rng.integers(B), rng.integers(S)] = True
    return mask.astype(np.float64)


def rewards_like(rng, n, dtype):
    kind = rng.integers(4)
    if kind == 0:
        r = rng.choice([0.0, 1.0], n)
    elif kind == 1:
        r = np.full(n, rng.choice([0.1, 0.7, -1.0]))
    else:
        r = rng.normal(0, rng.choice([1.0, 50.0]), n)
    return torch.as_tensor(r, dtype=dtype).double().numpy()


@pytest.mark.parametrize("dtype, rtol", DTYPES)
def test_group_baseline_advantages_match_a_reference_implementation(dtype, rtol):
    rng = np.random.default_rng(0)
    for _ in range(1000):
        n = int(rng.integers(1, 20))
        groups = rng.integers(0, rng.integers(1, 6), n)
        r = rewards_like(rng, n, dtype)
        q = rewards_like(rng, n, dtype) if rng.random() < 0.3 else None
        valid = (rng.random(n) < 0.8).astype(float) if rng.random() < 0.5 else np.ones(n)
        loo, normalize = bool(rng.random() < 0.5), bool(rng.random() < 0.5)
        base, std = reference.group_baseline(groups, r, valid, loo, q)
        ours = ops.group_baseline(
            torch.as_tensor(r, dtype=dtype), torch.as_tensor(groups), valid_mask=torch.as_tensor(valid), leave_one_out=loo,
            std_rewards=None if q is None else torch.as_tensor(q, dtype=dtype),
        )  # fmt: skip
        near(ours.baseline, base, rtol)
        near(ours.std, std, rtol * 10 if not valid.all() else rtol)
        adv = ops.grpo_advantages(torch.as_tensor(r, dtype=dtype), ours.baseline, ours.std, normalize=normalize)
        stored = reference.grpo(r, ours.baseline.double().numpy(), ours.std.double().numpy(), normalize)
        near(adv, stored, rtol)


def test_equal_rewards_of_any_value_give_zero_std_and_zero_advantages():
    for value in (0.1, 0.35, 0.7, 1 / 3, 1e6 + 0.1):
        for loo in (True, False):
            stats = ops.group_baseline(torch.full((7,), value), torch.zeros(7), leave_one_out=loo)
            assert not stats.std.any()
            assert not ops.grpo_advantages(torch.full((7,), value), *stats, normalize=True).any()


def test_group_ids_computed_from_prompts_are_equal_for_equal_prompts():
    prompts = torch.tensor([[1, 2, 0], [1, 2, 3], [1, 2, 0], [4, 4, 4]])
    assert ops.group_ids_from_prompts(prompts).tolist() == [0, 1, 0, 3]


@pytest.mark.parametrize("dtype, rtol", DTYPES)
def test_reinforce_plus_plus_advantages_match_a_reference_implementation(dtype, rtol):
    rng = np.random.default_rng(1)
    for i in range(1000):
        mask = ragged(rng)
        a = rewards_like(rng, mask.shape[0], dtype)
        lp, ref = cases.logprobs(rng, mask.shape, 1.0), cases.logprobs(rng, mask.shape, 1.0)
        coef, kind = float(rng.choice([0.0, 0.05])), str(rng.choice(["k1", "k2", "k3"]))
        with_kl = rng.random() < 0.6
        wanted, degenerate = reference.reinforce_plus_plus(a, mask, lp if with_kl else None, ref, coef, kind)
        if rng.random() < 0.3:
            lp[mask == 0], ref[mask == 0] = np.nan, 1e6
        t = lambda v: torch.as_tensor(v, dtype=dtype)  # noqa: E731
        ours = ops.reinforce_plus_plus(
            t(a), t(mask), logprobs=t(lp) if with_kl else None, reference_logprobs=t(ref) if with_kl else None,
            kl_coef=coef, kl_type=kind,
        )  # fmt: skip
        n, _, m2 = reference.moments(wanted, mask)
        if n and m2 / n > 1e-3:  # below that the spread is rounding
            near(ours.advantages, wanted, rtol * 20 if dtype == torch.float32 else rtol, i)
        assert not ours.advantages[torch.as_tensor(mask) == 0].any()
        assert ours.degenerate == degenerate and torch.isfinite(ours.advantages).all()


@pytest.mark.parametrize("dtype, rtol", DTYPES)
def test_raw_reward_advantages_match_a_reference_implementation(dtype, rtol):
    rng = np.random.default_rng(2)
    for _ in range(300):
        mask = ragged(rng)
        r = rewards_like(rng, mask.shape[0], dtype)
        tokens = np.repeat(r[:, None], mask.shape[1], 1)
        plain = ops.raw_reward(torch.as_tensor(r, dtype=dtype), torch.as_tensor(mask), normalize=False)
        near(plain.advantages, tokens, rtol)
        wanted, degenerate = reference.whiten_biased(tokens, mask, False)
        ours = ops.raw_reward(torch.as_tensor(r, dtype=dtype), torch.as_tensor(mask), normalize=True)
        assert ours.degenerate == degenerate and ours.returns is None
        if reference.moments(tokens, mask)[2] > 1e-3:
            near(ours.advantages, wanted, rtol)


def gae_case(rng, dtype):
    mask = ragged(rng)
    k = {
        "gamma": float(rng.choice([1.0, 0.99, 0.5])),
        "lam": float(rng.choice([0.0, 0.5, 0.95, 1.0])),
        "lam_value": None if rng.random() < 0.6 else float(rng.choice([1.0, 0.9])),
        "lam_policy": None if rng.random() < 0.6 else float(rng.choice([0.8, 0.97])),
        "alpha": float(rng.choice([0.0, 0.0, 0.05, 1.0])),
        "normalize": bool(rng.random() < 0.5),
    }
    values = torch.as_tensor(rng.normal(0, rng.choice([1.0, 20.0]), mask.shape), dtype=dtype).double().numpy()
    if rng.random() < 0.5:
        k |= {"logprobs": cases.logprobs(rng, mask.shape, 1.0), "reference": cases.logprobs(rng, mask.shape, 1.0),
              "kl_coef": 0.1, "kl_type": str(rng.choice(["k1", "k2", "k3"]))}  # fmt: skip
    return mask, rewards_like(rng, mask.shape[0], dtype), values, k


def run_gae(mask, rewards, values, k, dtype):
    t = lambda v: None if v is None else torch.as_tensor(v, dtype=dtype)  # noqa: E731
    decoupled = k["lam_value"] is not None or k["lam_policy"] is not None or k["alpha"] > 0
    lam_value = (k["lam"] if k["lam_value"] is None else k["lam_value"]) if decoupled else None
    config = ops.GAEConfig(
        gamma=k["gamma"], gae_lambda=k["lam"] if k["lam_policy"] is None else k["lam_policy"], gae_lambda_value=lam_value,
        length_adaptive_alpha=k["alpha"], kl_coef=k.get("kl_coef", 0.0), kl_type=k.get("kl_type", "k3"), normalize=k["normalize"],
    )  # fmt: skip
    return ops.gae(
        t(rewards), t(values), torch.as_tensor(mask), config, logprobs=t(k.get("logprobs")), reference_logprobs=t(k.get("reference"))
    )  # fmt: skip


@pytest.mark.parametrize("dtype, rtol", DTYPES)
def test_gae_advantages_and_returns_match_a_reference_implementation(dtype, rtol):
    rng = np.random.default_rng(3)
    for i in range(1000):
        mask, rewards, values, k = gae_case(rng, dtype)
        wanted = reference.gae(rewards, values, mask, **k, eps=1e-8 if dtype == torch.float64 else 0.0)
        ours = run_gae(mask, rewards, values, k, dtype)
        near(ours.advantages, wanted[0], rtol, (i, k))
        near(ours.returns, wanted[1], rtol, (i, k))
        assert ours.degenerate == wanted[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("normalize", [False, True])
def test_critic_values_at_masked_positions_do_not_change_gae(dtype, normalize):
    rng = np.random.default_rng(4)
    for hostile in (1e6, -1e6, math.nan, math.inf):
        mask, rewards, values, k = gae_case(rng, dtype)
        k["normalize"] = normalize
        before = run_gae(mask, rewards, values, k, dtype)
        for key in ("logprobs", "reference"):
            if key in k:
                k[key] = np.where(mask != 0, k[key], hostile)
        after = run_gae(mask, rewards, np.where(mask != 0, values, hostile), k, dtype)
        assert torch.equal(before.advantages, after.advantages)
        valid = torch.as_tensor(mask) != 0
        assert torch.equal(before.returns[valid], after.returns[valid])


def test_gae_with_lambda_1_is_the_monte_carlo_advantage_and_with_lambda_0_the_td_error():
    """One row with gamma 0.5 and a reward of 8 at the last valid token: returns are 8 gamma^k, TD errors r + gamma V' -
    V."""
    mask = torch.tensor([[0, 1, 1, 0, 1]])
    values = torch.tensor([[9.0, 1.0, 2.0, 9.0, 4.0]], dtype=torch.float64)
    rewards = torch.tensor([8.0], dtype=torch.float64)
    mc = ops.gae(rewards, values, mask, ops.GAEConfig(gamma=0.5, gae_lambda=1.0))
    assert mc.returns[0, [1, 2, 4]].tolist() == [2.0, 4.0, 8.0]
    assert mc.advantages[0].tolist() == [0.0, 1.0, 2.0, 0.0, 4.0]
    td = ops.gae(rewards, values, mask, ops.GAEConfig(gamma=0.5, gae_lambda=0.0))
    assert td.advantages[0].tolist() == [0.0, 0.5 * 2 - 1, 0.5 * 4 - 2, 0.0, 8.0 - 4.0]


def test_advantage_estimators_are_bit_identical_for_any_number_of_threads():
    rng = np.random.default_rng(5)
    mask = torch.as_tensor(rng.random((64, 900)) < 0.8)
    rewards, values = (torch.as_tensor(rng.normal(size=size)).float() for size in (64, mask.shape))

    def estimate():
        g = ops.gae(rewards, values, mask, ops.GAEConfig(gamma=0.99, gae_lambda=0.95, normalize=True))
        return g.advantages, g.returns, ops.reinforce_plus_plus(rewards, mask).advantages

    results = on_threads(estimate)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_gae_of_a_sample_does_not_depend_on_other_samples_in_the_batch():
    rng = np.random.default_rng(6)
    mask = torch.as_tensor(rng.random((19, 50)) < 0.8)
    rewards, values = torch.as_tensor(rng.normal(size=19)), torch.as_tensor(rng.normal(size=(19, 50)))
    config = ops.GAEConfig(gamma=0.99, gae_lambda=0.95)
    whole = ops.gae(rewards, values, mask, config)
    for i in range(19):
        alone = ops.gae(*(x[i : i + 1] for x in (rewards, values, mask)), config)
        assert torch.equal(alone.advantages[0], whole.advantages[i]) and torch.equal(alone.returns[0], whole.returns[i])


def test_advantages_with_a_kl_penalty_but_without_logprobs_are_an_error():
    with pytest.raises(ValueError, match="one is missing"):
        ops.gae(
            torch.ones(1), torch.zeros(1, 2), torch.ones(1, 2), ops.GAEConfig(gamma=1.0, gae_lambda=1.0, kl_coef=0.1),
            logprobs=torch.zeros(1, 2),
        )  # fmt: skip
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        ops.reinforce_plus_plus(torch.ones(1), torch.ones(1, 2), kl_type="k9")


def test_advantage_estimators_are_bit_identical_for_ragged_and_padded_batches():
    """Lengths are 0 to 1,500, so that rows have several blocks, one block or none."""
    rng = np.random.default_rng(8)
    lengths = torch.as_tensor([1500, 0, 1, 7, 8, 600, 512, 513, *rng.integers(0, 900, 30)])
    offsets, width = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]), int(lengths.max())
    inside = torch.arange(width)[None] < lengths[:, None]

    for dtype in (torch.float32, torch.float64):
        for decoupled in (None, 0.9):
            shape = (len(lengths), width)
            mask = ((torch.as_tensor(rng.random(shape)) < 0.8) & inside).to(dtype)
            values, logprobs, other = (torch.as_tensor(rng.normal(0, 1, shape)).to(dtype) for _ in range(3))
            rewards = torch.as_tensor(rng.normal(0, 1, len(lengths))).to(dtype)
            config = ops.GAEConfig(
                gamma=0.99, gae_lambda=0.95, gae_lambda_value=decoupled, length_adaptive_alpha=0.05, kl_coef=0.1, normalize=True
            )  # fmt: skip
            kl = {"logprobs": logprobs, "reference_logprobs": other}
            flat = {name: value[inside] for name, value in kl.items()}
            for padded, free in [
                (ops.gae(rewards, values, mask, config, **kl), ops.gae(rewards, values[inside], mask[inside], config, **flat, offsets=offsets)),
                (ops.reinforce_plus_plus(rewards, mask, **kl, kl_coef=0.1), ops.reinforce_plus_plus(rewards, mask[inside], **flat, kl_coef=0.1, offsets=offsets)),
                (ops.raw_reward(rewards, mask, normalize=True), ops.raw_reward(rewards, mask[inside], normalize=True, offsets=offsets)),
            ]:  # fmt: skip
                assert padded.degenerate == free.degenerate and torch.equal(padded.advantages[inside], free.advantages)
                assert (padded.returns is None) == (free.returns is None)
                assert free.returns is None or torch.equal(padded.returns[inside], free.returns)


def test_grpo_advantages_of_rewards_and_baselines_with_different_shapes_raise_value_error():
    with pytest.raises(ValueError, match=r"have the shapes \[2\], \[2, 1\], \[2\]: expected \[B\] for all"):
        ops.grpo_advantages(torch.ones(2), torch.ones(2, 1), torch.ones(2), normalize=True)


@pytest.mark.parametrize("offsets, tokens, words", [
    ([0, 2, 3], 4, "offsets must go up from 0 to 4"), ([0, 4, 3], 3, "offsets must go up from 0 to 3"), ([1, 2, 3], 3, "offsets must go up"),
    ([0, 3], 3, r"offsets have shape \[2\]; expected int64 \[3\]"), (None, 3, r"expected \[B, S\]"),
])  # fmt: skip
def test_invalid_sample_offsets_of_a_ragged_batch_raise_value_error(offsets, tokens, words):
    given = None if offsets is None else torch.tensor(offsets)
    with pytest.raises(ValueError, match=words):
        ops.raw_reward(torch.ones(2), torch.ones(tokens), normalize=True, offsets=given)
