import math

import pytest
import torch
from nemo_rl_cpp.algorithms.reward_functions import (
    RewardScalingConfig,
    RewardShapingConfig,
    apply_reward_shaping,
    scale_rewards,
)
from nemo_rl_cpp.algorithms.step import mask_by_logprob_error

DAPO = dict(overlong_buffer_length=4, overlong_buffer_penalty=2.0, max_response_length=10)


def logs(*lengths):
    asked = {"role": "user", "token_ids": torch.zeros(3)}
    return [[asked, {"role": "assistant", "token_ids": torch.zeros(n)}] for n in lengths]


def test_reward_scaling_maps_rewards_linearly_and_clamps_them_to_the_target_range(capsys):
    total, part = torch.tensor([0.0, 1.0, 0.5, 7.0]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    batch = {"total_reward": total, "reward/format": part, "reward": "kept"}
    out = scale_rewards(batch, RewardScalingConfig(enabled=True, target_min=-1.0, target_max=1.0))
    assert out["total_reward"].tolist() == [-1.0, 1.0, 0.0, 1.0]
    assert out["reward/format"].tolist() == [1.0, -1.0, 1.0, -1.0]
    assert out["reward"] == "kept" and "1 of 4" in capsys.readouterr().out
    same = {"total_reward": torch.tensor([3.0])}
    assert scale_rewards(same, {"enabled": False})["total_reward"].tolist() == [3.0]


def test_overlong_penalty_matches_hand_computed_values():
    """Expected length 6: 6 costs 0, 8 costs 1, 10 costs 2, 14 costs 4 (it is not capped)."""
    batch = {"total_reward": torch.ones(5), "message_log": logs(3, 6, 8, 10, 14)}
    out = apply_reward_shaping(batch, RewardShapingConfig(enabled=True, **DAPO))
    assert out["total_reward"].tolist() == [1.0, 1.0, 0.0, -1.0, -3.0]
    assert out["unshaped_total_reward"].tolist() == [1.0] * 5


def test_overlong_penalty_depends_only_on_the_length_of_the_first_assistant_message():
    log = logs(8)[0] + [{"role": "assistant", "token_ids": torch.zeros(50)}]
    batch = {"total_reward": torch.ones(1), "message_log": [log]}
    out = apply_reward_shaping(batch, RewardShapingConfig(enabled=True, **DAPO))
    assert out["total_reward"].tolist() == [0.0]


def test_stop_properly_penalty_replaces_other_reward_shaping_unless_compose_is_set():
    def shaped(**more):
        rewards = {"total_reward": torch.tensor([1.0, 1.0, -1.0]), "truncated": [False, True, True]}
        config = RewardShapingConfig(enabled=True, stop_properly_penalty_coef=0.5, **DAPO, **more)
        return apply_reward_shaping(rewards | {"message_log": logs(8, 8, 8)}, config)

    assert shaped()["total_reward"].tolist() == [1.0, 0.5, -0.5]
    both = shaped(compose=True)
    assert both["total_reward"].tolist() == [0.0, -0.5, -1.5]
    assert both["unshaped_total_reward"].tolist() == [1.0, 1.0, -1.0]


def test_rewards_are_unchanged_if_reward_shaping_is_disabled():
    assert "unshaped_total_reward" not in apply_reward_shaping({"total_reward": torch.ones(1)}, RewardShapingConfig())


def error_data():
    gaps = [0.0, 0.0], [math.log(3.0), 0.0], [math.log(2.0), math.log(4.0)], [5.0, 5.0]
    return {
        "prev_logprobs": torch.zeros(4, 3), "generation_logprobs": torch.tensor([[9.0, *gap] for gap in gaps]), "token_mask": torch.ones(4, 3),
        "sample_mask": torch.tensor([1.0, 1, 1, 0]), "rewards": torch.tensor([0.0, 1.0, 1.0, 0.0]),
    }  # fmt: skip


def test_sequences_whose_logprob_error_exceeds_the_threshold_are_masked():
    """Errors 1, (3 + 1)/2 = 2, (2 + 4)/2 = 3; the masked row does not count. Threshold 2.5 drops the third."""
    data = error_data()
    m = mask_by_logprob_error(data, None)
    assert [m[f"{k}_seq_mult_prob_error"] for k in ("max", "mean", "min")] == pytest.approx([3.0, 2.0, 1.0])
    assert m["num_masked_seqs"] == 0 and data["sample_mask"].tolist() == [1, 1, 1, 0]
    m = mask_by_logprob_error(data, 2.5)
    assert data["sample_mask"].tolist() == [1, 1, 0, 0] and (m["num_masked_seqs"], m["masked_correct_pct"]) == (1, 1.0)
    assert m["max_seq_mult_prob_error_after_mask"] == pytest.approx(2.0)
    assert m["max_seq_mult_prob_error"] == pytest.approx(3.0)
    data = error_data()
    data["token_mask"][0] = 0  # nothing of the first row is trained: it has no error, and 0.5 does not drop it
    m = mask_by_logprob_error(data, 0.5)
    assert [m[f"{k}_seq_mult_prob_error"] for k in ("max", "mean", "min")] == pytest.approx([3.0, 2.5, 2.0])
    assert (m["num_masked_seqs"], m["masked_correct_pct"], m["mean_seq_mult_prob_error_after_mask"]) == (2, 1.0, 0.0)
    data["sample_mask"].zero_()
    assert mask_by_logprob_error(data, 2.5)["max_seq_mult_prob_error"] == 0.0
