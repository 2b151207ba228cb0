import nemo_rl_cpp
import numpy as np
import pytest
import torch

ROWS = [{"prompt": f"{a}{b}=", "answer": f"{a}" * 3} for a in range(10) for b in range(2)]


def share_right(completions, answer):
    return [sum(c == a for c, a in zip(text, right)) / 3 for text, right in zip(completions, answer)]


def run(tmp_path, prompts=ROWS, reward=share_right, **options):
    settings = dict(
        num_steps=2, num_prompts_per_step=4, num_generations=4, max_new_tokens=3, max_length=16, log_dir=tmp_path
    )
    return nemo_rl_cpp.train_grpo("tiny-random", prompts, reward, **settings | options)


def test_train_grpo_returns_step_metrics_rewards_and_validation_results(tmp_path):
    result = run(tmp_path, validation=ROWS[:3])
    assert [row["step"] for row in result.history] == [1, 2]
    assert len(result.rewards) == 2 and all(0 <= reward <= 1 for reward in result.rewards)
    assert [row["step"] for row in result.validations] == [0, 2] and result.validations[0]["num_samples"] == 3
    assert all(row["token_mult_prob_error"] == 1.0 for row in result.history)
    assert result.log_dir.is_relative_to(tmp_path) and "<iframe" in result._repr_html_()


class WritesOnly:  # what scripts that copy their output to a file put in place of stdout
    def write(self, text):
        return len(text)

    def flush(self):
        pass


@pytest.mark.parametrize("stream", [None, WritesOnly()])
def test_train_grpo_runs_without_stdout_or_with_one_that_is_no_file(stream, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setattr("sys.stderr", stream)
    assert len(run(tmp_path, num_steps=1).rewards) == 1


def test_string_prompts_are_continued_as_text_and_conversations_use_the_chat_template(tmp_path):
    seen = []

    def reward(prompts, completions):
        seen.extend(prompts)
        return [1.0 for _ in completions]

    result = run(tmp_path, ["34=", [{"role": "user", "content": "12="}]], reward, num_steps=1)
    # the tiny tokenizer's template joins the contents; two prompts, although four were asked for
    assert set(seen) == {"12=", "34="} and len(seen) == 8 and result.config.grpo.num_prompts_per_step == 2


def test_keyword_arguments_of_train_grpo_set_configuration_keys(tmp_path):
    result = run(tmp_path, num_steps=1, overlong_filtering=True, loss_fn__ratio_clip_max=0.3, policy__optimizer__kwargs__weight_decay=0.5,
                 loss_fn__reference_policy_kl_penalty=0.01)  # fmt: skip
    config = result.config
    assert config.grpo.overlong_filtering and config.loss_fn.ratio_clip_max == 0.3
    assert config.policy.optimizer.kwargs.weight_decay == 0.5
    assert "kl_penalty" in result.history[0] and result.policy.reference is not None


def test_policy_saved_from_python_loads_again_with_identical_weights(tmp_path):
    result = run(tmp_path, num_steps=1)
    folder = result.save(tmp_path / "model")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    again = nemo_rl_cpp.train_grpo(
        str(folder), ROWS, share_right, num_steps=1, learning_rate=0.0, num_prompts_per_step=4, num_generations=4,
        max_new_tokens=3, max_length=16, log_dir=tmp_path / "again",
    )  # fmt: skip
    assert again.policy.weight_digest() == result.policy.weight_digest()
    assert again.generate(["12="]) == result.generate(["12="])


def test_second_train_grpo_call_with_the_same_checkpoint_dir_resumes_the_run(tmp_path):
    run(tmp_path, num_steps=2, checkpoint_dir=tmp_path / "c")
    result = run(tmp_path, num_steps=3, checkpoint_dir=tmp_path / "c")
    assert [row["step"] for row in result.history] == [3]


CHAT = [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}]


@pytest.mark.parametrize(("arguments", "words"), [
    ({"prompts": ["1=", "1" * 16]}, "^prompt 1 has 16 tokens: no room to answer within max_length=16$"),
    ({"validation": ["1=", "1" * 40]}, "^validation prompt 1 has 40 tokens"),
    ({"prompts": [[{"role": "user", "content": "1" * 16}]]}, "^prompt 0 has 16 tokens"),
    ({"prompts": [CHAT], "policy__tokenizer__chat_template": "{{ messages[1].content }}"}, r"^prompt 0: the chat template leaves out message 0"),
    ({"prompts": [{"prompt": CHAT, "tools": 3}]}, r"^prompt 0: 'tools' must be a list of JSON schemas"),
])  # fmt: skip
def test_train_grpo_validates_every_prompt_before_the_model_is_loaded(tmp_path, monkeypatch, arguments, words):
    monkeypatch.setattr("nemo_rl_cpp.algorithms.parts.make_policy", lambda *a, **k: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match=words):
        run(tmp_path, reward=lambda completions, **_: [0.0] * len(completions), **arguments)


@pytest.mark.parametrize("model", [None, "", 3, b"m", "a\0b", object()])
def test_model_argument_that_is_neither_a_model_name_nor_a_folder_is_an_error(model):
    with pytest.raises(ValueError, match="it must be a folder, a packaged model, or a name on the hub"):
        nemo_rl_cpp.train_grpo(model, ROWS, share_right)


def test_train_grpo_reports_configuration_errors_and_warnings_before_the_model_is_loaded(tmp_path, monkeypatch, capsys):
    from nemo_rl_cpp.api import training
    from nemo_rl_cpp.checks import Finding

    findings = [
        Finding("error", "policy.model_name", "has no weights"),
        Finding("warning", "", "slow"),
        Finding("error", "data.train", "is not ours"),
    ]
    monkeypatch.setattr(training, "preflight", lambda config: findings)
    monkeypatch.setattr(training, "_train", lambda *parts: "trained")
    with pytest.raises(ValueError, match="^policy.model_name has no weights$"):
        run(tmp_path)
    del findings[0]
    assert run(tmp_path) == "trained" and "warning: slow\n" in capsys.readouterr().err


def test_training_responses_end_at_the_configured_stop_string(tmp_path):
    lengths = []

    def reward(completions):
        lengths.extend(map(len, completions))
        return [float(len(text)) for text in completions]

    result = run(tmp_path, ["1="] * 2, reward, num_steps=1, stop_strings=list("0123456789="), max_new_tokens=6)
    assert set(lengths) == {1} and result.config.policy.generation.stop_strings == list("0123456789=")


def test_training_result_generates_greedily_unless_a_temperature_is_given(tmp_path):
    result = run(tmp_path, num_steps=1)
    greedy = result.generate(["12="] * 8)
    assert len(set(greedy)) == 1 and result.generate(["12="] * 8, temperature=0) == greedy
    assert len(set(result.generate(["12="] * 8, temperature=1.0))) > 1
    assert result.generate(["12="] * 8, temperature=1e-6) == greedy  # of a model without ties
    assert len(result.generate("12=", max_new_tokens=1)[0]) <= 1 and result.config.policy.generation.max_new_tokens == 3
    assert result.generate([]) == []


def test_training_result_of_a_run_that_served_the_policy_generates_and_is_evaluated(tmp_path):
    result = run(tmp_path, num_steps=1, policy__generation__expose_http_server=True)
    assert result.generate(["12="]) == run(tmp_path, num_steps=1).generate(["12="])
    assert nemo_rl_cpp.evaluate(result, ROWS, share_right).prompts == len(ROWS)


def captured(monkeypatch, call, reward_funcs=share_right, **options):
    """(configuration, environment) of a call that is checked and then does not train."""
    from nemo_rl_cpp.api import training

    monkeypatch.setattr(
        training, "_train", lambda config, rows, val_rows, environment, callbacks: (config, environment)
    )
    return call("tiny-random", ROWS, reward_funcs, num_prompts_per_step=1, max_new_tokens=3, max_length=16, **options)


def test_gdpo_applies_each_reward_weight_exactly_once(tmp_path, monkeypatch):
    from nemo_rl_cpp.algorithms.advantage_estimator import make_estimator

    functions = {"good": lambda completions: [1.0] * 4, "bad": lambda completions: [0.0, 1.0, 0.0, 1.0]}
    options = dict(adv_estimator="gdpo", reward_weights={"good": 1, "bad": -0.5}, num_generations=4)
    for more in ({}, {"adv_estimator": None, "grpo__adv_estimator__name": "gdpo"}):
        config, environment = captured(monkeypatch, nemo_rl_cpp.train_grpo, functions, **options | more)
        parts = environment.step([[{"role": "assistant", "content": ""}]] * 4, [None] * 4).rewards
        batch = {f"reward/{name}": values for name, values in parts.items()}
        estimator = make_estimator("grpo", config.grpo.adv_estimator, config.loss_fn)
        advantages = estimator.compute_advantage(
            torch.zeros(4, 1, dtype=torch.int64), torch.zeros(4), torch.ones(4, 1), repeated_batch=batch
        )
        assert advantages.flatten().tolist() == pytest.approx([0.866, -0.866, 0.866, -0.866], abs=1e-3)
        assert parts["bad"].tolist() == [0, 1, 0, 1]


def test_gdpo_run_logs_the_weighted_total_reward(tmp_path):
    functions = {"one": lambda completions: [1.0] * len(completions)}
    functions["two"] = lambda completions: [2.0] * len(completions)
    weights = {"one": 1, "two": -0.25}
    result = run(tmp_path, ["1="], functions, num_steps=1, adv_estimator="gdpo", reward_weights=weights)
    assert result.rewards == [0.5] and result.history[0]["rewards/two"] == 2.0


def own_estimator(rewards):
    return rewards


def own_loss(next_token_logprobs):
    return next_token_logprobs.sum()


def test_reward_function_gets_none_for_a_column_that_a_row_lacks_and_needs_it_in_validation_rows_too(tmp_path):
    rows, seen = [{"prompt": "1=", "answer": "1"}, {"prompt": "2=", "tests": "2"}], set()

    def both(prompts, completions, answer, tests):
        seen.update(zip(prompts, answer, tests, strict=True))
        return [0.0] * len(completions)

    run(tmp_path, rows, both, num_prompts_per_step=1)
    assert seen == {("1=", "1", None), ("2=", None, "2")}
    with pytest.raises(ValueError, match="both asks for answer and tests, but the samples have completions, prompts"):
        run(tmp_path / "never made", rows, both, validation=["3="])
    assert not (tmp_path / "never made").exists()


@pytest.mark.parametrize("rate", [1e-3, np.float32(1e-3), 1])
def test_default_learning_rate_of_the_critic_is_three_times_that_of_the_policy(monkeypatch, rate):
    config, _ = captured(monkeypatch, nemo_rl_cpp.train_ppo, num_generations=2, learning_rate=rate)
    assert config.value.optimizer.kwargs.lr == pytest.approx(3 * rate)


@pytest.mark.parametrize("uses_critic", [True, False])
def test_critic_is_trained_with_a_custom_estimator_only_if_uses_critic_is_true(monkeypatch, uses_critic):
    options = dict(adv_estimator=own_estimator, num_generations=2, ppo__adv_estimator__uses_critic=uses_critic)
    assert captured(monkeypatch, nemo_rl_cpp.train_ppo, **options)[0].has_critic == uses_critic


def test_configuration_in_a_checkpoint_names_custom_loss_and_estimator_objects(tmp_path):
    import yaml

    result = run(tmp_path, num_steps=1, adv_estimator=own_estimator, loss_fn=own_loss, checkpoint_dir=tmp_path / "c")
    (written,) = (tmp_path / "c").glob("step_1/config.y*ml")
    assert yaml.safe_load(written.read_text())["loss_fn"]["name"] == "own_loss (given from Python)"
    assert "own_estimator (given from Python)" in (result.log_dir / "report.html").read_text()


def test_train_grpo_saves_checkpoints_if_checkpointing_is_enabled_by_keywords(tmp_path, monkeypatch):
    options = {"checkpointing__enabled": True, "checkpointing__checkpoint_dir": "b", "checkpointing__save_period": 5}
    checkpointing = captured(monkeypatch, nemo_rl_cpp.train_grpo, **options)[0].checkpointing
    assert (checkpointing.enabled, checkpointing.checkpoint_dir, checkpointing.save_period) == (True, "b", 5)
    config, _ = captured(monkeypatch, nemo_rl_cpp.train_grpo, checkpoint_dir="a", checkpointing__enabled=True)
    assert config.checkpointing.enabled and config.checkpointing.checkpoint_dir == "a"
