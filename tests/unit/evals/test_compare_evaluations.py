import json
import math
import re
import statistics

import pytest
from nemo_rl_cpp import cli
from nemo_rl_cpp.commands import reports as command
from nemo_rl_cpp.config import load_eval_config
from nemo_rl_cpp.evals.results import compare_evaluations, difference, is_evaluation, prompts_of, save_evaluation_data


def samples(rewards, response="a"):
    """Return the samples of an evaluation with two responses per prompt and these rewards."""
    return [
        {"prompt": f"prompt {i // 2} <b>", "response": f"{response}{i}", "reward": reward, "truncated": i == 1,
         "extra_env_info": {"ground_truth": f"truth {i // 2}"}}
        for i, reward in enumerate(rewards)
    ]  # fmt: skip


def folder(path, rewards, model, response="a", n=2):
    path.mkdir()
    (path / "evaluation_data.json").write_text(json.dumps({"evaluation_data": samples(rewards, response)}))
    (path / "config.json").write_text(json.dumps({"model_name": model, "num_tests_per_prompt": n}))
    return path


BEFORE, AFTER = [0.0, 0.0, 1.0, 0.0, 1.0, 1.0], [1.0, 0.0, 1.0, 1.0, 0.0, 0.0]


def test_score_difference_of_two_evaluations_is_computed_from_paired_prompts(tmp_path):
    half = 1.959963984540054 * statistics.stdev([0.5, 0.5, -1.0]) / math.sqrt(3)
    found = compare_evaluations([folder(tmp_path / "a", BEFORE, "old"), folder(tmp_path / "b", AFTER, "new", "b")])
    told, counts = found.verdict
    interval = f"95 % interval {-half:+.4f} to {half:+.4f} (may be chance)"
    assert told == f"b: mean reward 0.5000 -> 0.5000, difference +0.0000, {interval}"
    assert counts == "of 3 prompts 2 are better, 1 worse, 0 equal in b against a"
    assert found.examples[:3] == ["\nworse, 1 -> 0: prompt 2 <b>", "  a: a4", "  b: b4"]
    better, one = prompts_of(samples([0.0, 0.5, 0.0, 1.0]), 2), prompts_of(samples([0.0, 0.0]), 2)
    worse = prompts_of(samples([0.0, 0.0, 0.5, 0.0]), 2)
    assert "chance" not in difference(worse, better) and difference(one, one).endswith("difference +0.0000")


def test_repetitions_of_a_data_set_do_not_narrow_the_interval_of_a_comparison(tmp_path):
    folders = [folder(tmp_path / "a", BEFORE, "old"), folder(tmp_path / "b", AFTER, "new")]
    once = compare_evaluations(folders).verdict
    for path in folders:
        data = json.loads((path / "evaluation_data.json").read_text())["evaluation_data"]
        (path / "evaluation_data.json").write_text(json.dumps({"evaluation_data": data * 4}))
        settings = {"num_tests_per_prompt": 2, "repeat": 4}
        (path / "config.json").write_text(json.dumps(settings))
    assert compare_evaluations(folders).verdict == once


def test_compare_command_compares_every_evaluation_with_the_first_one_given(tmp_path):
    given = {"a": BEFORE, "b": AFTER, "c": BEFORE}
    folders = [folder(tmp_path / name, rewards, f"model {name}") for name, rewards in given.items()]
    (tmp_path / "c" / "config.json").write_text(json.dumps({"model_name": "c", "num_tests_per_prompt": 2, "seed": 7}))
    found = compare_evaluations(folders)
    assert [line.partition(":")[0] for line in found.verdict[:2]] == ["b", "c"]
    assert "0 are better, 0 worse, 3 equal in c against a" in found.verdict[2]
    assert found.tables["Keys that differ"] == {"seed": ["–", "–", "7"]}


def test_compare_command_prints_evaluations_side_by_side(tmp_path, capsys):
    first, second = folder(tmp_path / "a", BEFORE, "old"), folder(tmp_path / "b", AFTER, "new")
    assert is_evaluation(first) and command.compare([str(first), str(second)]) == 0
    text = capsys.readouterr().out
    assert (
        re.search(r"model +old +new\nmean reward +0.5000 +0.5000\n", text) and "b: mean reward 0.5000 -> 0.5000" in text
    )
    with pytest.raises(SystemExit):
        command.compare([str(first), str(second), "--out", str(tmp_path / "page.html")])
    assert "--out writes the page of runs" in capsys.readouterr().err


def test_comparing_evaluations_of_different_prompts_or_with_missing_files_is_an_error(tmp_path, capsys):
    first, other = folder(tmp_path / "a", BEFORE, "old"), folder(tmp_path / "b", BEFORE[:4], "new")
    for folders, words in (
        ([first, other], "have other prompts (3 and 2): compare evaluations of the same data"),
        ([first, tmp_path / "nothing"], "nothing is no folder of an evaluation"),
        ([first, first], "is given twice"),
    ):
        assert cli.main(["compare", *map(str, folders)]) == 2 and words in capsys.readouterr().err


def test_control_characters_in_responses_are_escaped_in_the_terminal(tmp_path, capsys):
    folders = [folder(tmp_path / name, rewards, f"{name}\x1b[2J", "\x1b]0;title\x07 \ud83d \u202e👩\u200d🔬 ü\n")
               for name, rewards in (("a", BEFORE), ("b", AFTER))]  # fmt: skip
    assert command.compare([*map(str, folders)]) == 0
    told = capsys.readouterr().out
    told.encode()  # half a character would raise
    assert "a: \\x1b]0;title\\x07 \\ud83d \\u202e👩\u200d🔬 ü 4\n" in told and "a\\x1b[2J " in told
    assert all(each.isprintable() or each in "\n\u200d" for each in told)


def test_lone_surrogate_in_a_response_does_not_prevent_saving_an_evaluation(tmp_path):
    sampled = ["eval.num_tests_per_prompt=2", "generation.temperature=1", "generation.top_k=null"]
    config = load_eval_config("evals/eval.yaml", [*sampled, f"eval.save_path={tmp_path / 'out'}"])
    given = samples(BEFORE, "ü\ud83d")
    given[0]["extra_env_info"]["ground_truth"] = "\ude00!"
    save_evaluation_data(given, config, tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "evaluation_data.json").read_text(encoding="utf-8"))["evaluation_data"]
    assert [each["response"] for each in saved] == [f"ü?{i}" for i in range(6)]
    assert saved[0]["extra_env_info"]["ground_truth"] == "?!" and is_evaluation(tmp_path / "out")
