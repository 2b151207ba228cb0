from types import SimpleNamespace

import pytest
import torch
from nemo_rl_cpp.algorithms.step_metrics import (
    aggregate_microbatch_metrics,
    baseline_metrics,
    batch_metrics,
    rollout_table,
    training_metrics,
)
from nemo_rl_cpp.environments.interfaces import Mean
from nemo_rl_cpp.models.policy.updates import collect_metrics
from nemo_rl_cpp.rollouts.batches import Rollouts, TrainBatch
from nemo_rl_cpp.rollouts.rollout_metrics import combine_rollout_metrics

INF = float("inf")


def test_metrics_are_summed_over_micro_batches_except_minima_maxima_and_means():
    metrics = aggregate_microbatch_metrics(
        {
            "loss": [0.25, 0.5], "probs_ratio_min": [0.9, 0.8], "probs_ratio_max": [1.1, 1.3], "lr": [0.5, 0.5],
            "global_valid_toks": [70.0, 70.0], "num_valid_samples": [3.0, 1.0],
        }
    )  # fmt: skip
    assert metrics == {
        "loss": 0.75, "probs_ratio_min": 0.8, "probs_ratio_max": 1.3, "lr": 0.5, "global_valid_toks": 70.0, "num_valid_samples": 4.0,
    }  # fmt: skip


def mult_prob_error(*global_batches):
    """Return token_mult_prob_error of global batches, each a list of (numerator, valid tokens) per micro-batch."""
    metrics = []
    for batch in global_batches:
        count = sum(tokens for _, tokens in batch)
        metrics.append([{
            "token_mult_prob_error": value / (count + 1e-8), "token_mult_prob_error_sum": value, "global_valid_toks": count,
            "num_valid_samples": float(tokens > 0),
        } for value, tokens in batch])  # fmt: skip
    result = aggregate_microbatch_metrics(collect_metrics(metrics))
    assert "token_mult_prob_error_sum" not in result  # it is a part of a metric, not one
    return result["token_mult_prob_error"]


@pytest.mark.parametrize("sizes", [[1] * 49, [5, 6, 5, 7] * 43, [173], list(range(1, 200))], ids=len)
def test_token_mult_prob_error_is_exactly_one_for_equal_logprobs_in_many_micro_batches(sizes):
    """An exact run reports a token_mult_prob_error of 1, not of 0.9999999999999998; the smallest gap still shows."""
    batch = [(float(size), float(size)) for size in sizes]
    assert mult_prob_error(batch) == 1.0
    batch[0] = (sizes[0] + 1e-11, float(sizes[0]))
    assert 1.0 < mult_prob_error(batch) < 1.0 + 1e-12


def test_token_mult_prob_error_is_averaged_over_global_batches():
    first, second, third = [(20.0, 20.0), (29.0, 29.0)], [(7.0, 7.0), (4.0, 4.0)], [(3.0, 3.0), (46.0, 46.0)]
    assert mult_prob_error(first, second, third) == 1.0
    assert mult_prob_error([(49.0, 49.0)], [(22.0, 11.0)]) == 1.5  # 1 and 2


@pytest.mark.parametrize("masked", [[], [{"probs_ratio": 0.0, "num_valid_samples": 0.0, "global_valid_toks": 0.0}]])
def test_global_batch_without_a_valid_sample_does_not_change_means_over_global_batches(masked):
    rows = [{"probs_ratio": 0.25, "num_valid_samples": 1.0, "global_valid_toks": 4.0},
            {"probs_ratio": 0.75, "num_valid_samples": 3.0, "global_valid_toks": 4.0}]  # fmt: skip
    metrics = aggregate_microbatch_metrics(collect_metrics([rows, masked]))
    assert metrics == {"probs_ratio": 1.0, "num_valid_samples": 4.0, "global_valid_toks": 4.0}
    assert mult_prob_error([(11.0, 11.0)], [(0.0, 0.0)] * len(masked)) == 1.0


def test_micro_batches_without_valid_samples_are_excluded_from_metrics():
    ratios = {"probs_ratio_min": [INF, 0.5], "probs_ratio_max": [1.5, -INF]}
    metrics = aggregate_microbatch_metrics({"loss": [1.0, 9.0], "num_valid_samples": [1.0, 0.0], **ratios})
    assert metrics["loss"] == 1.0
    assert metrics["probs_ratio_min"] == -1.0  # only an infinity was left
    assert metrics["probs_ratio_max"] == 1.5


def test_training_metrics_include_the_largest_logprob_gap_and_the_number_of_mismatched_tokens():
    result = {
        "loss": torch.tensor([0.5]), "grad_norm": torch.tensor([2.0, 4.0]), "all_mb_metrics": {"loss": [0.1, 0.3]},
        "exactness": SimpleNamespace(max_gap=0.25, mismatched_tokens=3),
    }  # fmt: skip
    metrics = training_metrics(result)
    assert metrics["loss"] == pytest.approx(0.4) and metrics["grad_norm"] == 3.0
    assert metrics["max_logprob_gap"] == 0.25 and metrics["logprob_mismatched_tokens"] == 3


def test_baseline_metrics_are_shares_of_samples_whose_baseline_is_zero_one_or_in_between():
    assert baseline_metrics(torch.tensor([0.0, 0.0, 1.0, 0.5])) == {
        "baseline_reward/pct_0": 50.0, "baseline_reward/pct_1": 25.0, "baseline_reward/pct_mixed": 25.0,
    }  # fmt: skip


def _step():
    samples = Rollouts({
        "message_log": [[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "x": 1}]] * 2,
        "length": torch.tensor([1, 3]),
        "truncated": torch.tensor([False, True]),
        "loss_multiplier": torch.ones(2),
    })  # fmt: skip
    batch = TrainBatch.of({
        "input_ids": torch.tensor([[5, 6, 0, 0], [5, 6, 7, 8]]), "input_lengths": torch.tensor([2, 4]),
        "token_mask": torch.tensor([[0, 1, 0, 0], [0, 0, 0, 1]]), "sample_mask": torch.tensor([1.0, 1.0]),
        "rewards": torch.tensor([1.0, 0.0]), "generation_logprobs": torch.zeros(2, 4),
    })  # fmt: skip
    batch.advantages = torch.tensor([[9.0, 2.0, 9.0, 9.0], [9.0, 9.0, 9.0, -1.0]])
    return samples, batch


def test_advantage_metrics_are_computed_over_trained_tokens_only():
    metrics = batch_metrics(*_step())
    assert metrics["advantages/mean"] == 0.5 and metrics["advantages/sum"] == 1.0
    assert metrics["advantages/max"] == 2.0 and metrics["advantages/min"] == -1.0
    assert metrics["reward"] == 0.5 and metrics["mean_prompt_length"] == 2.0 and metrics["total_num_tokens"] == 6


def test_advantage_metrics_are_zero_if_every_sample_is_masked():
    samples, batch = _step()
    batch["sample_mask"] = torch.zeros(2)
    metrics = batch_metrics(samples, batch)
    assert metrics["advantages/mean"] == 0.0 and metrics["num_masked_samples"] == 2


def test_train_data_log_file_contains_no_padding_tokens():
    table = rollout_table(*_step())
    assert table["token_ids"] == [[5, 6], [5, 6, 7, 8]]
    assert table["token_loss_mask"] == [[0, 1], [0, 0, 0, 1]]
    assert table["truncated"] == [False, True]
    assert table["content"][0][1] == {"role": "assistant", "content": "a"}


def combined(sizes, **metrics):
    """Return the combined metrics of rounds with `sizes` samples; `metrics` has one value per round for each name."""
    return combine_rollout_metrics(
        [(size, {name: values[i] for name, values in metrics.items()}) for i, size in enumerate(sizes)]
    )


def test_metrics_of_several_rollouts_are_averaged_weighted_by_their_sample_counts():
    found = combined((2, 6), well_formed=(1.0, 0.5), accuracy_of_well_formed=(0.5, 1.0), rate=(0.0, 1.0))
    assert found["well_formed"] == (2 + 3) / 8 and found["rate"] == 0.75
    assert found["accuracy_of_well_formed"] == (0.5 * 2 + 1.0 * 3) / 5  # 2 and 3 well-formed answers


@pytest.mark.parametrize(("name", "values", "expected"), [
    ("max_turns_reached_rate", (0.0, 1.0), 0.75), ("games/num_won_rate", (0.5, 0.1), 0.2), ("turns/max", (2, 1), 2),
    ("turns/min", (2, 1), 1), ("min_len", (5, 7), 5), ("max_gen_tokens_per_sample", (4, 9), 9),
    ("turns/total", (8, 4), 12), ("total_turns", (2, 6), 8),
    ("rewards/num_words", (Mean(3, 1), Mean(2, 4)), 1.0), ("max_len", (Mean(2, 2), Mean(0, 6)), 0.25), ("a/total", (Mean(0, 0),) * 2, 0.0),
])  # fmt: skip
def test_rates_are_averaged_and_minima_and_maxima_are_kept_over_several_rollouts(name, values, expected):
    assert combined((4, 12), **{name: values}) == pytest.approx({name: expected})


def test_agent_call_and_error_counts_are_summed_over_several_rollouts():
    names = ("agent_errors", "agent_timeouts", "agent_calls", "agent_calls_left_out")
    counts = dict.fromkeys(names, (1.0, 3.0)) | {"a/agent_errors": (2.0, 5.0), "verifier_timeouts": (1.0, 2.0)}
    sums = dict.fromkeys(names, 4.0) | {"a/agent_errors": 7.0, "verifier_timeouts": 3.0}
    assert combined((4, 4), **counts, agent_score=(0.0, 1.0)) == sums | {"agent_score": 0.5}
