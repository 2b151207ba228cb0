import numpy as np
import pytest
import tiny
import torch
from nemo_rl_cpp._native import C
from nemo_rl_cpp.algorithms.loss import ClippedPGLossConfig, ClippedPGLossFn
from nemo_rl_cpp.config.policy import PolicyConfig
from nemo_rl_cpp.data.tiny_tokenizer import tiny_tokenizer
from nemo_rl_cpp.distributed.ragged_batch import BatchedDataDict
from nemo_rl_cpp.models.policy.lm_policy import Policy
from paired_prompts import to_train
from reference import sampling as reference
from row_batch import padded_rows
from test_gradient_invariance import model_of

RULES = [(1.0, 1.0, 3), (1.0, 0.9, 0), (0.7, 0.5, 0), (2.0, 0.999, 40), (1.3, 0.8, 20), (1.0, 1e-6, 0), (1.0, 1.0, 1)]


def rows(random: torch.Generator, count: int, V: int) -> torch.Tensor:
    """Ordinary, peaked and flat rows, some with -inf entries and ties."""
    scale = torch.tensor([2.5, 8.0, 0.3])[torch.randint(0, 3, (count, 1), generator=random)]
    x = torch.randn(count, V, generator=random, dtype=torch.float64) * scale
    x = torch.where(torch.rand(count, 1, generator=random) < 0.2, x.round(), x)
    hidden = (torch.rand(count, V, generator=random) < 0.3) & (torch.rand(count, 1, generator=random) < 0.3)
    return x.masked_fill(hidden, -torch.inf).index_fill(1, torch.tensor([V // 2]), 1.0)


def boundary_is_clear(row: np.ndarray, temperature: float, top_p: float, top_k: int) -> bool:
    """Whether sums in float32 and in float64 must cut at the same place."""
    near = max(top_p - 2e-6, 1e-9), min(top_p + 2e-6, 1 - 1e-9) if top_p < 1 else 1.0, top_p
    *others, kept = (reference.kept_tokens(row, temperature, top_k, p) for p in near)
    return all(np.array_equal(other, kept) for other in others)


def expected(
    row: np.ndarray, token: int, g: float, temperature: float, top_p: float, top_k: int
) -> tuple[float, np.ndarray]:
    logprobs = reference.processed_logprobs(row, temperature, top_k, top_p)
    if not np.isfinite(logprobs[token]):
        return logprobs[token], np.zeros(len(row))
    return logprobs[token], g / temperature * (np.eye(len(row))[token] - np.exp(logprobs))


@pytest.mark.parametrize("dtype,bound", [(torch.float64, 1e-6), (torch.float32, 1e-5)])
def test_logprobs_and_gradients_with_top_k_and_top_p_match_a_reference_implementation(dtype, bound):
    random = torch.Generator().manual_seed(0)
    compared = removed = 0
    for temperature, top_p, top_k in RULES:
        for V in (2, 37, 301):
            logits = rows(random, 60, V).to(dtype)
            token_ids = torch.multinomial(torch.softmax(logits.double() / 2, 1), 1, generator=random)[:, 0]
            g = torch.randn(60, generator=random).to(dtype)
            logprobs, gradient = C.filtered_logprobs(logits, token_ids, g, temperature, top_p, top_k)
            for r, row in enumerate(logits.double().numpy()):
                if not boundary_is_clear(row, temperature, top_p, top_k):
                    continue
                value, slope = expected(row, int(token_ids[r]), float(g[r]), temperature, top_p, top_k)
                compared += 1
                removed += not np.isfinite(value)
                assert logprobs[r].item() == pytest.approx(value, rel=bound, abs=bound)
                np.testing.assert_allclose(
                    gradient[r].numpy(), slope, rtol=bound, atol=bound * abs(float(g[r])) / temperature
                )
    assert compared >= 1000 and removed >= 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_logits_give_nan_logprobs_with_top_k_and_top_p(dtype, bad):
    logits = torch.tensor([[0.0, 1.0, bad, 2.0], [-torch.inf] * 4], dtype=dtype)
    logprobs, _ = C.filtered_logprobs(logits, torch.tensor([1, 1]), torch.ones(2, dtype=dtype), 1.0, 0.9, 0)
    assert torch.isnan(logprobs).all()


def test_training_and_sampling_kernels_give_bit_identical_logprobs_with_top_k_and_top_p():
    random = torch.Generator().manual_seed(1)
    for temperature, top_p, top_k in RULES:
        logits = torch.randn(40, 3001, generator=random) * 3
        rule = C.SamplingRule(temperature=temperature, top_p=top_p, top_k=top_k)
        tokens, sampled, _ = C.sample_rows(logits, torch.rand(40, generator=random, dtype=torch.float64), rule)
        assert torch.equal(C.filtered_logprobs(logits, tokens, torch.ones(40), temperature, top_p, top_k)[0], sampled)


@pytest.mark.parametrize("with_unfiltered", [False, True])
def test_gradient_of_logprobs_with_top_k_and_top_p_matches_finite_differences(with_unfiltered):
    model = model_of(torch.float64, std=0.3)
    trainer = C.Trainer(model)
    random = torch.Generator().manual_seed(4)
    ids = torch.randint(0, 61, (4, 12), generator=random)
    ids[1, :5] = ids[0, :5]
    mask = torch.zeros(4, 12, dtype=torch.bool)
    mask[:, 5:] = True
    batch = padded_rows(ids, torch.tensor([12, 12, 9, 6]), mask, torch.tensor([0, 0, 1, 2]))
    weights = [torch.randn(4, 12, generator=random, dtype=torch.float64) * mask for _ in range(2)]

    def objective():
        out, unfiltered = (torch.zeros(4, 12, dtype=torch.float64) for _ in range(2))
        trainer.forward(
            batch, [0, 1, 2, 3], 0.8, True, True, False, out, top_p=0.95, top_k=40,
            unfiltered=unfiltered if with_unfiltered else None,
        )  # fmt: skip
        removed = torch.isinf(out)
        value = (out.masked_fill(removed, 0.0) * weights[0]).sum() + (unfiltered * weights[1]).sum()
        return float(value), removed

    _, removed = objective()
    assert 0 < removed.sum() < mask.sum()
    trainer.backward(weights[0], weights[1] if with_unfiltered else None)
    start, step = model.masters.clone(), 1e-6
    for _ in range(4):
        direction = torch.randn(start.shape, generator=random, dtype=torch.float64)
        values = []
        for sign in (1, -1):
            model.masters.copy_(start + sign * step * direction)
            values.append(objective())
        assert all(torch.equal(r, removed) for _, r in values)
        slope = (values[0][0] - values[1][0]) / (2 * step)
        assert slope == pytest.approx(float(trainer.grads @ direction), rel=1e-6)
        model.masters.copy_(start)


def make_policy(precision="float32", **generation):
    config = PolicyConfig(model_name="tiny-random", precision=precision, train_global_batch_size=16, train_micro_batch_size=8, max_total_sequence_length=32,
                          optimizer={"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-2}}, generation={"max_new_tokens": 9, **generation})  # fmt: skip
    config.fill_defaults()
    return Policy(None, config, tiny_tokenizer(), seed=1)


def rollout(policy, greedy=False):
    """16 rows in groups of 4, as generation left them."""
    prompts = torch.randint(4, 14, (4, 5), generator=torch.Generator().manual_seed(2)).repeat_interleave(4, 0)
    lengths = torch.full((16,), 5)
    data = BatchedDataDict(
        input_ids=prompts, input_lengths=lengths, sample_index=torch.arange(16), draw_ids=torch.arange(16) // 4
    )
    made = to_train(data, policy.create_generation().generate(data, greedy=greedy), 4)
    advantages = torch.randn(16, 1, generator=torch.Generator().manual_seed(3))
    return made | {"advantages": advantages.expand_as(made["input_ids"]).contiguous()}


NO_KL = ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=0.0))
WITH_KL = ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=0.1))
FILTERS = [
    {"top_p": 0.7}, {"top_k": 4}, {"temperature": 0.7, "top_p": 0.8, "top_k": 6}, {"temperature": 1.4, "top_p": 0.3},
]  # fmt: skip


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("settings", FILTERS, ids=str)
def test_generation_and_training_logprobs_with_top_k_and_top_p_are_bit_identical(precision, settings):
    policy = make_policy(precision, **settings)
    data = rollout(policy)
    assert torch.equal(policy.get_logprobs(data)["logprobs"], data["generation_logprobs"])
    assert (data["generation_logprobs"] != policy.get_reference_policy_logprobs(data)["reference_logprobs"]).any()
    result = policy.train(data, NO_KL)
    assert result["exactness"].tokens == data["token_mask"].sum() and result["exactness"].mismatched_tokens == 0
    assert sum(result["all_mb_metrics"]["token_mult_prob_error"]) == 1.0
    assert sum(result["all_mb_metrics"]["num_filtered_out_tokens"]) == 0


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_logprobs_of_greedy_responses_are_computed_without_top_k_and_top_p(precision):
    policy = make_policy(precision, temperature=0.0, top_p=0.5, top_k=2)
    data = rollout(policy)
    assert torch.equal(policy.get_logprobs(data)["logprobs"], data["generation_logprobs"])
    assert torch.equal(data["generation_logprobs"], policy.get_reference_policy_logprobs(data)["reference_logprobs"])
    assert "num_filtered_out_tokens" not in policy.train(data, NO_KL)["all_mb_metrics"]


def test_reference_model_logprobs_are_scaled_by_temperature_but_not_limited_to_top_k():
    filtered, plain = make_policy(temperature=0.7, top_k=3), make_policy(temperature=0.7)
    data = rollout(filtered)
    reference = filtered.get_reference_policy_logprobs(data)["reference_logprobs"]
    assert torch.equal(reference, plain.get_logprobs(data)["logprobs"])


def test_token_outside_top_k_has_training_logprob_zero_and_no_gradient():
    policy = make_policy(top_k=1)  # every token but the likeliest is removed: log-probability 0 for the likeliest too
    data = rollout(policy)
    data["input_ids"] = torch.where(data["token_mask"] > 0, (data["input_ids"] + 1) % 14, data["input_ids"])
    assert (policy.get_logprobs(data)["logprobs"] == 0).all()
    settings = ClippedPGLossConfig(reference_policy_kl_penalty=0.0)
    data["prev_logprobs"] = data["generation_logprobs"] = -0.1 * data["token_mask"]
    result = policy.train(data, ClippedPGLossFn(settings), eval_mode=True)
    removed = sum(result["all_mb_metrics"]["num_filtered_out_tokens"])
    assert removed > 0.5 * float(data["token_mask"].sum())
    assert sum(result["all_mb_metrics"]["probs_ratio"]) == pytest.approx(np.exp(0.1), rel=1e-5)  # they stay in the loss
    assert float(policy.train(data, ClippedPGLossFn(settings))["grad_norm"]) == 0.0


def unfiltered_kl(next_token_logprobs, data, global_valid_seqs, global_valid_toks):
    """WITH_KL by autograd."""
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    ratio = torch.exp(next_token_logprobs - data["prev_logprobs"][:, 1:])
    surrogate = torch.minimum(ratio * data["advantages"][:, 1:], ratio.clamp(0.8, 1.2) * data["advantages"][:, 1:])
    current = data["curr_logprobs_unfiltered"]
    r = data["reference_policy_logprobs"][:, 1:] - current
    kl = torch.exp(current - current.detach()) * (torch.exp(r) - r - 1)
    return ((-surrogate + 0.1 * kl) * mask).sum() / (global_valid_toks + 1e-8), {}


unfiltered_kl.reference_policy_kl_penalty = 0.1


def test_kl_term_and_its_gradient_use_logprobs_without_top_k():
    native, python, filtered_only = make_policy(top_k=4), make_policy(top_k=4), make_policy(top_k=4)
    for _ in range(3):
        data = rollout(native)
        data["reference_policy_logprobs"] = native.get_reference_policy_logprobs(data)["reference_logprobs"]
        native.train(data, WITH_KL, gbs=8)
        python.train(data, unfiltered_kl, gbs=8)
        filtered_only.train(data, NO_KL, gbs=8)
    for name, weight in native.state_dict().items():
        torch.testing.assert_close(python.state_dict()[name], weight, rtol=1e-3, atol=2e-5)
    assert native.weight_digest() != filtered_only.weight_digest()


def test_kl_metrics_with_a_top_k_of_the_whole_vocabulary_equal_those_without_top_k():
    metrics = []
    for top_k in (None, 1000):
        policy = make_policy(top_k=top_k)
        data = rollout(policy)
        data["reference_policy_logprobs"] = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
        metrics.append(policy.train(data, WITH_KL, gbs=8)["all_mb_metrics"])
    for name in ("loss", "kl_penalty"):
        assert metrics[0][name] == metrics[1][name]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_reused_and_recomputed_old_logprobs_train_identical_weights_with_top_k_and_top_p(tmp_path, precision):
    options = (*tiny.SMALL, "grpo.max_num_steps=3", f"policy.precision={precision}", "policy.generation.top_p=0.8", "policy.generation.top_k=7",
               "policy.train_global_batch_size=16", "policy.optimizer.kwargs.lr=5e-2")  # fmt: skip
    digests = []
    for reuse in ("auto", "never"):
        run = tiny.train(tmp_path / reuse, *options, f"policy.reuse_generation_logprobs={reuse}")
        if reuse == "auto":
            assert all(row["max_logprob_gap"] == 0.0 and row["logprob_mismatched_tokens"] == 0 for row in run.history)
        assert any(row["num_filtered_out_tokens"] > 0 for row in run.history)  # by the second update of a step
        digests.append(run.policy.weight_digest())
    assert digests[0] == digests[1]
