import math

import pytest
import torch
from cuda_emulation.tensors import close, randn

T, E, K = 70, 12, 3


def routed(kernels, logits, groups=0, chosen_groups=0, renormalise=1, scale=1.0, bias=None):
    rows = len(logits)
    expert, weight = torch.full((rows, K), -1), torch.full((rows, K), math.nan)
    values = torch.empty(rows, E + groups)
    kernels.route_tokens(logits, rows, E, K, groups, chosen_groups, renormalise, scale, bias, values, expert, weight)
    return expert, weight


@pytest.mark.parametrize("renormalise", [0, 1])
def test_emulated_cuda_softmax_moe_router_and_its_gradient_match_autograd(kernels, renormalise):
    logits, d_weight, d_logits = randn(T, E), randn(T, K, seed=1), torch.full((T, E), math.nan)
    expert, weight = routed(kernels, logits, renormalise=renormalise)
    assert torch.equal(expert, logits.topk(K).indices)
    leaf = logits.double().requires_grad_()
    expected = leaf.softmax(-1).gather(1, expert)
    if renormalise:
        expected = expected / expected.sum(-1, keepdim=True)
    close(weight, expected.detach())
    expected.backward(d_weight.double())
    kernels.route_tokens_backward(logits, T, E, K, 0, renormalise, 1.0, expert, weight, d_weight, d_logits)
    close(d_logits, leaf.grad)


def test_emulated_cuda_router_prefers_the_lowest_expert_index_among_equal_logits(kernels):
    logits = randn(T, E)
    logits[3] = 0.0
    expert, weight = routed(kernels, logits)
    assert expert[3].tolist() == [0, 1, 2] and torch.equal(weight[3], torch.full((K,), 1.0) / K)
    alone = routed(kernels, logits[40:41].clone())
    assert torch.equal(alone[0][0], expert[40]) and torch.equal(alone[1][0], weight[40])


@pytest.mark.parametrize("groups, chosen_groups", [(1, 1), (4, 2)])
@pytest.mark.parametrize("renormalise", [0, 1])
def test_emulated_cuda_sigmoid_moe_router_and_its_gradient_match_autograd(kernels, groups, chosen_groups, renormalise):
    logits, bias, d_weight = randn(T, E), randn(E, seed=2), randn(T, K, seed=1)
    d_logits = torch.full((T, E), math.nan)
    expert, weight = routed(kernels, logits, groups, chosen_groups, renormalise, 2.5, bias)
    leaf = logits.double().requires_grad_()
    scores = leaf.sigmoid()
    values = (scores.detach() + bias.double()).view(T, groups, -1)
    kept = values.topk(2).values.sum(-1).topk(chosen_groups).indices
    values[~torch.zeros(T, groups, dtype=torch.bool).scatter(1, kept, True)] = -math.inf
    assert torch.equal(expert, values.flatten(1).topk(K).indices)
    expected = 2.5 * scores.gather(1, expert)
    if renormalise:
        expected = expected / scores.gather(1, expert).sum(-1, keepdim=True)
    close(weight, expected.detach())
    expected.backward(d_weight.double())
    kernels.route_tokens_backward(logits, T, E, K, groups, renormalise, 2.5, expert, weight, d_weight, d_logits)
    close(d_logits, leaf.grad)


@pytest.mark.parametrize("accumulate", [0, 1])
@pytest.mark.parametrize("D", [40, 300])
def test_emulated_cuda_sum_over_the_experts_of_a_token_is_bit_identical_to_the_cpu(kernels, D, accumulate):
    rows, weight, before = randn(T * K, D), randn(T, K, seed=1), randn(T, D, seed=2)
    row = torch.randperm(T * K, generator=torch.Generator().manual_seed(3))
    got = before.clone()
    kernels.add_up_experts(rows, row, weight, K, T, D, got, accumulate)
    terms = weight[:, :, None] * rows[row].view(T, K, D)
    total = (terms[:, 0] + terms[:, 1]) + terms[:, 2]  # each rounded once, as on the CPU
    assert torch.equal(got, before + total if accumulate else total)
    kernels.add_up_experts(rows[:T].contiguous(), None, None, 1, T, D, got, 0)
    assert torch.equal(got, rows[:T])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows, columns", [(1, 5), (70, 40), (6, 513)])
def test_emulated_cuda_row_wise_dot_products_use_eight_interleaved_partial_sums(kernels, rows, columns, dtype):
    a, b, got = randn(rows, columns, dtype=dtype), randn(rows, columns, seed=1, dtype=dtype), torch.empty(rows)
    kernels.row_products(a, b, got, rows, columns, dtype == torch.bfloat16)
    padded = torch.nn.functional.pad(a.float() * b.float(), (0, -columns % 8)).view(rows, -1, 8)
    chains, expected = torch.zeros(rows, 8), torch.zeros(rows)
    for terms in padded.unbind(1):
        chains += terms
    for chain in chains.unbind(1):
        expected += chain
    assert torch.equal(got, expected)
