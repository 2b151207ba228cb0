"""The page of an evaluation's samples, and two evaluations side by side."""

import json
import math
import re
import statistics

import pytest
from nemo_rl_cpp.commands import compare as command
from nemo_rl_cpp.config import load_eval_config
from nemo_rl_cpp.evals.metrics import Interval
from nemo_rl_cpp.evals.pages import Comparison, evaluation_page, is_evaluation, prompts_of, text_of
from nemo_rl_cpp.evals.report import EvalResult, save_evaluation_data


def samples(rewards, response="a"):
    """Two answers to each prompt, with these rewards."""
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


def test_wrong_prompts_come_first_and_texts_are_no_html():
    found = prompts_of(samples(BEFORE), 2)
    assert [prompt.mean for prompt in found] == [0.0, 0.5, 1.0] and found[0].cut == [False, True]
    page = evaluation_page(
        "m: pass@2 0.6667", {"pass@2": "0.6667 (95 % interval 0.1 to 0.9)", "time": "3 s"}, found, now=0
    )
    assert re.findall(r"<h2>([^<]*)</h2>", page) == [
        "Wrong: 1 of 3 prompts", "Right in part: 1 of 3 prompts", "Right: 1 of 3 prompts",
    ]  # fmt: skip
    assert "prompt 0 &lt;b&gt;" in page and "prompt 0 <b>" not in page and "truth 2" in page
    assert page.count("cut off") == 1 and "<script" not in page and "95 % interval 0.1 to 0.9" in page
    assert "http" not in page.replace("http-equiv", "")


def test_the_page_says_what_it_leaves_out():
    page = evaluation_page("m", {}, prompts_of(samples([0.0] * 200), 2), now=0)
    assert page.count('class="prompt"') == 60 and "40 more are in evaluation_data.json" in page


def test_the_difference_is_that_of_pairs(tmp_path):
    found = Comparison.of([folder(tmp_path / "a", BEFORE, "old"), folder(tmp_path / "b", AFTER, "new", "b")])
    gaps = [0.5, 0.5, -1.0]
    mean, interval = found.difference
    half = 1.959963984540054 * statistics.stdev(gaps) / math.sqrt(3)
    assert (mean, interval.low, interval.high) == pytest.approx((0.0, -half, half)) and found.means == (0.5, 0.5)
    text = text_of(found)
    assert "of 3 prompts 2 are better, 1 worse, 0 equal" in text and "(may be chance)" in text
    assert "worse, 1 -> 0: prompt 2 <b>\n  before: a4\n  after:  b4" in text
    same = Comparison.of([tmp_path / "a", tmp_path / "a"])
    assert same.difference == (0.0, (0.0, 0.0)) and same.changed(1) == same.changed(-1) == []


def test_the_command_compares_evaluations(tmp_path, capsys):
    first, second = folder(tmp_path / "a", BEFORE, "old"), folder(tmp_path / "b", AFTER, "new")
    page = tmp_path / "out" / "page.html"
    assert is_evaluation(first) and command.main([str(first), str(second), "--out", str(page)]) == 0
    assert f"{first}: old\n{second}: new\nmean reward 0.5000 -> 0.5000" in capsys.readouterr().out
    assert re.findall(r"<h2>([^<]*)</h2>", page.read_text()) == ["Worse: 1 prompt", "Better: 2 prompts"]


def test_what_cannot_be_compared(tmp_path, capsys):
    first, other = folder(tmp_path / "a", BEFORE, "old"), folder(tmp_path / "b", BEFORE[:4], "new")
    for folders, words in (
        ([first, other], "have other prompts (3 and 2): compare evaluations of the same data"),
        ([first, tmp_path / "nothing"], "nothing is no folder of an evaluation"),
        ([first, first, other], "compared two at a time, but 3 folders are given"),
    ):
        assert command.main([*map(str, folders)]) == 2 and words in capsys.readouterr().err


def test_a_terminal_obeys_no_text_of_a_model(tmp_path, capsys):
    folders = [folder(tmp_path / name, rewards, f"{name}\x1b[2J", "\x1b]0;title\x07 \ud83d \u202e👩\u200d🔬 ü\n")
               for name, rewards in (("a", BEFORE), ("b", AFTER))]  # fmt: skip
    page = tmp_path / "page.html"
    assert command.main([*map(str, folders), "--out", str(page)]) == 0
    told = capsys.readouterr().out
    told.encode()  # half a character would raise
    assert "before: \\x1b]0;title\\x07 \\ud83d \\u202e👩\u200d🔬 ü 4\n" in told and "a\\x1b[2J\n" in told
    assert all(each.isprintable() or each in "\n\u200d" for each in told)
    assert "title" in page.read_text(encoding="utf-8")


def test_half_a_character_does_not_lose_an_evaluation(tmp_path):
    config = load_eval_config(
        "evals/eval.yaml",
        [
            "eval.num_tests_per_prompt=2",
            "generation.temperature=1",
            "generation.top_k=null",
            f"eval.save_path={tmp_path / 'out'}",
        ],
    )
    metrics = dict.fromkeys(("mean_gen_tokens_per_sample", "max_gen_tokens_per_sample", "truncation_rate"), 0.0)
    given = samples(BEFORE, "ü\ud83d")
    given[0]["extra_env_info"]["ground_truth"] = "\ude00!"
    save_evaluation_data(given, config, tmp_path / "out", EvalResult(0.5, Interval(0.0, 1.0), 3, 0.5, 1.0, metrics))
    saved = json.loads((tmp_path / "out" / "evaluation_data.json").read_text(encoding="utf-8"))["evaluation_data"]
    assert [each["response"] for each in saved] == [f"ü?{i}" for i in range(6)]
    assert saved[0]["extra_env_info"]["ground_truth"] == "?!" and is_evaluation(tmp_path / "out")
    assert "ü?3" in (tmp_path / "out" / "evaluation.html").read_text(encoding="utf-8")
