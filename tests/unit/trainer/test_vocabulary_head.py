import pytest
import torch
from nemo_rl_cpp._native import C
from threads import on_threads

SHAPES = [(1, 7, 3), (5, 2048, 16), (70, 4099, 24), (2100, 2500, 8)]


def inputs(U, V, D, dtype, seed=0):
    random = torch.Generator().manual_seed(seed)
    x, w = torch.randn(U, D, generator=random).to(dtype), torch.randn(V, D, generator=random).to(dtype)
    return x, w, torch.randint(0, V, (U,), generator=random), torch.randn(U, generator=random, dtype=torch.float64)


def run(x, w, targets, g, temperature):
    real = torch.float64 if x.dtype == torch.float64 else torch.float32
    head, logprobs, entropy = C.VocabularyHead(), torch.empty(len(x), dtype=real), torch.empty(len(x), dtype=real)
    d_x, d_w = torch.full(x.shape, 9.0, dtype=real), torch.ones(w.shape, dtype=real)
    head.forward(x, w, targets, temperature, logprobs, entropy)
    head.backward(x, w, targets, g.to(real), temperature, d_x, d_w)
    return logprobs, entropy, d_x, d_w - 1


def run_fused(x, w, targets, g, temperature):
    head, logprobs = C.VocabularyHead(), torch.empty(len(x))
    d_x, d_w = torch.full(x.shape, 9.0), torch.ones(w.shape)
    head.forward_backward(x, w, targets, g.float(), temperature, logprobs, d_x, d_w)
    return logprobs, d_x, d_w - 1


def reference(x, w, targets, g, temperature):
    x, w = (t.double().requires_grad_() for t in (x, w))
    logp = torch.log_softmax(x @ w.t() / temperature, 1)
    chosen = logp.gather(1, targets[:, None])[:, 0]
    return chosen.detach(), -(logp.exp() * logp).sum(1).detach(), *torch.autograd.grad((chosen * g).sum(), (x, w))


@pytest.mark.parametrize("dtype,bound", [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_lm_head_logprobs_and_gradients_match_autograd(shape, dtype, bound, temperature):
    data = inputs(*shape, dtype)
    ours, theirs = run(*data, temperature), reference(*data, temperature)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        limit = bound if i >= 2 else min(bound, 1e-5)  # logits are float32 sums of the rounded inputs
        assert (a - b).norm() <= limit * b.norm() + 1e-6, i


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lm_head_and_sampler_logprobs_are_bit_identical_for_any_batch(dtype):
    x, w, targets, _ = inputs(131, 4099, 40, dtype)
    logits = torch.empty(131, 4099)
    C.linear_forward(x, w, None, logits)
    _, expected, entropies = C.score_rows(logits, targets, C.SamplingRule(temperature=0.7))
    head, logprobs, entropy = C.VocabularyHead(), torch.empty(131), torch.empty(131)
    head.forward(x, w, targets, 0.7, logprobs, entropy)
    assert torch.equal(logprobs, expected) and torch.equal(entropy, entropies)
    for r in (0, 63, 64, 130):
        one = torch.empty(1)
        head.forward(x[r : r + 1].clone(), w, targets[r : r + 1].clone(), 0.7, one, torch.empty(1))
        assert torch.equal(one, expected[r : r + 1])


@pytest.mark.parametrize(
    "op, rows, dtype", [(run, 300, torch.float32), (run, 300, torch.bfloat16), (run_fused, 1100, torch.float32)]
)
def test_lm_head_results_are_bit_identical_with_one_and_two_threads(op, rows, dtype):
    results = on_threads(lambda: op(*inputs(rows, 4500, 24, dtype), 1.0), (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, dtype, bound",
    [(shape, *kind) for shape in [*SHAPES, (1090, 50, 8)] for kind in [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)]]
    + [((530, 120_000, 4), torch.bfloat16, 1e-2)],
    ids=str,
)
def test_fused_lm_head_gives_bit_identical_logprobs_and_gradients_that_match_autograd(shape, dtype, bound):
    data = inputs(*shape, dtype)
    logprobs, d_x, d_w = run_fused(*data, 0.7)
    assert torch.equal(logprobs, run(*data, 0.7)[0])
    _, _, expected_x, expected_w = reference(*data, 0.7)
    for ours, theirs in ((d_x, expected_x), (d_w, expected_w)):
        assert (ours - theirs).norm() <= bound * theirs.norm() + 1e-6


def test_fused_lm_head_in_float64_is_an_error():
    with pytest.raises(ValueError, match="no float64"):
        run_fused(*inputs(4, 30, 8, torch.float64), 1.0)


def test_target_token_outside_the_vocabulary_is_an_error_in_the_lm_head():
    x, w, targets, g = inputs(4, 30, 8, torch.float32)
    targets[2] = 30
    with pytest.raises(ValueError, match="token id 30 is outside the vocabulary of 30"):
        run(x, w, targets, g, 1.0)
