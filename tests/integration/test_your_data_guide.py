"""The files of the guide "Your data, your reward" pass the check command, and its components train."""

import re
import sys
from pathlib import Path

import pytest
from nemo_rl_cpp import cli, dotted_names, run_grpo_math

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "your-data-your-reward.md"
NAMES = ("make_rows.py", "my_rewards.py", "words.yaml", "system.txt", "my_parts.py", "parts.yaml")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with the files that the guide prints; the first line of each is its name."""
    for block in re.findall(r"```\w+\n(# [\w.]+\n.*?)```", GUIDE.read_text(), re.DOTALL):
        name, _, text = block.partition("\n")
        (tmp_path / name.removeprefix("# ")).write_text(text)
    assert {path.name for path in tmp_path.iterdir()} == set(NAMES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dotted_names, "searched", [])
    monkeypatch.syspath_prepend(tmp_path)
    exec((tmp_path / "make_rows.py").read_text(), {})
    yield tmp_path
    for module in ("my_rewards", "my_parts"):
        sys.modules.pop(module, None)


def test_example_files_in_the_custom_data_guide_pass_the_check_command(folder, capsys):
    assert cli.main(["check", "--config", "words.yaml"]) == 0, capsys.readouterr().err
    assert "words.yaml: no mistakes (grpo)" in capsys.readouterr().out
    given = ["data.train.data_path=words.jsonl", "env.reward_functions.functions=[my_rewards.right]"]
    assert cli.main(["check", "--config", "grpo_jsonl.yaml", *given]) == 0, capsys.readouterr().err
    assert cli.main(["check", "--config", "grpo_jsonl.yaml", given[0]]) == 2
    assert "env.reward_functions.functions is '???': it must be given" in capsys.readouterr().err


def test_run_trains_with_the_example_components_of_the_custom_data_guide(folder, capsys):
    sizes = ["grpo.num_prompts_per_step=4", "policy.train_global_batch_size=32", "grpo.max_num_steps=2"]
    small = [*sizes, "checkpointing.enabled=false"]
    assert run_grpo_math.main(["--config", "parts.yaml", *small]) == 0, capsys.readouterr().err
    assert "step 2/2 | reward" in capsys.readouterr().out
