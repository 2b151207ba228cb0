import math

import pytest
import torch
from cuda_emulation.tensors import table
from nemo_rl_cpp._native import C

RULES = [(1.0, 1.0, 0), (0.7, 1.0, 20), (1.0, 0.9, 0), (2.0, 0.999, 0), (1.3, 0.8, 50)]  # temperature, top_p, top_k


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def rows_of_logits():
    """More tokens than the 512 threads of a block take at once; a row of equal logits, and one of 45 equal best."""
    logits = 3 * randn(6, 1400)
    logits[0] = 1.0
    logits[1, 5:50] = 9.0
    return logits


def sample(kernels, logits, rule, uniform, greedy=False):
    R, V = logits.shape
    tokens, logprobs, entropy = torch.zeros(R, dtype=torch.int64), torch.zeros(R), torch.zeros(R)
    kernels.sample(logits, R, V, *rule, greedy, uniform, 1, tokens, logprobs, entropy)
    return tokens, logprobs, entropy


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_emulated_cuda_sampling_matches_the_cpu_kernel_and_equals_scoring_in_its_logprobs(kernels, rule):
    logits, uniform = rows_of_logits(), torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    R, V = logits.shape
    tokens, logprobs, entropy = sample(kernels, logits, rule, uniform)
    cpu_rule = C.SamplingRule(temperature=rule[0], top_p=rule[1], top_k=rule[2])
    cpu_tokens, cpu_logprobs, cpu_entropy = C.sample_rows(logits, uniform, cpu_rule)
    # masses are integers made of float32 exponentials, whose last bit differs between implementations: a draw at the edge of a
    # token may fall to its neighbour
    same = tokens == cpu_tokens
    assert int(same.sum()) >= R - 1
    # log-probabilities near -7 from sums in another order: a few units in the last place (5e-7)
    assert torch.allclose(logprobs[same], cpu_logprobs[same], rtol=0, atol=3e-6)
    # from float32 sums over up to 1,400 tokens, of numbers up to 7
    assert torch.allclose(entropy, cpu_entropy, rtol=0, atol=1e-5)
    scored, scored_entropy = torch.zeros(R), torch.zeros(R)
    kernels.score(logits, R, V, *rule, table(range(R + 1)), tokens, scored, None, scored_entropy)
    assert torch.equal(scored.view(torch.int32), logprobs.view(torch.int32))
    assert torch.equal(scored_entropy.view(torch.int32), entropy.view(torch.int32))


def test_emulated_cuda_greedy_sampling_takes_the_first_maximum_and_flags_non_finite_logits(kernels):
    logits = randn(4, 700)
    logits[0, 7] = logits[0, 9] = 10.0
    logits[1, 3], logits[2] = math.nan, -math.inf
    tokens, logprobs, _ = sample(kernels, logits, (1.0, 1.0, 0), torch.zeros(4, dtype=torch.float64), greedy=True)
    assert tokens.tolist() == [7, -1, -1, int(logits[3].argmax())]
    assert logprobs[1:3].tolist() == [-math.inf, -math.inf]


def test_emulated_cuda_scoring_gives_minus_infinity_to_tokens_outside_top_k_and_top_p(kernels):
    logits = randn(2, 700)
    logits[1, 3] = math.inf
    best, worst = int(logits[0].argmax()), int(logits[0].argmin())
    scored, unfiltered = torch.zeros(3), torch.zeros(3)
    kernels.score(logits, 2, 700, 1.0, 1.0, 5, table([0, 2, 3]), table([best, worst, 0]), scored, unfiltered, None)
    assert math.isfinite(scored[0]) and scored[1] == -math.inf and math.isnan(scored[2]) and math.isnan(unfiltered[2])
    expected = torch.log_softmax(logits[0].double(), 0)[[best, worst]].float()
    assert torch.allclose(unfiltered[:2], expected, rtol=0, atol=3e-6)


def gradient(kernels, logits, rule, first, targets, g, g_unfiltered, dtype=torch.float32):
    d_logits = torch.full_like(logits, math.nan, dtype=dtype)
    bf16 = dtype == torch.bfloat16
    kernels.pairs_gradient(logits, *logits.shape, *rule, first, targets, g, g_unfiltered, d_logits, bf16)
    return d_logits


# arithmetic is float32's
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)], ids=str)
@pytest.mark.parametrize("top_k", [0, 100])
def test_emulated_cuda_logprob_gradients_match_autograd(kernels, dtype, bound, top_k):
    logits = 2 * randn(3, 700)
    kept = logits.topk(100, dim=1).indices
    # several pairs of a row, one of them twice; a row without any; pairs that a filter keeps
    targets = table([int(kept[0, 5]), int(kept[0, 9]), int(kept[0, 5]), int(kept[2, 1]), int(kept[2, 2])])
    rows, g, g_unfiltered = [0, 0, 0, 2, 2], randn(5, seed=1), randn(5, seed=2)
    leaf = logits.double().requires_grad_()
    z = leaf / 0.7
    hidden = torch.full_like(z, -math.inf).scatter(1, kept, 0.0) if top_k else torch.zeros_like(z)
    filtered, unfiltered = torch.log_softmax(z + hidden, 1), torch.log_softmax(z, 1)
    sum((g.double() * filtered[rows, targets]) + (g_unfiltered.double() * unfiltered[rows, targets])).backward()
    got = gradient(kernels, logits, (0.7, 1.0, top_k), table([0, 3, 3, 5]), targets, g, g_unfiltered, dtype)
    difference = (got.double() - leaf.grad).norm() / leaf.grad.norm()
    assert difference <= bound, float(difference)
    assert not got[1].any()


def test_emulated_cuda_logprob_gradients_with_top_p_match_the_cpu_kernel(kernels):
    logits, g = 3 * randn(4, 700), randn(4, seed=1)
    targets = logits.argmax(1)
    _, expected = C.filtered_logprobs(logits, targets, g, 1.3, 0.8, 0)
    got = gradient(kernels, logits, (1.3, 0.8, 0), table(range(5)), targets, g, None)
    # d log p of a token with p near 1 is a difference of like numbers
    assert torch.allclose(got, expected, rtol=1e-4, atol=1e-6)
