import pytest
import torch
from nemo_rl_cpp._native import C
from nemo_rl_cpp.algorithms.loss import ClippedPGLossFn
from nemo_rl_cpp.models.policy.train_step import LossResult, NonFiniteError, check_finite
from row_batch import padded_rows
from test_gradient_invariance import groups_batch, model_of, trainer_of
from test_token_loss import train, training_data
from test_vocabulary_head import SHAPES, inputs


def with_candidates(ids, k):
    """Each token and k random ones, int64 [B S, 1 + k]."""
    others = torch.randint(0, 61, (ids.numel(), k), generator=torch.Generator().manual_seed(1))
    return torch.cat([ids.view(-1, 1), others], 1)


def distributions(trainer, ids, lengths, temperature):
    """log p [T, V] of what follows each token of each row, in float64, by torch."""
    rows = [trainer.logits(row[:n].clone()).double() for row, n in zip(ids, lengths, strict=True)]
    return [torch.log_softmax(row / temperature, 1) for row in rows]


@pytest.mark.parametrize("dtype,bound", [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lm_head_gradient_through_logprobs_and_entropies_matches_autograd(shape, dtype, bound):
    x, w, targets, g = inputs(*shape, dtype)
    h = torch.randn(len(x), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    real = torch.float64 if dtype == torch.float64 else torch.float32
    head, out, entropy = C.VocabularyHead(), torch.empty(len(x), dtype=real), torch.empty(len(x), dtype=real)
    d_x, d_w = torch.empty(x.shape, dtype=real), torch.zeros(w.shape, dtype=real)
    head.forward(x, w, targets, 0.7, out, entropy)
    head.backward(x, w, targets, g.to(real), 0.7, d_x, d_w, d_entropy=h.to(real))
    leaves = [t.double().requires_grad_() for t in (x, w)]
    logp = torch.log_softmax(leaves[0] @ leaves[1].t() / 0.7, 1)
    total = (logp.gather(1, targets[:, None])[:, 0] * g).sum() - ((logp.exp() * logp).sum(1) * h).sum()
    for ours, theirs in zip((d_x, d_w), torch.autograd.grad(total, leaves), strict=True):
        assert (ours - theirs).norm() <= bound * theirs.norm() + 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_top_k_tokens_and_logprobs_match_the_sorted_logprobs(dtype):
    x, w, _, _ = inputs(70, 4099, 24, dtype)
    real = torch.float64 if dtype == torch.float64 else torch.float32
    ids, logprobs = torch.empty(70, 33, dtype=torch.int64), torch.empty(70, 33, dtype=real)
    C.VocabularyHead().likeliest(x, w, 0.7, ids, logprobs)
    logp = torch.log_softmax(x.double() @ w.double().t() / 0.7, 1)
    torch.testing.assert_close(logprobs.double(), logp.gather(1, ids), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logprobs.double(), logp.topk(33).values, rtol=1e-5, atol=1e-5)
    assert all(len(set(row)) == 33 for row in ids.tolist())


@pytest.mark.parametrize("share", [False, True])
def test_forward_pass_returns_entropy_and_candidate_token_logprobs_for_each_scored_token(share):
    trainer, (_, ids, mask) = trainer_of(torch.float64), groups_batch()
    lengths = [int(row.nonzero().max()) + 1 for row in mask]
    targets = with_candidates(ids, 5)
    batch = padded_rows(ids, torch.tensor(lengths), mask, torch.arange(len(ids)) // 4, targets)
    entropy = torch.zeros(ids.shape, dtype=torch.float64)
    scored, rows = torch.zeros(ids.numel(), 6, dtype=torch.float64), list(range(len(ids)))
    trainer.forward(batch, rows, 0.9, share, False, False, scored, entropy=entropy)
    top, top_logprobs = torch.zeros(ids.numel(), 4, dtype=torch.int64), torch.zeros(ids.numel(), 4, dtype=torch.float64)
    trainer.likeliest(groups_batch()[0], rows, 0.9, share, top, top_logprobs)
    for b, logp in enumerate(distributions(trainer, ids, lengths, 0.9)):
        for t in mask[b].nonzero().flatten().tolist():
            row, place = logp[t - 1], b * ids.shape[1] + t
            assert entropy[b, t].item() == pytest.approx(-(row.exp() * row).sum().item(), abs=1e-9)
            torch.testing.assert_close(scored[place], row[targets[place]], rtol=0, atol=1e-9)
            torch.testing.assert_close(top_logprobs[place], row.topk(4).values, rtol=0, atol=1e-9)
            assert torch.equal(top[place], row.topk(4).indices)
    assert not entropy[~mask].any() and not scored[~mask.flatten()].any()


def test_gradient_of_entropies_and_candidate_token_logprobs_matches_finite_differences():
    model, (_, ids, mask) = model_of(torch.float64), groups_batch(num_groups=2, generations=3)
    trainer = C.Trainer(model)
    random = torch.Generator().manual_seed(2)
    weights = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in ((ids.numel(), 4), ids.shape)]
    lengths = torch.tensor([int(row.nonzero().max()) + 1 for row in mask])
    batch = padded_rows(ids, lengths, mask, torch.arange(len(ids)) // 3, with_candidates(ids, 3))

    def value():
        scored, entropy = (torch.zeros(w.shape, dtype=torch.float64) for w in weights)
        trainer.forward(batch, list(range(len(ids))), 0.8, True, True, False, scored, entropy=entropy)
        return sum((w * t).sum().item() for w, t in zip(weights, (scored, entropy), strict=True))

    value()
    trainer.backward(weights[0], d_entropy=weights[1])
    grads, masters = trainer.grads.clone(), model.masters
    for place in torch.randperm(len(grads), generator=random)[:12].tolist():
        kept, eps, sides = float(masters[place]), 1e-6, []
        for step in (eps, -eps):
            masters[place] = kept + step
            model.masters_changed()
            sides.append(value())
        masters[place] = kept
        model.masters_changed()
        assert (sides[0] - sides[1]) / (2 * eps) == pytest.approx(float(grads[place]), rel=1e-4, abs=1e-6)


ENTROPY_MEANS = {"tokens": {}, "sequences": {"name": "grpo"}, "sums": {"name": "dr_grpo", "loss_scale_factor": 8.0}}


@pytest.mark.parametrize("mean", ENTROPY_MEANS)
def test_entropy_bonus_is_the_weighted_mean_of_token_entropies(mean):
    data, settings = training_data(), {"reference_policy_kl_penalty": 0.0} | ENTROPY_MEANS[mean]
    plain, without = train(ClippedPGLossFn(settings), data, torch.float64)
    bonus, grads = train(ClippedPGLossFn(settings | {"entropy_coef": 0.3}), data, torch.float64)
    mask, samples = data["token_mask"].double(), data["sample_mask"].double()
    entropies = torch.zeros(mask.shape, dtype=torch.float64)
    lengths = data["input_lengths"].tolist()
    for b, logp in enumerate(distributions(trainer_of(torch.float64), data["input_ids"], lengths, 0.9)):
        entropies[b, 1 : lengths[b]] = -(logp.exp() * logp).sum(1)[:-1]
    per_row = (entropies * mask).sum(1)
    if mean == "tokens":
        expected = (per_row * samples).sum() / (mask.sum(1) * samples).sum()
    else:
        expected = (per_row / (8.0 if mean == "sums" else mask.sum(1)) * samples).sum() / samples.sum()
    assert bonus.metrics[0]["entropy"] == pytest.approx(float(expected), rel=1e-6)
    assert plain.loss - bonus.loss == pytest.approx(0.3 * float(expected), rel=1e-6)
    assert (grads - without).norm() > 1e-3 * without.norm()


@pytest.mark.parametrize("name", ["grad_unfiltered", "grad_entropy", "grad_candidates"])
def test_error_for_a_non_finite_loss_gradient_names_sample_and_token(name):
    grad = torch.zeros(2, 3, 4) if name == "grad_candidates" else torch.zeros(2, 3)
    fine = LossResult(0.0, {}, torch.zeros(2, 3), **{name: grad})
    check_finite(fine, [5, 7], torch.zeros(2, 4))
    grad[1, 2] = torch.inf
    with pytest.raises(NonFiniteError, match="the gradient of the loss is inf at sample 7, token 3 "):
        check_finite(fine, [5, 7], torch.zeros(2, 4))
