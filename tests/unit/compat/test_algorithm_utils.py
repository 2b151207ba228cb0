"""Masked statistics, filtering of logits, log-probabilities from logits, padding, rates."""

import math
from pathlib import Path

import pytest
import torch
from nemo_rl_cpp.compat.algorithms.logits_sampling_utils import (
    TrainingSamplingParams,
    apply_top_k_top_p,
    need_top_k_or_top_p_filtering,
)
from nemo_rl_cpp.compat.algorithms.utils import (
    mask_out_neg_inf_logprobs,
    masked_mean,
    masked_var,
    maybe_pad_last_batch,
    print_performance_metrics,
)
from nemo_rl_cpp.compat.distributed.model_utils import (
    from_parallel_logits_to_logprobs,
    from_parallel_logits_to_logprobs_packed_sequences,
    get_logprobs_from_vocab_parallel_logits,
    get_next_token_logprobs_from_logits,
)
from nemo_rl_cpp.config import load_grpo_config

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


def test_masked_mean_and_variance_by_hand():
    v, m = torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]]), torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    assert masked_mean(v, m).item() == pytest.approx(2.0)
    assert masked_mean(v, m, dim=1).tolist() == pytest.approx([1.5, 3.0])
    assert masked_mean(v, m, global_normalization_factor=6).item() == pytest.approx(1.0)
    assert masked_mean(v, torch.zeros_like(m)).item() == 0.0
    assert masked_var(v, m).item() == pytest.approx(1.0) and masked_var(v, m, unbiased=False).item() == pytest.approx(
        2 / 3
    )


def test_infinite_logprobs_become_zero(capsys):
    lp = torch.tensor([[-1.0, -math.inf, -math.inf, -2.0]])
    out = mask_out_neg_inf_logprobs(lp, torch.tensor([[1, 1, 0, 0]]), "prev_logprobs")
    assert out.tolist() == [[-1.0, 0.0, 0.0, 0.0]] and "1 of 2" in capsys.readouterr().out


def test_top_k_keeps_ties_and_top_p_at_least_one():
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0]], requires_grad=True)
    filtered, keep = apply_top_k_top_p(logits, top_k=2, top_p=1.0)
    assert keep.tolist() == [[True, False, True, True]] and filtered[0, 1] == -math.inf
    filtered[keep].sum().backward()
    assert logits.grad.tolist() == [[1.0, 0.0, 1.0, 1.0]]
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    assert apply_top_k_top_p(probs.log(), None, 0.6)[1].tolist() == [[True, True, False, False]]
    assert apply_top_k_top_p(probs.log(), None, 1e-9)[1].tolist() == [[True, False, False, False]]
    assert apply_top_k_top_p(probs.log(), 3, 0.999)[1].tolist() == [[True, True, True, False]]
    assert apply_top_k_top_p(logits, None, 1.0) == (logits, None)
    assert not need_top_k_or_top_p_filtering(None) and not need_top_k_or_top_p_filtering(
        TrainingSamplingParams(top_k=-1)
    )
    assert need_top_k_or_top_p_filtering(TrainingSamplingParams(top_p=0.9))


@pytest.mark.parametrize("params", [None, TrainingSamplingParams(top_k=4), TrainingSamplingParams(top_k=6, top_p=0.7)])
def test_logprob_forms_agree(params):
    torch.manual_seed(0)
    logits, ids = torch.randn(2, 9, 13), torch.randint(0, 13, (2, 9))
    kept = logits if params is None else apply_top_k_top_p(logits, params.top_k, params.top_p)[0]
    wanted = kept.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    for chunk in (None, 2, 100):
        ours = get_next_token_logprobs_from_logits(ids, logits, sampling_params=params, chunk_size=chunk)
        assert ours.shape == (2, 8) and torch.allclose(ours, wanted, atol=1e-6)
    assert torch.allclose(
        from_parallel_logits_to_logprobs(logits, ids, 0, 13, None, sampling_params=params), wanted, atol=1e-6
    )
    assert torch.allclose(
        get_logprobs_from_vocab_parallel_logits(logits, ids, sampling_params=params), wanted, atol=1e-6
    )
    packed = from_parallel_logits_to_logprobs_packed_sequences(
        logits.reshape(1, 18, 13), ids.reshape(1, 18), torch.tensor([0, 9, 18]), 9, 0, 13, None, sampling_params=params
    )
    assert torch.allclose(packed, wanted, atol=1e-6)
    with pytest.raises(ValueError, match="whole vocabulary"):
        from_parallel_logits_to_logprobs(logits, ids, 0, 26, None)


def test_last_batch_is_padded_with_masked_rows():
    batch = {
        "input_ids": torch.arange(6).reshape(3, 2),
        "input_lengths": torch.tensor([2, 2, 1]),
        "sample_mask": torch.ones(3),
        "token_mask": torch.ones(3, 2),
    }
    out = maybe_pad_last_batch(batch, dp_size=2, mbs=2)
    assert out["input_ids"].tolist() == [[0, 1], [2, 3], [4, 5], [4, 5]] and out["sample_mask"].tolist() == [1, 1, 1, 0]
    assert out["input_lengths"].tolist() == [2, 2, 1, 1] and out["token_mask"].shape == (4, 2)
    assert maybe_pad_last_batch(out, 2, 2)["input_ids"].shape == (4, 2)


def test_performance_rates_by_hand():
    config = {
        "cluster": {"num_nodes": 1, "gpus_per_node": 2},
        "policy": {"generation": {"colocated": {"enabled": True}}},
    }
    timing = {"total_step_time": 10.0, "policy_training": 4.0, "policy_and_reference_logprobs": 1.0, "generation": 5.0}
    metrics = {"total_num_tokens": 1000, "per_worker_token_counts": [{0: 100}, {0: 100, 1: 100}]}
    m = print_performance_metrics(
        {"total_flops": 8e12, "num_ranks": 2},
        metrics,
        timing,
        config,
        num_prompts_per_step=4,
        num_generations_per_prompt=5,
        is_async_rl=False,
    )
    assert m["samples_per_sec"] == 2.0 and m["tokens_per_sec_per_gpu"] == 50.0
    assert m["policy_training_tokens_per_sec_per_gpu"] == 125.0 and m["training_worker_group_tokens_per_sec"] == 200.0
    assert m["generation_tokens_per_sec"] == 200.0 and m["train_flops_per_gpu"] == 1.0
    assert m["average_token_imbalance"] == pytest.approx(0.25) and "per_worker_token_counts" not in metrics


def test_rates_of_a_folded_configuration_are_those_of_one_device():
    config = load_grpo_config(CONFIGS / "grpo_tiny.yaml", ["cluster.gpus_per_node=8", "policy.generation.backend=vllm"])
    timing = {"total_step_time": 10.0, "policy_training": 4.0, "policy_and_reference_logprobs": 1.0, "generation": 5.0}
    sizes = {"num_prompts_per_step": 4, "num_generations_per_prompt": 5, "is_async_rl": False}
    m = print_performance_metrics({}, {"total_num_tokens": 1000}, timing, config, **sizes)
    assert m["tokens_per_sec_per_gpu"] == 100.0 and m["policy_training_tokens_per_sec_per_gpu"] == 250.0
