from pathlib import Path

import nemo_rl_cpp
import pytest
from nemo_rl_cpp.data.datasets import AllTaskProcessedDataset
from nemo_rl_cpp.data.interfaces import TaskDataSpec
from nemo_rl_cpp.files.prompt_files import find_file


def test_shipped_prompt_files_are_found_from_any_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("examples/prompts/cot.txt", "prompts/cot.txt", "cot.txt"):
        assert "{}" in find_file(name, "k").read_text()
    inside = Path(nemo_rl_cpp.__file__).parent / "prompts"
    shipped = sorted(p.name for p in inside.iterdir())
    assert {"cot.txt", "math.txt", "multichoice.txt"} <= set(shipped)
    for name in shipped:
        text = (inside / name).read_text().format("THE QUESTION")
        assert ("THE QUESTION" in text) == (name not in {"gsm8k.txt", "multichoice.txt"}) and "{{" not in text


def test_local_prompt_file_takes_precedence_over_a_shipped_one_and_a_missing_file_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cot.txt").write_text("mine {}")
    assert TaskDataSpec(prompt_file="cot.txt").prompt == "mine {}"
    with pytest.raises(FileNotFoundError, match="prompt_file names the file 'other/cot.txt', which was not found"):
        TaskDataSpec(prompt_file="other/cot.txt")
    with pytest.raises(FileNotFoundError, match="system_prompt_file"):
        TaskDataSpec(system_prompt_file=tmp_path / "none.txt")


def test_task_data_spec_takes_only_missing_prompts_from_the_defaults():
    spec, default = TaskDataSpec("t"), TaskDataSpec()
    default.prompt, default.system_prompt = "p", "s"
    spec.system_prompt = "own"
    AllTaskProcessedDataset([], None, default, {"t": (spec, None)})
    assert (spec.prompt, spec.system_prompt) == ("p", "own")
