import math

import numpy as np
import pytest
import tiny
import torch
from nemo_rl_cpp import ops
from nemo_rl_cpp.algorithms.loss import ClippedPGLossConfig, ClippedPGLossFn
from reference import loss_cases as cases
from reference import losses as reference
from threads import on_threads

FEW = 120  # drawn cases of each loss in the default suite


def tensors(data, dtype):
    return {k: torch.as_tensor(v, dtype=dtype) for k, v in data.items()}


def close(ours, expected, rtol, scale=1.0):
    return math.isclose(ours, expected, rel_tol=rtol, abs_tol=rtol * scale)


class Differences(dict):
    """The largest relative difference noted so far, by kind."""

    def note(self, kind, difference):
        self[kind] = max(self.get(kind, 0.0), difference)


def run_case(name, seed, found):
    """Compare the loss `name` on the random case `seed`, in float64 and float32, with the reference; note differences
    in `found`."""
    rng = np.random.default_rng([seed, *name.encode()])
    c = cases.config(rng, name)
    x, data = cases.batch(rng, max_len=40 if seed % 20 == 0 else 6)
    toks, seqs = cases.counts(data)
    extra = float(rng.integers(0, 50))  # the micro-batch is a part of a larger batch
    toks, seqs = toks + extra, seqs + extra
    positive = float(rng.integers(1, 40)) if rng.random() < 0.5 else None
    xt = torch.as_tensor(x, dtype=torch.float64).requires_grad_()
    dt = tensors(data, torch.float64)
    if "curr_logprobs_unfiltered" in dt:
        dt["curr_logprobs_unfiltered"].requires_grad_()
    leaves = [xt, dt.get("curr_logprobs_unfiltered", xt)]
    largest = float(torch.finfo(torch.float32).max)  # no case has a weight between this and the largest float64
    loss, metrics = reference.clipped_pg_loss(xt, dt, c, toks, seqs, positive, largest)
    wanted = torch.autograd.grad(loss, leaves, allow_unused=True)
    scale = max(1.0, *(abs(v) for v in metrics.values() if math.isfinite(v)))

    def without(term):
        part, _ = reference.clipped_pg_loss(xt, dt, c | {term: 0.0}, toks, seqs, positive, largest)
        return max(float(g.abs().max()) for g in torch.autograd.grad(part, leaves, allow_unused=True) if g is not None)

    fn = ClippedPGLossFn(ClippedPGLossConfig(**c | ({} if name == "on_policy" else {"name": name})))
    for dtype, rtol in ((torch.float64, 1e-6), (torch.float32, 1e-5)):
        result = fn.native(torch.as_tensor(x, dtype=dtype), tensors(data, dtype), seqs, toks, positive)
        for metric, value in metrics.items():
            terms = scale if metric in ("loss", "kl_penalty", "approx_entropy") else max(1e-3, abs(value))
            assert close(result.metrics[metric], value, rtol, terms), (seed, metric, result.metrics[metric], value, c)
        assert set(result.metrics) == set(metrics)
        assert result.nonfinite is None
        found.note(f"{dtype} loss", abs(result.metrics["loss"] - metrics["loss"]) / scale)
        for ours, theirs in zip((result.grad_logprobs, result.grad_unfiltered), wanted, strict=True):
            if ours is not None:
                may_cancel = dtype == torch.float32 and seed >= FEW
                difference = check_gradient(ours, theirs, rtol, without if may_cancel else None, (seed, c))
                found.note(f"{dtype} gradient", difference)


def check_gradient(ours, wanted, rtol, without, note):
    """Check `ours` against `wanted`, and return the largest difference relative to the largest element of `wanted`.
    `without(term)` returns the gradient's scale without a term of the loss: if terms cancel each other, a difference
    may be relative to the largest of them. None: not allowed."""
    wanted = torch.zeros_like(ours, dtype=torch.float64) if wanted is None else wanted
    if not wanted.numel():
        return 0.0
    scale, difference = max(1e-12, float(wanted.abs().max())), (ours.double() - wanted).abs()
    if without is not None and (difference > rtol * (scale + wanted.abs())).any():
        scale = max(scale, *(without(f) for f in ("reference_policy_kl_penalty", "positive_example_nll_weight")))
    assert (difference <= rtol * (scale + wanted.abs())).all(), note
    return float(difference.max()) / scale


@pytest.mark.parametrize("count", [FEW, pytest.param(10_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", cases.LOSSES)
def test_every_policy_gradient_loss_matches_a_reference_implementation(name, count, capsys):
    tiny.one_thread()
    found = Differences()
    for seed in range(count):
        run_case(name, seed, found)
    if count == 10_000:
        with capsys.disabled():
            print(f"\n{name}: {count} cases", *(f"{kind} {value:.1e}" for kind, value in found.items()), sep=", ")


def constant_data(tokens, dtype=torch.float64, **changes):
    """Return the inputs of one sequence with old log-probabilities of -1 and advantages of 1, with `changes`."""
    logprobs = torch.full((1, tokens), -1.0, dtype=dtype)
    ones = {
        "advantages": torch.ones_like(logprobs),
        "token_mask": torch.ones_like(logprobs),
        "sample_mask": torch.ones(1),
    }
    return ones | {"prev_logprobs": logprobs, "generation_logprobs": logprobs} | changes


def one_row(ratios, advantage, penalty=None, **config):
    """Return the native result for one sequence with the probability ratios `ratios` and old log-probabilities of
    -1."""
    data = constant_data(len(ratios) + 1, kl_cov_penalty=penalty)
    data["advantages"] *= advantage
    x = data["prev_logprobs"][:, 1:] + torch.tensor([ratios], dtype=torch.float64).log()
    fn = ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=0.0, **config))
    return fn.native(x, data, torch.tensor(1.0), torch.tensor(float(len(ratios))))


E, LOG2 = math.e, math.log(2.0)
GMPO = dict(name="gmpo", ratio_clip_min=0.4, ratio_clip_max=0.4)
DPPO = dict(name="dppo_tv", ratio_clip_min=0.1, ratio_clip_max=0.1)
BY_HAND = {  # prev log-prob -1: (ratios, advantage, settings, loss, its slope at each token)
    # clip 0.2, A = 1: C = -min(R, clip R) = -0.5, -1, -1.2; A = -1: C = 0.8, 1, 1.5
    "clip, A > 0": ([0.5, 1.0, 1.5], 1.0, {}, -(0.5 + 1.0 + 1.2) / 3, [-0.5 / 3, -1 / 3, 0.0]),
    "clip, A < 0": ([0.5, 1.0, 1.5], -1.0, {}, (0.8 + 1.0 + 1.5) / 3, [0.0, 1 / 3, 1.5 / 3]),
    # C = min(2 R, 6): ratio 4 costs 6 and has no slope
    "dual clip": ([4.0, 2.0], -2.0, dict(ratio_clip_c=3.0), (6.0 + 4.0) / 2, [0.0, 2.0]),
    # the geometric mean of 0.5 and 2 is 1: the row's ratio is 1, and each token's slope is half of A R
    "gspo": ([0.5, 2.0], 1.0, dict(sequence_level_importance_ratios=True, token_level_loss=False), -1.0, [-0.5, -0.5]),
    # at R = 1 the gate is 1/2: C = -A 2/tau, and the slope in x is A, whatever tau; far away the gradient vanishes
    "sapo, A > 0": ([1.0, 1.0], 1.0, dict(name="sapo", sapo_temperature_pos=0.5), -4.0, [-0.5, -0.5]),
    "sapo, A < 0": ([1.0, 1e4], -1.0, dict(name="sapo", sapo_temperature_neg=2.0), (1.0 + 2.0) / 2, [0.5, 0.0]),
    # a probability of 0.37 that doubles moves by 0.37: beyond the bound and in A's direction there is no gradient; else it
    # is -A min(R, cap)
    "dppo, A > 0": ([2.0, 1.1, 0.5], 1.0, DPPO, -(1.1 * (-1 + math.log(1.1)) + 0.5 * (-1 - LOG2)) / 3,
                    [0.0, -1.1 / 3, -0.5 / 3]),
    "dppo, A < 0": ([2.0, 1.1, 0.5], -1.0, DPPO | dict(ratio_clip_c=1.5),
                    (1.5 * (LOG2 - 1) + 1.1 * (-1 + math.log(1.1))) / 3, [1.5 / 3, 1.1 / 3, 0.0]),
    # C = -(A x - beta/2 log(2)^2) with x = -1 + log 2
    "dro": ([2.0], 3.0, dict(name="dro", dro_beta=0.5), -(3.0 * (LOG2 - 1) - 0.25 * LOG2**2), [0.5 * LOG2 - 3.0]),
    # log ratios 1 and -1, bounds 0.4: for A > 0 the first counts as 0.4 and has no slope, for A < 0 the second as -0.4
    "gmpo, A > 0": ([E, 1 / E], 1.0, GMPO, -math.exp(-0.3), [0.0, -math.exp(-0.3) / 2]),
    "gmpo, A < 0": ([E, 1 / E], -1.0, GMPO, math.exp(0.3), [math.exp(0.3) / 2, 0.0]),
    # ratios 2 and 1/2 make W = 1 and phi = 1: plain policy gradient; W = 4: phi = e^(3 (1 - 4)) 4^2 for A >= 0,
    # e^(2 (1 - 4)) 4^3 for A < 0
    "vespo, W = 1": ([2.0, 0.5], 1.0, dict(name="vespo"), 1.0, [-0.5, -0.5]),
    "vespo, A > 0": ([2.0, 2.0], 1.0, dict(name="vespo"), 16 * math.exp(-9) * (1 - LOG2), [-8 * math.exp(-9)] * 2),
    "vespo, A < 0": ([2.0, 2.0], -1.0, dict(name="vespo"), 64 * math.exp(-6) * (LOG2 - 1), [32 * math.exp(-6)] * 2),
    # penalty 3 at the first token: C = -2 + 3 log 2 and -0.5; slopes -2 + 3 and -0.5, without a clip
    "kl_cov": ([2.0, 0.5], 1.0, dict(name="kl_cov"), (-2.0 + 3 * LOG2 - 0.5) / 2, [0.5, -0.25]),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_HAND)
def test_policy_gradient_losses_and_gradients_match_hand_computed_values(case):
    ratios, advantage, settings, loss, slopes = BY_HAND[case]
    penalty = torch.tensor([[0.0, 3.0, 0.0]], dtype=torch.float64) if case == "kl_cov" else None
    result = one_row(ratios, advantage, penalty, **settings)
    assert float(result.loss) == pytest.approx(loss, rel=1e-6)
    assert result.grad_logprobs[0].tolist() == pytest.approx(slopes, rel=1e-6)


def test_dppo_kl_loss_has_zero_gradient_for_tokens_beyond_its_kl_bound():
    kl = math.exp(-1) * -math.log(2.0) + (1 - math.exp(-1)) * math.log((1 - math.exp(-1)) / (1 - 2 * math.exp(-1)))
    for bound, slope in ((kl * 1.01, -2.0), (kl * 0.99, 0.0)):
        result = one_row([2.0], 1.0, name="dppo_kl", ratio_clip_max=bound)
        assert result.grad_logprobs.item() == pytest.approx(slope, rel=1e-6)


def test_infinite_gspo_ratio_is_clipped_or_reported_as_non_finite():
    """The infinite ratio of a row counts only at its valid tokens; masked tokens stay 0 instead of 0 * inf."""
    mask, prev = torch.tensor([[0.0, 1.0, 1.0, 1.0, 0.0]]), torch.tensor([[-1.0, -1.0, -torch.inf, -1.0, -1.0]])
    data = constant_data(5, torch.float32, token_mask=mask, prev_logprobs=prev)
    gspo = {"sequence_level_importance_ratios": True, "token_level_loss": False, "reference_policy_kl_penalty": 0.0}

    def loss(advantage):
        given = data | {"advantages": torch.full((1, 5), advantage)}
        return ClippedPGLossFn(ClippedPGLossConfig(**gspo)).native(torch.full((1, 4), -1.0), given, 1.0, 3.0, None)

    clipped = loss(1.0)  # A > 0: the ratio is clipped to 1.2, the loss is -1.2, and there is no gradient
    assert float(clipped.loss) == pytest.approx(-1.2) and not clipped.grad_logprobs.any() and clipped.nonfinite is None
    open_ended = loss(-1.0)  # A < 0: nothing bounds it, which is said with the token whose ratio it was
    assert float(open_ended.loss) == torch.inf and open_ended.nonfinite == (0, 1)


def test_token_of_zero_probability_under_the_new_policy_is_reported_with_row_and_position():
    """Its ratio e^-inf is 0, and so are its loss and gradient; its entropy is NaN."""
    data = constant_data(5, torch.float32, token_mask=torch.tensor([[0.0, 1.0, 1.0, 1.0, 0.0]]))
    curr = torch.full((1, 4), -1.0)
    curr[0, 3] = -torch.inf  # a masked token does not count
    loss_fn = ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=0.0))
    assert loss_fn.native(curr, data, 1.0, 3.0, None).nonfinite is None
    curr[0, 2] = -torch.inf
    result = loss_fn.native(curr, data, 1.0, 3.0, None)
    assert torch.isfinite(result.loss) and torch.isfinite(result.grad_logprobs).all() and result.nonfinite == (0, 2)


def test_sequence_level_importance_weights_match_hand_computed_values():
    """The weights are 4 and 1, their product 4, their geometric mean 2. R = 1, so C = -A W with A = 1."""
    prev = torch.full((1, 3), -1.0, dtype=torch.float64)
    data = constant_data(3, generation_logprobs=prev - torch.tensor([[0.0, math.log(4.0), 0.0]], dtype=torch.float64))
    for kind, bounds, weight in (
        ("seq-tis", (0.0, 3.0), 3.0), ("seq-icepop", (0.5, 3.0), 0.0), ("seq-icepop", (0.5, 5.0), 4.0),
        ("geo-tis", (0.0, 1.5), 1.5), ("geo-icepop", (0.5, 3.0), 2.0), ("geo-icepop", (0.5, 1.5), 0.0),
    ):  # fmt: skip
        config = ClippedPGLossConfig(
            reference_policy_kl_penalty=0.0, use_importance_sampling_correction=True, truncated_importance_sampling_type=kind,
            truncated_importance_sampling_ratio_min=bounds[0], truncated_importance_sampling_ratio=bounds[1],
        )  # fmt: skip
        result = ClippedPGLossFn(config).native(prev[:, 1:], data, 1.0, 2.0)
        assert float(result.loss) == pytest.approx(-weight, rel=1e-6), kind
        assert result.metrics["sampling_importance_ratio"] == pytest.approx(weight, rel=1e-6), kind


def test_bypass_mode_uses_generation_logprobs_as_old_logprobs():
    x, data = random_batch(12, 3, 20)
    same = data | {"prev_logprobs": data["generation_logprobs"]}
    plain = ClippedPGLossFn(ClippedPGLossConfig()).native(x, same, 3.0, 30.0)
    del data["prev_logprobs"]
    bypassed = ClippedPGLossFn(ClippedPGLossConfig(bypass_mode=True)).native(x, data, 3.0, 30.0)
    assert torch.equal(bypassed.grad_logprobs, plain.grad_logprobs) and bypassed.metrics == plain.metrics


def test_loss_aggregation_modes_match_hand_computed_values():
    """One sequence with three tokens of R = 1 and A = 1: the mean is -1, the sum -3, the sum divided by 12 is -1/4."""
    for name, loss in (("grpo", -1.0), ("dapo", -1.0), ("luspo", -3.0), ("dr_grpo", -0.25)):
        scale = {"loss_scale_factor": 12.0} if name == "dr_grpo" else {}
        assert float(one_row([1.0] * 3, 1.0, name=name, **scale).loss) == pytest.approx(loss, rel=1e-6), name


def test_kl_term_and_its_gradient_match_hand_computed_values():
    """r = log 2 everywhere: k3 = 2 - 1 - log 2; its slope in log pi is k - (e^r - 1), with the score-function term."""
    x, zeros = torch.zeros(1, 2, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.float64)
    data = constant_data(3, advantages=zeros, prev_logprobs=zeros, generation_logprobs=zeros)
    data["reference_policy_logprobs"] = zeros + math.log(2.0)
    fn = ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=0.5))
    r = fn.native(x, data, torch.tensor(1.0), torch.tensor(2.0))
    k3 = 1 - math.log(2.0)
    assert float(r.loss) == pytest.approx(0.5 * k3, rel=1e-7)
    assert r.metrics["kl_penalty"] == pytest.approx(k3, rel=1e-7)
    assert r.grad_logprobs[0].tolist() == pytest.approx([0.25 * (k3 - 1)] * 2, rel=1e-7)


def test_probability_ratio_exactly_at_the_clip_bound_has_a_nonzero_gradient():
    x, zeros = torch.tensor([[math.log(1.5)]], dtype=torch.float64), torch.zeros(1, 2, dtype=torch.float64)
    data = constant_data(2, prev_logprobs=zeros, generation_logprobs=zeros)
    bound = float(torch.exp(x)[0, 0]) - 1.0
    for clip, slope in ((bound, -1.5), (bound - 1e-9, 0.0)):
        fn = ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=0.0, ratio_clip_max=clip))
        assert float(fn.native(x, data, 1.0, 1.0).grad_logprobs) == pytest.approx(slope, abs=1e-6)


def random_batch(seed, rows, length, dtype=torch.float64):
    rng = np.random.default_rng(seed)
    gen = cases.logprobs(rng, (rows, length), 1.0)
    data = {
        "generation_logprobs": gen, "prev_logprobs": gen + rng.normal(0, 0.1, gen.shape),
        "reference_policy_logprobs": gen + rng.normal(0, 0.3, gen.shape), "advantages": rng.normal(0, 1, gen.shape),
        "token_mask": (rng.random(gen.shape) < 0.7).astype(float), "sample_mask": np.ones(rows),
        "rewards": rng.choice([-1.0, 1.0], rows), "kl_cov_penalty": (rng.random(gen.shape) < 0.2).astype(float),
    }  # fmt: skip
    return torch.as_tensor(gen[:, 1:] + rng.normal(0, 0.1, (rows, length - 1)), dtype=dtype), tensors(data, dtype)


OF_ROWS = {"seq-mask": "seq-mask-tis", "seq": "seq-tis", "geo": "geo-icepop"}


@pytest.mark.parametrize("mode", ["sequence", *OF_ROWS, *(name for name in cases.LOSSES if name != "on_policy")])
def test_losses_and_gradients_of_micro_batches_sum_to_those_of_the_full_batch(mode):
    config = {"positive_example_nll_weight": 0.1, "token_level_loss": mode != "sequence", "loss_scale_factor": 7.0}
    if mode in cases.LOSSES:
        config |= {"name": mode} | {"token_level_loss": cases.LOSSES[mode].get("token_level_loss", True)}
    if mode in OF_ROWS:
        config |= dict(use_importance_sampling_correction=True, truncated_importance_sampling_type=OF_ROWS[mode],
                       truncated_importance_sampling_ratio=1.02, truncated_importance_sampling_ratio_min=0.98)  # fmt: skip
    x, data = random_batch(3, 8, 50)
    fn = ClippedPGLossFn(ClippedPGLossConfig(**config))
    toks, seqs = cases.counts({k: v.numpy() for k, v in data.items()})
    positive = float((data["token_mask"][:, 1:].sum(1) * (data["rewards"] > 0)).sum())
    whole = fn.native(x, data, seqs, toks, positive)
    for size in (1, 2, 4):
        parts = [
            fn.native(x[i : i + size], {k: v[i : i + size] for k, v in data.items()}, seqs, toks, positive)
            for i in range(0, 8, size)
        ]
        assert torch.equal(torch.cat([p.grad_logprobs for p in parts]), whole.grad_logprobs)
        for name, value in whole.metrics.items():
            if not name.endswith(("_min", "_max")):
                assert sum(p.metrics[name] for p in parts) == pytest.approx(value, rel=1e-12, abs=1e-15), name


def test_clipped_pg_loss_is_bit_identical_for_any_number_of_threads():
    x, data = random_batch(5, 64, 700, torch.float32)
    fn = ClippedPGLossFn(ClippedPGLossConfig())
    results = on_threads(lambda: fn.native(x, data, 64.0, 30000.0))
    for other in results[1:]:
        assert torch.equal(other.grad_logprobs, results[0].grad_logprobs)
        assert other.metrics == results[0].metrics


def test_clipped_pg_loss_is_bit_identical_for_any_padding_and_stride():
    x, data = random_batch(6, 4, 40, torch.float32)
    fn = ClippedPGLossFn(ClippedPGLossConfig())
    plain = fn.native(x, data, 4.0, 100.0)
    wide = {k: (torch.nn.functional.pad(v, (0, 300), value=0.0) if v.ndim == 2 else v) for k, v in data.items()}
    padded = fn.native(torch.nn.functional.pad(x, (0, 300)), wide, 4.0, 100.0)
    assert torch.equal(padded.grad_logprobs[:, :39], plain.grad_logprobs) and padded.metrics == plain.metrics
    strided = {k: (torch.nn.functional.pad(v, (0, 7))[:, :40] if v.ndim == 2 else v) for k, v in data.items()}
    again = fn.native(torch.nn.functional.pad(x, (3, 2))[:, 3:42], strided, 4.0, 100.0)
    assert torch.equal(again.grad_logprobs, plain.grad_logprobs) and again.metrics == plain.metrics


@pytest.mark.parametrize("mode", ["ppo", "on_policy", "reinforce"])
def test_large_logprob_gap_of_one_token_does_not_change_the_loss_of_other_tokens(mode):
    """The kernel computes sixteen tokens without exponentials if all their gaps are small."""
    x, data = random_batch(11, 2, 49, torch.float32)
    data["token_mask"][:] = 1
    data["sample_mask"] = torch.tensor([1.0, 0.5])
    noise = 0.01 * torch.randn(2, 49, generator=torch.Generator().manual_seed(0))
    data["prev_logprobs"] = x_full = torch.nn.functional.pad(x, (1, 0)) + noise
    data["generation_logprobs"] = x_full + 0.01
    config = ops.ClippedPGConfig(
        ratio_mode=mode, kl_penalty=0.1, use_on_policy_kl_approximation=True, importance_sampling="full"
    )
    data = {name: value for name, value in data.items() if name not in ("rewards", "kl_cov_penalty")}
    near = ops.clipped_pg_loss(x, ops.ClippedPGInputs(**data), config=config)
    data["generation_logprobs"] = data["generation_logprobs"].clone()
    data["generation_logprobs"][:, 21] -= 1.5
    far = ops.clipped_pg_loss(x, ops.ClippedPGInputs(**data), config=config)
    others = torch.arange(48) != 20
    assert torch.equal(far.grad_logprobs[:, others], near.grad_logprobs[:, others])
    assert not torch.equal(far.grad_logprobs[:, 20], near.grad_logprobs[:, 20])
    doubles = ops.ClippedPGInputs(**{k: v.double() for k, v in data.items()})
    double = ops.clipped_pg_loss(x.double(), doubles, config=config)
    torch.testing.assert_close(far.grad_logprobs.double(), double.grad_logprobs, rtol=2e-6, atol=1e-8)
    for name, value in double.metrics.items():
        assert far.metrics[name] == pytest.approx(value, rel=2e-6, abs=1e-7), name


def test_policy_gradient_loss_accepts_expanded_advantages_and_integer_masks():
    x, data = random_batch(7, 3, 20)
    fn = ClippedPGLossFn(ClippedPGLossConfig())
    data["advantages"] = torch.tensor([[1.0], [-1.0], [0.5]], dtype=torch.float64).expand(3, 20)
    plain = fn.native(x, data, 3.0, 30.0)
    data["token_mask"], data["sample_mask"] = data["token_mask"].bool(), data["sample_mask"].int()
    data["advantages"] = data["advantages"].contiguous()
    assert torch.equal(fn.native(x, data, 3.0, 30.0).grad_logprobs, plain.grad_logprobs)


def test_policy_gradient_loss_is_zero_if_no_token_is_valid():
    x, data = random_batch(8, 3, 20)
    data["sample_mask"] = torch.zeros(3)
    r = ClippedPGLossFn(ClippedPGLossConfig()).native(x, data, 0.0, 0.0)
    assert float(r.loss) == 0.0 and not r.grad_logprobs.any()
    assert r.metrics["probs_ratio_min"] == math.inf and r.metrics["probs_ratio_max"] == -math.inf


def test_overflowing_probability_ratio_is_reported_with_row_and_token():
    """With a negative advantage the loss is infinite, as in NeMo RL."""
    x, data = random_batch(9, 3, 20)
    data["token_mask"][:] = 1
    x[1, 7] += 1e4
    data["advantages"][1, 8] = -1.0
    fn = ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=0.0))
    r = fn.native(x, data, 3.0, 57.0)
    assert math.isinf(r.metrics["loss"]) and r.nonfinite == (1, 7)
    data["advantages"][1, 8] = 1.0  # clipped away: finite, and no slope
    r = fn.native(x, data, 3.0, 57.0)
    assert math.isfinite(float(r.loss)) and r.grad_logprobs[1, 7] == 0 and torch.isfinite(r.grad_logprobs).all()


def test_error_for_invalid_or_missing_loss_inputs_names_the_tensor():
    x, data = random_batch(10, 3, 20)
    with pytest.raises(ValueError, match=r"advantages has shape \[3, 19\]; expected \[3, 20\]"):
        ops.clipped_pg_loss(x, ops.ClippedPGInputs(**data | {"advantages": data["advantages"][:, 1:]}))
    with pytest.raises(ValueError, match="prev_logprobs is missing"):
        ops.clipped_pg_loss(x, ops.ClippedPGInputs(**{k: v for k, v in data.items() if k != "prev_logprobs"}))
