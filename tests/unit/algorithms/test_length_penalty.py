import pytest
import torch
from nemo_rl_cpp.algorithms.reward_functions import apply_length_penalty, band_factor, penalized, reasoning_and_answer
from nemo_rl_cpp.config.penalties import LengthPenaltyConfig, LengthPenaltyParams, ProfileBandChannel
from nemo_rl_cpp.distributed.ragged_batch import BatchedDataDict

REWARDS = [1.0, 0.0, 1.0, 1.0]
LENGTHS = {"reasoning": [4, 1, 0, 8], "answer": [6, 1, 4, 2], "total": [10, 2, 4, 10]}


def changes(rewards=REWARDS, lengths=LENGTHS, bands=None, **params):
    return penalized(rewards, lengths, LengthPenaltyParams(**params), bands)


@pytest.mark.parametrize("params, expected", [
    ({}, [1, 0, 1, 1]),
    ({"total_bonus": 0.5}, [1, 0, 1.5, 1]),
    ({"reasoning_bonus": 0.5}, [1.5, 0, 1, 1]),  # the third has no reasoning and does not compete
    ({"answer_bonus": 0.25}, [1, 0, 1, 1.25]),
    ({"longest_total_penalty": 0.5}, [0.5, 0, 1, 1]),  # the first of equals
    ({"longest_reasoning_penalty": 0.5}, [1, 0, 1, 0.5]),
    ({"longest_answer_penalty": 2.0}, [0, 0, 1, 1]),  # never below 0
    # weights of lengths 10, 4, 10: 0, 1, 0 less their mean 1/3
    ({"group_total_length_penalty_coeff": 0.3}, [0.9, 0, 1.2, 0.9]),
    # share of right ones 3/4, longest right one 10
    ({"pass_rate_length_penalty_weight": 0.4}, [0.7, 0, 1 - 0.4 * 0.75 * 0.4, 0.7]),
    ({"total_bonus": 0.5, "longest_total_penalty": 0.25}, [0.75, 0, 1.5, 1]),
])  # fmt: skip
def test_each_length_penalty_term_matches_hand_computed_rewards(params, expected):
    assert changes(**params) == pytest.approx(expected)


def test_outlier_response_lengths_are_penalized_by_their_modified_z_score():
    rewards, lengths = [1.0] * 5, {name: [10, 11, 12, 13, 100] for name in ("reasoning", "answer", "total")}
    # median 12, deviations 2 1 0 1 88, MAD 1: 0.6745 * 88 = 59.4
    assert changes(rewards, lengths, total_zmad_threshold=3.5, total_zmad_penalty=0.5) == [1, 1, 1, 1, 0.5]
    assert changes(rewards, lengths, total_zmad_threshold=60, total_zmad_penalty=0.5) == rewards
    assert changes(rewards, lengths, total_zmad_threshold=0, total_zmad_penalty=0.5) == rewards
    equal = {name: [10] * 4 + [99] for name in lengths}
    assert changes(rewards, equal, total_zmad_threshold=3.5, total_zmad_penalty=0.5) == rewards  # MAD 0


def test_length_penalty_does_not_change_groups_with_a_single_correct_response():
    terms = {"total_bonus": 0.5, "longest_total_penalty": 0.5, "group_total_length_penalty_coeff": 1}
    assert changes([1.0, 0.0, 0.0, 0.0], **terms) == [1, 0, 0, 0]


def test_length_profile_scales_rewards_of_correct_responses_by_their_length():
    band = ProfileBandChannel(a=4, b=12, f=0.5)
    assert [band_factor(length, band) for length in (4, 8, 12, 50)] == [1.0, 0.75, 0.5, 0.5]
    # lengths 10: 1 - 6/8 * 0.5
    assert changes(bands={"total": band}, profile_band_total=True) == pytest.approx([0.625, 0, 1, 0.625])
    assert changes(bands={"total": band}) == [1, 0, 1, 1]


def test_length_profile_of_a_prompt_replaces_that_of_the_configuration():
    band = {"enabled": True, "defaults": {"total": {"a": 1, "b": 2, "f": 0.5}}}
    own = {"profile_band": {"total": {"a": 2, "b": 4, "f": 0.2}, "answer": None}}
    batch = rollouts(["aaa", "a"] * 2, [1.0] * 4, [0, 0, 1, 1], extra_env_info=[own, own, None, None])
    apply_length_penalty(batch, LengthPenaltyConfig(profile_band=band), letters)
    assert batch["total_reward"].tolist() == pytest.approx([0.6, 1.0, 0.5, 1.0])  # 1 - 1/2 * 0.8, and f beyond b


@pytest.mark.parametrize("field, expected", [("a", [0.9, 0, 1.2, 0.9]), ("b", [1, 0, 1, 1])])
def test_group_length_penalty_applies_only_if_the_mean_correct_length_exceeds_the_profile(field, expected):
    band = ProfileBandChannel(a=7.9, b=8.0, f=1.0)  # the mean is 8
    gate = {"group_length_penalty_profile_gate": True, "group_length_penalty_profile_gate_field": field}
    assert changes(bands={"total": band}, group_total_length_penalty_coeff=0.3, **gate) == pytest.approx(expected)
    assert changes(group_total_length_penalty_coeff=0.3, **gate) == [1, 0, 1, 1]  # no band: closed


@pytest.mark.parametrize("text, opens_thinking, expected", [
    ("<think>a b</think>c", False, ("a b", "c")), ("a b</think>c", False, ("a b", "c")), ("<think>cut off", False, ("cut off", "")),
    ("plain", False, ("", "plain")), ("cut off", True, ("cut off", "")), ("a b</think>c", True, ("a b", "c")),
])  # fmt: skip
def test_response_is_split_into_reasoning_and_answer_at_the_closing_thinking_tag(text, opens_thinking, expected):
    assert reasoning_and_answer(text, opens_thinking) == expected


def rollouts(texts, rewards, groups, tasks=None, **columns):
    logs = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": text}] for text in texts]
    return BatchedDataDict(
        message_log=logs, total_reward=torch.tensor(rewards), group_id=torch.tensor(groups),
        task_name=tasks or ["t"] * len(texts), **columns,
    )  # fmt: skip


def letters(text, add_special_tokens):
    assert add_special_tokens is False
    return {"input_ids": list(text)}


BONUS = {"default": {"total_bonus": 0.5}}


def test_length_penalty_is_computed_per_group_and_its_metrics_are_averaged_over_samples():
    batch = rollouts(["aaaa", "a", "aa", "aaa"], [1.0, 1.0, 0.5, 1.0], [0, 0, 1, 1])
    metrics = apply_length_penalty(batch, LengthPenaltyConfig(**BONUS), letters)
    assert batch["total_reward"].tolist() == [1.0, 1.5, 0.5, 1.0]  # the second group is not binary
    assert metrics == {
        "length_penalty/env_reward_mean": 0.875, "length_penalty/reward_delta_mean": 0.125, "length_penalty/wiped_correct_frac": 0.0,
        "length_penalty/adjusted_frac": 0.25, "length_penalty/skipped_non_binary_frac": 0.5,
    }  # fmt: skip


def test_length_penalty_is_not_applied_to_rewards_with_several_components():
    batch = rollouts(["aa", "a"], [1.0, 1.0], [0, 0], **{"reward/x": torch.ones(2)})
    metrics = apply_length_penalty(batch, LengthPenaltyConfig(**BONUS), letters)
    assert metrics["length_penalty/skipped_non_binary_frac"] == 1.0
    assert batch["total_reward"].tolist() == [1.0, 1.0]


def test_task_specific_length_penalty_settings_override_single_default_keys():
    config = LengthPenaltyConfig(
        **BONUS, agent_overrides={"off": {"enabled": False}, "more": {"longest_total_penalty": 0.25}, "same": None}
    )
    tasks = ["off"] * 2 + ["more"] * 2 + ["same"] * 2 + ["other"] * 2
    batch = rollouts(["aa", "a"] * 4, [1.0] * 8, [0, 0, 1, 1, 2, 2, 3, 3], tasks)
    apply_length_penalty(batch, config, letters)
    assert batch["total_reward"].tolist() == [1, 1, 0.75, 1.5, 1, 1.5, 1, 1.5]


def test_length_profile_can_be_disabled_in_its_section_or_in_the_default_section():
    band = {"enabled": True, "defaults": {"total": {"a": 1, "b": 2, "f": 0.5}}}
    sections = (band, {}), (band, {"profile_band_total": False}), (band | {"enabled": False}, {})
    configs = [LengthPenaltyConfig(profile_band=section, default=default) for section, default in sections]
    assert [config.params_of("t").profile_band_total for config in configs] == [True, False, False]


@pytest.mark.parametrize("least, std, expected", [
    (2, 1.0, [1.0, 0.7, 0.0]),  # earlier lengths 2 and 4 passed: 3 + sqrt(2) = 4.41 tokens
    (2, 0.0, [0.7, 0.7, 0.0]), (3, 1.0, [1.0, 1.0, 0.0]),
])  # fmt: skip
def test_profile_based_length_penalty_starts_n_standard_deviations_above_the_mean_length(least, std, expected):
    info = {"profiled_rewards": [1, 0, 1], "profiled_output_lengths": [2, 90, 4]}
    batch = rollouts(["aaa", "aaaaa", "aaaaa"], [1.0, 1.0, 0.0], [0, 0, 0], extra_env_info=[info] * 3)
    params = {"profiled_length_penalty": 0.3, "profiled_length_min_samples": least, "profiled_length_n_std": std}
    apply_length_penalty(batch, LengthPenaltyConfig(default=params), letters)
    assert batch["total_reward"].tolist() == pytest.approx(expected)


def test_profile_based_length_penalty_is_not_added_to_a_penalty_by_comparison_with_the_group():
    """NeMo RL: adjustments 0.1 * (1/3, -2/3, 1/3) by length; the second is lowered already, all are too long."""
    params = LengthPenaltyParams(group_total_length_penalty_coeff=0.1, profiled_length_penalty=0.3)
    lengths = {name: [4, 10, 4] for name in ("reasoning", "answer", "total")}
    found = penalized([1.0] * 3, lengths, params, too_long=4)
    assert found == pytest.approx([1 + 0.1 / 3 - 0.3, 1 - 0.2 / 3, 1 + 0.1 / 3 - 0.3])


def test_profile_based_length_penalty_is_skipped_unless_both_profile_columns_are_present():
    config = LengthPenaltyConfig(default={"profiled_length_penalty": 0.3})
    batch = rollouts(["aaa", "a"], [1.0, 1.0], [0, 0], extra_env_info=[{}, {}])
    apply_length_penalty(batch, config, letters)
    assert batch["total_reward"].tolist() == [1.0, 1.0]
    batch["extra_env_info"] = [{"profiled_rewards": [1]}] * 2
    with pytest.raises(ValueError, match="needs profiled_rewards and profiled_output_lengths"):
        apply_length_penalty(batch, config, letters)
