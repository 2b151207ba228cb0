import numpy as np
import pytest
import torch
from nemo_rl_cpp._native import C
from reference import sampling as reference
from threads import on_threads

RULES = [
    {}, {"temperature": 0.5}, {"temperature": 1.7}, {"top_k": 1}, {"top_k": 50}, {"top_p": 0.9}, {"top_p": 1e-6},
    {"top_p": 0.999}, {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 2.0, "top_k": 3000, "top_p": 0.95},
]  # fmt: skip


def logits_rows(kind: str, V: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(V)
    normal = torch.randn(6, V, generator=random)
    if kind == "peaked":
        return normal * 6
    if kind == "flat":
        return normal * 0.01
    if kind == "masked":
        return normal.masked_fill(torch.rand(6, V, generator=random) < 0.5, -torch.inf).index_fill_(
            1, torch.tensor([V // 2]), 1.0
        )
    return normal * 2.5


@pytest.mark.parametrize("kind", ["ordinary", "peaked", "flat", "masked"])
@pytest.mark.parametrize("V", [2, 37, 2048, 5003])
def test_sampled_tokens_logprobs_and_entropies_match_a_reference_implementation(kind, V):
    logits = logits_rows(kind, V)
    u = torch.linspace(0.03, 0.97, len(logits), dtype=torch.float64)
    for rule in RULES:
        tokens, logprobs, entropies = C.sample_rows(logits, u, C.SamplingRule(**rule))
        for r, row in enumerate(logits.numpy()):
            expected = reference.processed_logprobs(row, **rule)
            token = int(tokens[r])
            assert np.isfinite(expected[token]), (rule, "a filtered token was drawn")
            assert logprobs[r].item() == pytest.approx(expected[token], abs=2e-5)
            assert entropies[r].item() == pytest.approx(reference.entropy(expected), abs=1e-4)
            # float32 sums move the boundaries between tokens by about 1e-6
            assert token in {reference.inverse_cdf(expected, float(u[r]) + e) for e in (-3e-6, 0, 3e-6)}, rule


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_logprobs_of_sampling_and_scoring_are_bit_identical(rule):
    logits = torch.randn(64, 3001, generator=torch.Generator().manual_seed(0)) * 3
    u = torch.rand(64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tokens, logprobs, entropies = C.sample_rows(logits, u, C.SamplingRule(**rule))
    _, scored, scored_entropies = C.score_rows(logits, tokens, C.SamplingRule(**rule))
    assert torch.equal(scored, logprobs)
    assert torch.equal(scored_entropies, entropies)


def test_sampled_token_does_not_depend_on_other_rows_in_the_batch_or_on_threads():
    logits = torch.randn(33, 5000, generator=torch.Generator().manual_seed(2)) * 3
    u = torch.rand(33, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    rule = C.SamplingRule(top_p=0.95, top_k=40)
    single, whole = on_threads(lambda: C.sample_rows(logits, u, rule), (1, 2))
    alone = [C.sample_rows(logits[r : r + 1].clone(), u[r : r + 1], rule) for r in range(33)]
    for i in range(3):
        assert torch.equal(single[i], whole[i])
        assert torch.equal(torch.cat([row[i] for row in alone]), whole[i])


@pytest.mark.parametrize(
    "rule", [{}, {"temperature": 0.6}, {"top_k": 12}, {"top_p": 0.7}, {"top_k": 30, "top_p": 0.9}], ids=str
)
def test_sampled_token_frequencies_match_the_token_probabilities(rule):
    """Chi-square over the tokens; the critical value is that of significance 1e-4 (Wilson-Hilferty)."""
    V, draws = 60, 40_000
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(4)) * 1.5
    u = torch.tensor([C.random_uniform(9, 0, i // 8, i % 8, 17) for i in range(draws)], dtype=torch.float64)
    tokens, _, _ = C.sample_rows(logits.expand(draws, V), u, C.SamplingRule(**rule))
    p = np.exp(reference.processed_logprobs(logits[0].numpy(), **rule))
    counts = np.bincount(tokens.numpy(), minlength=V)
    assert counts[p == 0].sum() == 0
    expected = draws * p[p > 0]
    statistic = ((counts[p > 0] - expected) ** 2 / expected).sum()
    freedom = (p > 0).sum() - 1
    critical = freedom * (1 - 2 / (9 * freedom) + 3.72 * np.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < critical


def test_top_k_keeps_all_tokens_that_tie_with_the_kth_largest_logit():
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0]])
    drawn = {
        int(C.sample_rows(logits, torch.tensor([u], dtype=torch.float64), C.SamplingRule(top_k=2))[0])
        for u in np.linspace(0, 0.999, 200)
    }
    assert drawn == {0, 2, 3, 4}


def test_tokens_kept_by_top_p_match_hand_computed_cases():
    # 0.5, 0.25, 0.125, 0.125: ascending sums 0.125 (index 2), 0.25 (3), 0.5 (1), 1 (0)
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64).log().float().unsqueeze(0)

    def kept(p):
        scores = [C.score_rows(logits, torch.tensor([t]), C.SamplingRule(top_p=p))[1].item() for t in range(4)]
        return {t for t, score in enumerate(scores) if score > -np.inf}

    assert kept(0.4) == {0}
    assert kept(0.6) == {0, 1}
    assert kept(0.8) == {0, 1, 3}  # of two equal probabilities the later index goes last, so it stays
    assert kept(0.9) == {0, 1, 2, 3}
    assert C.score_rows(logits, torch.tensor([1]), C.SamplingRule(top_p=0.6))[1].item() == pytest.approx(
        np.log(1 / 3), abs=1e-6
    )


def test_greedy_sampling_takes_the_first_maximum_and_returns_logprobs_without_top_k_and_top_p():
    logits = torch.tensor([[0.0, 2.0, 2.0, -1.0]])
    u = torch.tensor([0.99], dtype=torch.float64)
    tokens, logprobs, _ = C.sample_rows(logits, u, C.SamplingRule(temperature=0.1, top_k=1, top_p=0.5, greedy=True))
    assert tokens.item() == 1
    assert logprobs.item() == pytest.approx(torch.log_softmax(logits.double(), -1)[0, 1].item(), abs=1e-6)


def test_tokens_of_probability_zero_are_never_sampled_even_at_extreme_random_numbers():
    logits = torch.full((1, 4100), -torch.inf)
    logits[0, [7, 4097]] = torch.tensor([1.0, 1.0])
    for u in (0.0, 1 - 2**-53):
        token = int(C.sample_rows(logits, torch.tensor([u], dtype=torch.float64), C.SamplingRule())[0])
        assert token == (7 if u == 0 else 4097)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("rule", [{}, {"top_k": 5}, {"top_p": 0.9}, {"greedy": True}], ids=str)
def test_sampling_from_non_finite_logits_returns_an_invalid_token(bad, rule):
    logits = torch.randn(3, 100)
    logits[1, 50] = bad
    tokens, _, _ = C.sample_rows(logits, torch.full((3,), 0.5, dtype=torch.float64), C.SamplingRule(**rule))
    assert tokens[1] == -1
    assert (tokens[[0, 2]] >= 0).all()
