import json
import re

import pytest
from nemo_rl_cpp import cli
from nemo_rl_cpp.commands import reports as command
from nemo_rl_cpp.report.compare import compare_runs, newcombe, run_folder
from test_report import check, unpacked


def write_log(folder, accuracy, lr=1e-3, interval=0.05):
    folder.mkdir(parents=True)
    times = {"timing/train/total_step_time": 2.0, "timing/train/generation": 1.0}
    rows = [{"step": step, "train/reward": step / 10} | times for step in (1, 2, 3)]
    validation = {"accuracy": accuracy, "num_samples": 100, "right_or_wrong": 1.0}
    if interval:
        validation |= {"accuracy_ci95_low": accuracy - interval, "accuracy_ci95_high": accuracy + interval}
    rows.append({"step": 3} | {f"validation/{name}": value for name, value in validation.items()})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"policy": {"lr": lr, "name": "<m>"}, "logger": {"log_dir": str(folder)}}
    (folder / "hyperparams.json").write_text(json.dumps(config))
    return folder


def test_compare_command_shows_metrics_and_configurations_of_two_runs(tmp_path, capsys):
    folders = [write_log(tmp_path / "a" / "exp_001", 0.5), write_log(tmp_path / "b" / "exp_001", 0.9, lr=1e-4)]
    page = tmp_path / "new" / "compare.html"
    assert command.compare([*map(str, folders), "--out", str(page)]) == 0
    text = capsys.readouterr().out
    lines = {re.split(r"\s{2,}", line)[0]: re.split(r"\s{2,}", line)[1:] for line in text.splitlines() if line}
    assert text.count("0.300 (first 0.100") == 2  # of both runs; a narrow terminal breaks the line behind it
    assert lines["policy.lr"] == ["0.001", "0.0001"] and "logger.log_dir" not in text and "policy.name" not in text
    assert lines["time"] == ["6.0 s (2.00 s a step)"] * 2
    # sqrt(2) * 0.05 on both sides of 0.4
    verdict = "b/exp_001 validates better than a/exp_001 at step 3, by 0.400 (95 % interval 0.329 to 0.471)."
    assert verdict in " ".join(text.split())
    checker = check(page.read_text())
    data = unpacked(checker.scripts["data-metrics"])
    assert [run["name"] for run in data["runs"]] == ["a/exp_001", "b/exp_001"]
    assert data["panels"][0]["title"] == "Reward"
    text = " ".join(checker.text)
    assert "policy.lr" in "".join(checker.text) and "0.300 (first 0.100, best 0.300)" in text and verdict in text


def test_compare_command_says_whether_the_validation_difference_is_significant(tmp_path):
    (told,) = compare_runs([write_log(tmp_path / "a", 0.5), write_log(tmp_path / "b", 0.52)]).verdict
    assert "do not tell a and b apart at step 3" in told and "+0.020 (95 % interval -0.051 to +0.091)" in told
    without = compare_runs([write_log(tmp_path / "c", 0.5, interval=0), tmp_path / "a"])
    assert without.verdict == ["Validation accuracy at step 3: c 0.500, a 0.500."]
    worse = compare_runs([write_log(tmp_path / "d", 0.9), tmp_path / "a"]).verdict
    assert worse[0] == "d validates better than a at step 3, by 0.400 (95 % interval 0.329 to 0.471)."


def test_compare_command_compares_runs_at_their_last_common_validation_step(tmp_path):
    folders = [write_log(tmp_path / "a", 0.5), write_log(tmp_path / "b", 0.7)]
    with open(folders[1] / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "validation/accuracy": 0.8}\n')
    gap = "by 0.200 (95 % interval 0.129 to 0.271)"
    verdict = f"b validates better than a at step 3, the last that both have, {gap}."
    assert compare_runs(folders).verdict == [verdict]


def test_confidence_interval_of_a_difference_matches_newcombes_published_example():
    # Newcombe 1998, table II, row (a): 56/70 against 48/80
    a, b = (56 / 70, 0.6916, 0.8769), (48 / 80, 0.4904, 0.7004)
    assert newcombe(a, b) == pytest.approx((0.0524, 0.3339), abs=2e-3)


def test_compare_command_gives_an_error_with_the_reason_for_invalid_folders(tmp_path, capsys):
    run = write_log(tmp_path / "exp_002", 0.5)
    for words, message in (
        ([str(run), str(tmp_path)], "is given twice"),
        ([str(run), str(tmp_path / "nowhere")], "holds no metrics.jsonl"),
    ):
        assert cli.main(["compare", *words]) == 2 and message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.compare([str(run)])
    assert "two log folders or more" in capsys.readouterr().err


def test_compare_command_uses_the_newest_run_in_a_log_folder(tmp_path):
    for number in ("exp_2", "exp_10", "exp_x"):
        write_log(tmp_path / number, 0.5)
    assert run_folder(tmp_path).name == "exp_10"


def test_compare_command_names_a_run_whose_configuration_cannot_be_read(tmp_path, capsys):
    folders = [write_log(tmp_path / name, 0.5) for name in ("a", "b", "c")]
    (folders[1] / "hyperparams.json").unlink()
    page = tmp_path / "page.html"
    assert command.compare([*map(str, folders), "--out", str(page)]) == 0
    told = "Keys are not compared: b has no hyperparams.json that can be read."
    assert told in " ".join(capsys.readouterr().out.split()) and told in page.read_text()
