import re

import pytest
import tiny
from nemo_rl_cpp import run_grpo_math

OPTIONS = [
    "--config", "grpo_tiny.yaml", *tiny.SMALL, "grpo.val_period=0", "grpo.val_at_end=false",
    "checkpointing.enabled=false", "logger.tensorboard_enabled=false",
]  # fmt: skip


def run(capsys, tmp_path, *overrides):
    tiny.one_thread()
    assert run_grpo_math.main([*OPTIONS, f"logger.log_dir={tmp_path / 'logs'}", *overrides]) == 0
    shown, errors = capsys.readouterr()
    assert errors == ""
    lines = shown.splitlines()
    said = [line for line in lines if line.startswith("serious: ")]
    table = " ".join(
        re.sub(r"[│┌┐└┘─┬┴]", " ", line).strip()
        for line in lines[lines.index(next(line for line in lines if line.startswith("GRPO tiny-random: "))) :]
    )
    return said, re.sub(r"\s+", " ", table)


def test_run_with_always_equal_rewards_reports_that_nothing_was_learned(tmp_path, capsys, monkeypatch):
    (tmp_path / "constant_reward.py").write_text("def half(completions, **_):\n    return [0.5 for _ in completions]\n")
    monkeypatch.syspath_prepend(tmp_path)
    functions = "+env={reward_functions: {functions: [constant_reward.half]}}"
    options = ("grpo.max_num_steps=4", "data.default.env_name=reward_functions", functions)
    (said,), table = run(capsys, tmp_path, *options)
    assert "had the same reward, 0.5" in said and "reward function gives one number to everything" in said
    assert table.startswith("GRPO tiny-random: finished, but nothing was learned")
    assert "had the same reward, 0.5" in table


def test_run_with_a_shipped_configuration_reports_no_serious_problem(tmp_path, capsys):
    """Its answers have three digits, and so have its responses: most end at the limit, as they should."""
    said, table = run(capsys, tmp_path, "grpo.max_num_steps=12")
    assert said == [] and table.startswith("GRPO tiny-random: finished ") and "serious" not in table


def test_error_in_a_custom_loss_names_its_function_file_and_line(tmp_path):
    def my_loss(*args, **kwargs):
        raise ZeroDivisionError("no tokens")

    made = tiny.make(tmp_path, *tiny.SMALL, "grpo.max_num_steps=1", "logger.tensorboard_enabled=false")
    made.loss_fn = my_loss
    place = r"in .*my_loss \(.*test_serious_findings.py:\d+\)$"
    with pytest.raises(ZeroDivisionError, match=f"^your code failed with ZeroDivisionError: no tokens, {place}"):
        made.train()
