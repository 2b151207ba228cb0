import math
import random

import pytest
from nemo_rl_cpp.report import findings
from nemo_rl_cpp.report.findings import LEVELS, RULES, Alerts, find
from nemo_rl_cpp.report.history import MetricHistory
from synthetic_run import history_of as H


def noisy(values, size=0.02, seed=1):
    rng = random.Random(seed)
    return [value + rng.gauss(0, size) for value in values]


def ramp(low, high, steps=40):
    return [low + (high - low) * i / (steps - 1) for i in range(steps)]


# rule, history that triggers it, level, words of the title, history that does not
CASES = [
    (findings.reward_trend, H(train__reward=noisy(ramp(0.1, 0.6))), "good", "The reward rose from 0.1",
     H(train__reward=[0.1] * 5)),
    (findings.reward_trend, H(train__reward=noisy(ramp(0.6, 0.1))), "bad", "The reward fell", H(other=ramp(0, 1))),
    (findings.reward_trend, H(train__reward=noisy([0.3] * 40)), "warn", "has not clearly moved", H(train__reward=[0.3]
     * 5)),
    (findings.equal_rewards, H(train__groups__pct_equal=[71.0] * 5, train__groups__pct_equal_best=[60.0] * 5,
     train__groups__pct_equal_worst=[11.0] * 5), "warn", "71 % of groups had equal rewards",
     H(train__groups__pct_equal=[39.0] * 5)),
    (findings.equal_rewards, H(train__baseline_reward__pct_mixed=[5.0], train__baseline_reward__pct_0=[95.0]), "bad",
     "95 % of groups", H(train__baseline_reward__pct_mixed=[80.0])),
    (findings.truncation, H(train__truncation_rate=[0.3] * 10), "warn", "30 % of responses were cut off",
     H(train__truncation_rate=[0.9] * 5 + [0.1] * 10)),
    (findings.truncation, H(train__truncation_rate=[0.7]), "bad", "70 %", H(train__truncation_rate=[0.19])),
    (findings.truncation, H(train__truncation_rate=[0.8, 1.0, 1.0], train__reward_of_truncated=[0.3, 0.4, 0.5],
     train__reward=[0.25, 0.4, 0.5]), "info", "93 % of responses end at the length limit, and are rewarded",
     H(train__truncation_rate=[0.1], train__reward_of_truncated=[0.3])),
    (findings.truncation, H(train__truncation_rate=[1.0] * 3, train__reward_of_truncated=[0.1] * 3,
     train__reward=[0.1] * 3), "warn", "100 % of responses were cut off", H(train__truncation_rate=[0.0])),
    (findings.truncation, H(train__truncation_rate=[0.7], train__reward_of_truncated=[0.0], train__reward=[0.2]),
     "bad", "70 % of responses", H()),
    (findings.prompts_cut, H(train__cut_prompts_rate=[0.25]), "warn", "25 % of prompts were too long",
     H(train__reward=[0.5])),
    (findings.prompts_cut, H(train__cut_prompts_rate=[1.0, 1.0]), "bad", "100 % of prompts were too long", H()),
    (findings.entropy, H(train__approx_entropy=ramp(1.2, 0.02)), "warn", "The entropy collapsed",
     H(train__approx_entropy=ramp(1.2, 0.5))),
    (findings.entropy, H(train__approx_entropy=ramp(0.5, 0.01)), "warn", "collapsed", H(train__approx_entropy=[0.05] *
     40)),
    (findings.entropy, H(train__approx_entropy=noisy(ramp(0.5, 4.0))), "warn", "The entropy grew",
     H(train__approx_entropy=noisy(ramp(0.5, 0.9)))),
    (findings.kl_drift, H(train__kl_penalty=[0.8]), "warn", "far from its reference: KL 0.8",
     H(train__kl_penalty=[0.1])),
    (findings.value_quality, H(train__critic__explained_var=[-0.5]), "warn", "explains nothing",
     H(train__critic__explained_var=[0.8])),
    (findings.exactness, H(train__token_mult_prob_error=[1.0, 1.0]), "good", "exactly 1.0: trainer and generator agree bit for bit", H()),
    (findings.exactness, H(train__token_mult_prob_error=[1.0, 1.0000001]), "info", "in 1 of 2 steps",
     H(train__loss=[1.0])),
    (findings.exactness, H(train__token_mult_prob_error=[1.0, 1.2]), "bad", "reached 1.2", H()),
    (findings.not_finite, H(train__loss=[0.1, math.nan]), "bad", "train/loss was not finite in 1 step, first in step 2", H(train__probs_ratio_min=[math.inf], train__loss=[0.1])),
    (findings.vanishing_gradient, H(train__grad_norm=[1.0, 0.0] + [0.0] * 10), "bad", "was 0 in the last 10 steps",
     H(train__grad_norm=[0.0, 0.0, 0.1])),
    (findings.verifier_timeouts, H(train__math__num_timeouts=[0.0, 2.0]), "warn", "2 answers could not be verified",
     H(train__math__num_timeouts=[0.0], timing__train__timeout=[5.0])),
    (findings.verifier_timeouts, H(train__verifier_timeouts=[3.0], train__math__verifier_timeouts=[3.0]), "warn", "3 answers", H()),
    (findings.unmatchable_truths, H(train__a__verifier_unmatchable_truths=[3.0], validation__verifier_unmatchable_truths=[0.0, 1.0]), "bad", "4 answers scored 0 because nothing can match their truth", H(train__verifier_unmatchable_truths=[0.0])),
]  # fmt: skip


@pytest.mark.parametrize(
    "function, triggers, level, words, silent", CASES, ids=[f"{c[0].__name__}-{c[2]}-{i}" for i, c in enumerate(CASES)]
)
def test_each_report_warning_appears_only_for_metrics_that_justify_it(function, triggers, level, words, silent):
    finding = function(triggers)
    assert finding is not None, "the history should trigger it"
    assert finding.level == level and words in finding.title, finding
    assert finding.metric and "{" not in finding.title + finding.advice
    assert function(silent) is None


def test_every_report_warning_accepts_empty_and_non_finite_metrics():
    assert {case[0] for case in CASES} == set(RULES)
    names = {name for case in CASES for name in case[1].names()}
    for values in ([], [0.0], [math.nan], [math.inf] * 30, [0.0] * 30, [-1.0] * 30):
        history = MetricHistory({"step": step, **dict.fromkeys(names, value)} for step, value in enumerate(values))
        for finding in find(history):
            assert finding.level in LEVELS


def test_report_warnings_are_sorted_by_severity():
    history = H(train__token_mult_prob_error=[1.0] * 12, train__kl_penalty=[0.8], train__loss=[math.nan] * 12)
    assert [finding.level for finding in find(history)] == ["bad", "warn", "good"]


@pytest.mark.parametrize("best, words", [(65.0, "too easy"), (6.0, "too hard"), (35.0, "others too hard")])
def test_warning_about_equal_rewards_distinguishes_too_easy_from_too_hard_prompts(best, words):
    shares = {"train__groups__pct_equal_best": [best], "train__groups__pct_equal_worst": [71.0 - best]}
    assert words in findings.equal_rewards(H(train__groups__pct_equal=[71.0], **shares)).advice


SETTINGS = {
    "grpo": {"num_generations_per_prompt": 8, "adv_estimator": {"name": "grpo"}, "overlong_filtering": False},
    "policy": {"max_total_sequence_length": 128, "generation": {"max_new_tokens": 64}},
    "data": {"max_input_seq_length": 40},
}


def settings(**sections):
    return {name: {**SETTINGS[name], **sections.get(name, {})} for name in SETTINGS}


def silent(given=SETTINGS, steps=4, **metrics):
    """Return the metrics of a run without gradients, with `metrics` at every step."""
    row = dict.fromkeys(("grad_norm", "advantages/min", "advantages/max", "reward"), 0.0) | {"groups/pct_equal": 100.0}
    row = {f"train/{name}": value for name, value in (row | metrics).items()}
    return MetricHistory([{"step": step, **row} for step in range(1, steps + 1)], given)


# what happened, words of the advice
CAUSES = {
    "one generation": (silent(settings(grpo={"num_generations_per_prompt": 1})), ["grpo.num_generations_per_prompt is 1", "2 or more"]),
    "prompts cut": (silent(cut_prompts_rate=1.0, mean_prompt_length=57.0), ["All prompts have data.max_input_seq_length = 40 tokens or more", "57 on average"]),
    "context full": (
        silent(truncation_rate=1.0, mean_gen_tokens_per_sample=3.0, max_gen_tokens_per_sample=5.0, mean_prompt_length=125.0),
        ["Prompts of 125 tokens leave 3 of policy.max_total_sequence_length = 128", "max_new_tokens is 64", "raise policy.max_total_sequence_length"]),
    "all masked": (
        silent(settings(grpo={"overlong_filtering": True}), truncation_rate=1.0, mean_gen_tokens_per_sample=64.0, mean_prompt_length=20.0),
        ["grpo.overlong_filtering masks every response"]),
    "answers cut": (silent(truncation_rate=1.0, mean_gen_tokens_per_sample=64.0, mean_prompt_length=20.0), ["raise policy.generation.max_new_tokens", "tokenizer"]),
    "constant reward": (silent(truncation_rate=0.0, accuracy=1.0, reward=1.0), ["had the same reward, 1.", "one number to everything"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CAUSES)
def test_warning_about_zero_gradients_names_the_actual_cause(case):
    history, words = CAUSES[case]
    found = {finding.metric: finding for finding in find(history) if finding.level == "bad"}
    for metric in ("train/grad_norm", "train/groups/pct_equal"):
        for word in words:
            assert word in found[metric].advice, found[metric]
    assert all("easier prompts" not in finding.advice for finding in found.values())


def test_warning_about_a_full_context_does_not_advise_to_raise_max_new_tokens():
    found = findings.truncation(silent(truncation_rate=0.5, mean_gen_tokens_per_sample=30.0, mean_prompt_length=90.0))
    assert found.title == "50 % of responses were cut off at the end of the context"
    assert "max_total_sequence_length = 128" in found.advice


def test_group_warnings_are_omitted_if_the_advantage_estimator_uses_no_groups():
    ppo = {"ppo": {"num_prompts_per_step": 8, "num_generations_per_prompt": 1}}
    plus_plus = settings(grpo={"num_generations_per_prompt": 1, "adv_estimator": {"name": "reinforce_plus_plus"}})
    for given in (ppo, {"ppo": {**ppo["ppo"], "num_generations_per_prompt": 8}}, plus_plus):
        assert findings.equal_rewards(silent(given)) is None
        assert "grpo.use_dynamic_sampling" not in "".join(finding.advice for finding in find(silent(given)))
    assert findings.equal_rewards(silent()).level == "bad"


def test_distillation_whose_reward_does_not_move_is_no_warning_because_its_loss_reads_no_rewards():
    rows = [{"step": step, "train/reward": reward} for step, reward in enumerate(noisy([0.3] * 40), start=1)]
    assert findings.reward_trend(MetricHistory(rows, SETTINGS)).level == "warn"
    assert findings.reward_trend(MetricHistory(rows, {"distillation": {"max_num_steps": 40}})) is None


DEAD = {
    "grad_norm": 0.0, "reward": 0.5, "groups/pct_equal": 100.0, "accuracy": 0.5, "advantages/min": 0.0,
    "advantages/max": 0.0,
}  # fmt: skip
ALIVE = {"grad_norm": 1.0, "reward": 0.5, "groups/pct_equal": 10.0, "token_mult_prob_error": 1.0}


def test_run_with_equal_rewards_prints_one_warning_and_repeats_the_warning_in_the_final_table():
    alerts = Alerts()
    said = [alerts.step(step, DEAD) for step in range(1, 11)]
    assert said[:2] == [[], []] and said[3:] == [[]] * 7
    (line,) = said[2]  # two findings of one cause are one line
    assert line.startswith("serious: ") and "had the same reward, 0.5" in line
    assert alerts.learned_nothing and len(alerts.table()) == 1 and "had the same reward" in alerts.table()["serious"]


def test_healthy_run_prints_no_warning_until_a_metric_becomes_seriously_wrong():
    alerts = Alerts()
    assert [alerts.step(step, ALIVE) for step in range(1, 200)] == [[]] * 199
    assert alerts.table() == {} and not alerts.learned_nothing
    assert not Alerts().learned_nothing and Alerts().table() == {}
    worse = ALIVE | {"token_mult_prob_error": 1.2}
    (line,) = (line for step in range(200, 250) for line in alerts.step(step, worse))
    assert "token_mult_prob_error reached 1.2" in line


def test_each_serious_warning_has_a_separate_row_in_the_final_table():
    alerts = Alerts({"data": {"max_input_seq_length": 9}})
    for step in range(1, 4):
        alerts.step(step, DEAD | {"cut_prompts_rate": 1.0, "token_mult_prob_error": 2.0})
    rows = alerts.table()
    assert list(rows) == ["serious", "serious 2"]
    assert sum("data.max_input_seq_length = 9" in text for text in rows.values()) == 1


@pytest.mark.parametrize(
    "section, key",
    [("ppo", "num_prompts_per_step"), ("grpo", "num_prompts_per_step"), ("distillation", "max_num_steps")],
)
def test_advice_about_truncated_responses_names_configuration_keys_of_the_algorithm_in_use(section, key):
    history = MetricHistory([{"step": 1, "train/truncation_rate": 0.5}], {section: {key: 4}})
    assert f"({section}.reward_shaping.enabled, {section}.overlong_filtering)" in findings.truncation(history).advice


def test_advice_of_a_dapo_run_does_not_name_the_keys_that_it_has_set():
    given = settings(
        grpo={"use_dynamic_sampling": True, "reward_shaping": {"enabled": True}, "overlong_filtering": True}
    )
    history = silent(given, truncation_rate=0.5, mean_gen_tokens_per_sample=64.0, mean_prompt_length=20.0)
    assert findings.truncation(history).advice == "Raise policy.generation.max_new_tokens, or add stop strings."
    shares = {"train/groups/pct_equal": 71.0, "train/groups/pct_equal_best": 65.0}
    advice = findings.equal_rewards(MetricHistory([{"step": 1, **shares}], given)).advice
    assert "Dynamic sampling replaces" in advice and "grpo.use_dynamic_sampling" not in advice
