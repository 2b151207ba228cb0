import base64
import gzip
import json
import os
import re
import subprocess
import sys
import time
from html.parser import HTMLParser

import pytest
import synthetic_run
from nemo_rl_cpp.commands.reports import report
from nemo_rl_cpp.config import load_grpo_config
from nemo_rl_cpp.report import ReportWriter, write_report
from nemo_rl_cpp.report.history import MetricHistory
from nemo_rl_cpp.report.page import RunFacts, duration, keys_set, render, stage_shares
from nemo_rl_cpp.report.samples import SampleBook

VOID = {"wbr", "meta", "link", "br", "img", "input", "hr"}


class Checker(HTMLParser):
    """A parser that asserts that HTML tags nest, and collects texts, ids, and attributes that could load a file."""

    def __init__(self):
        super().__init__()
        self.stack, self.ids, self.fetches, self.text, self.scripts = [], [], [], [], {}

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag not in VOID:
            self.stack.append((tag, attributes))
        self.ids.append(attributes.get("id"))
        fetching, linking = ("src", "srcset", "action", "data", "poster"), ("href", "xlink:href")
        self.fetches += [value for key, value in attributes.items() if key in fetching]
        self.fetches += [v for k, v in attributes.items() if k in linking and not v.startswith(("#", "data:,"))]
        assert tag not in ("iframe", "object", "embed", "img", "base")

    def handle_endtag(self, tag):
        assert self.stack and self.stack[-1][0] == tag, f"</{tag}> closes {self.stack[-1:]}"
        self.stack.pop()

    def handle_data(self, data):
        if self.stack and self.stack[-1][0] == "script":
            self.scripts[self.stack[-1][1].get("id")] = data
        elif self.stack and self.stack[-1][0] != "style":
            self.text.append(data)


def unpacked(text):
    return json.loads(gzip.decompress(base64.b64decode(text)))


def check(page):
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.stack == [] and checker.fetches == []
    text = re.sub(
        r'http://www\.w3\.org/2000/svg|(?<=<script type="text/plain" id="data-metrics">)[^<]*|(?<=id="data-samples">)[^<]*',
        "",
        page,
    )
    assert re.findall(r"(?<!/)(?:https?:)?//[a-z][\w.-]*", text) == []
    assert "@import" not in page and not re.search(r"url\((?!#)|fetch\(|XMLHttpRequest|WebSocket|import\(", page)
    return checker


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs") / "exp_001"
    synthetic_run.write_run(folder, steps=60)
    return folder


def test_report_page_has_all_sections_and_loads_no_external_file(run):
    writer = ReportWriter(run, total_steps=60, title="exp_001")
    writer.update("finished", force=True)
    checker = check(writer.path.read_text())
    text = " ".join(checker.text)
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    rewards = [row["train/reward"] for row in rows if "train/reward" in row]
    span = f"reward {rewards[0]:.3f} → {rewards[-1]:.3f} (best {max(rewards):.3f}) in 60 steps; validation accuracy"
    assert f"The policy is learning: {span}" in text and "of 60" in text and "finished" in text
    for section in ("findings", "curves", "time", "memory", "samples", "config"):
        assert section in checker.ids
    assert "agree bit for bit" in text and "of groups had equal rewards" in text
    assert "flat curve" in text and "num_generations_per_prompt" in text
    assert len(list(os.scandir(run))) == len({e.name for e in os.scandir(run)}) and not list(run.glob(".*tmp"))


def test_report_page_embeds_every_metric(run):
    writer = ReportWriter(run)
    writer.update(force=True)
    data = unpacked(check(writer.path.read_text()).scripts["data-metrics"])
    (mine,) = data["runs"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = {name for row in rows for name in row} - {"step"}
    assert set(mine["metrics"]) == names
    axis, values = mine["metrics"]["train/reward"]
    expected = [row["train/reward"] for row in rows if "train/reward" in row]
    assert mine["axes"][axis] == list(range(1, 61)) and values == [float(f"{value:.6g}") for value in expected]
    assert mine["metrics"]["train/max_gen_tokens_per_sample"] == [axis, 48]
    validation = next(panel for panel in data["panels"] if panel["title"] == "Validation accuracy")
    assert validation["lines"][0]["low"] == "validation/accuracy_ci95_low"


def test_html_and_scripts_in_logged_text_are_escaped_in_the_report(tmp_path):
    evil = "</script><script>alert(1)</script><!-- <b>\"'&"
    (tmp_path / "train_data_step1.jsonl").write_text(
        json.dumps({"content": synthetic_run.messages(evil, evil), "rewards": 1.0}) + "\n"
    )
    texts = {"config": {evil: evil}, "environment": {evil: evil}, "status": evil, "message": evil}
    facts = RunFacts(evil, samples=SampleBook(tmp_path).samples(), **texts)
    page = render(MetricHistory([{"step": 1, "train/reward": 1.0, f"timing/train/{evil[2:6]}": 1.0}]), facts)
    checker = check(page)
    assert unpacked(checker.scripts["data-samples"])[0]["groups"][0]["answers"][0]["text"] == evil
    assert "<script>alert" not in page and page.count("<script") == 3


def test_report_replaces_lone_surrogates_in_text_and_folder_names(tmp_path):
    """The text has half of an emoji, as in truncated data, and the folder's name is not UTF-8."""
    folder = tmp_path / "run\udcff"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "train/reward": 0.25}\n')
    row = {"content": synthetic_run.messages("a", "b"), "rewards": 1.0, "ground_truth": "\ud83d"}
    (folder / "train_data_step1.jsonl").write_text(json.dumps(row) + "\n")
    writer = ReportWriter(folder)
    assert writer.update(force=True) and write_report(folder) == writer.path
    samples = unpacked(check(writer.path.read_text(encoding="utf-8")).scripts["data-samples"])
    assert samples[0]["groups"][0]["truth"] == "?"


def test_report_is_written_before_the_first_step(tmp_path):
    writer = ReportWriter(tmp_path, total_steps=10)
    writer.update("running", force=True)
    text = " ".join(check(writer.path.read_text()).text)
    assert "No step has finished yet." in text and "running" in text


def test_report_is_updated_at_a_limited_rate_and_reflects_a_truncated_log(tmp_path, monkeypatch):
    monkeypatch.setattr("nemo_rl_cpp.report.page._MIN_SECONDS", 3600)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "train/reward": 0.25}\n')
    writer = ReportWriter(tmp_path)
    assert writer.update() and not writer.update() and writer.update(force=True)
    with open(metrics, "a") as file:
        file.write('{"step": 2, "train/reward": 0.75}\n')
    writer.update(force=True)
    assert "2 steps done, reward 0.250 → 0.750 (best 0.750)." in writer.path.read_text()
    metrics.write_text('{"step": 1, "train/reward": 0.25}\n')
    writer.update("interrupted", "Stopped by Ctrl-C.", force=True)
    page = writer.path.read_text()
    assert "1 step done, reward 0.250. Stopped by Ctrl-C." in page and 'data-status="interrupted"' in page


def test_failure_to_write_the_report_gives_one_warning_and_does_not_end_the_run(tmp_path, capsys, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    writer = ReportWriter(tmp_path)
    monkeypatch.setattr("nemo_rl_cpp.report.page.write_atomic", fail)
    assert not writer.update(force=True) and not writer.update(force=True)
    assert capsys.readouterr().err.count("No space left") == 1


@pytest.mark.slow
def test_report_command_recreates_the_report_from_the_log_folder(run, capsys):
    ReportWriter(run, total_steps=60, title="first").update("finished", force=True)
    before = (run / "report.html").read_text()
    (run / "report.html").unlink()
    assert report([str(run)]) == 0 and capsys.readouterr().out.strip() == str(run / "report.html")

    def stable(page):
        return re.sub(r'data-written="\d+"|Written [^<]*', "", page)

    assert stable((run / "report.html").read_text()) == stable(before)
    with pytest.raises(ValueError, match="holds no metrics.jsonl"):
        write_report(run.parent)


@pytest.mark.slow
def test_report_file_stays_complete_if_the_run_is_killed_at_any_time(tmp_path):
    program = (
        "import sys\nfrom nemo_rl_cpp.config.logger import LoggerConfig\nfrom nemo_rl_cpp.loggers.logger import Logger\nfrom nemo_rl_cpp.report import ReportWriter\n"
        "logger = Logger(LoggerConfig(log_dir=sys.argv[1], tensorboard_enabled=False))\n"
        "writer = ReportWriter(sys.argv[1])\nstep = 0\n"
        "while True:\n"
        "    step += 1\n"
        "    logger.log_metrics({'reward': step / 1000}, step, prefix='train')\n"
        "    writer.update(force=True)\n"
        "    print(step, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    while int(process.stdout.readline()) < 20:
        pass
    process.kill()
    process.wait()
    process.stdout.close()
    page = (tmp_path / "report.html").read_text()
    check(page)
    assert int(re.search(r"(\d+) steps? (?:done|:|$)|in (\d+) steps", page).group(2) or 0) >= 20


def test_report_of_20000_steps_is_small_and_is_written_quickly(tmp_path):
    history = MetricHistory()
    row = {"train/loss": 0.1, "timing/train/total_step_time": 1.0, "timing/train/generation": 0.5}
    for step in range(1, 20_001):
        history.add(row | {"step": step, "train/reward": step % 7})
    started = time.process_time()
    page = render(history, RunFacts("long"))
    assert len(page) < 400_000 and time.process_time() - started < 5
    (run,) = unpacked(check(page).scripts["data-metrics"])["runs"]
    axis, values, middles, means = run["metrics"]["train/reward"]
    assert len(values) <= 502 and {min(values), max(values)} == {0, 6} and len(run["axes"][axis]) == len(values)
    assert len(means) == len(run["axes"][middles]) == 250 and all(abs(mean - 3) < 0.1 for mean in means)


def test_report_shows_time_between_steps_separately_from_time_within_steps():
    times = {"total_step_time": 6.0, "generation": 4.0, "checkpointing": 2.0, "prepare_for_generation/total": 1.0}
    history = MetricHistory([{"step": 1} | {f"timing/train/{name}": time for name, time in times.items()}])
    assert stage_shares(history) == {"generation": 0.5, "checkpointing": 0.25, "prepare_for_generation": 0.125}
    stack = unpacked(check(render(history, RunFacts("t"))).scripts["data-metrics"])["panels"][-1]
    assert [(layer["label"], layer["beside"]) for layer in stack["stack"]] == [
        ("generation", False), ("checkpointing", True), ("prepare_for_generation", False)
    ]  # fmt: skip
    assert stack["other"]["share"] == 0.125


def test_durations_in_the_report_have_at_most_two_units():
    assert [duration(s) for s in (3.21, 331, 3725)] == ["3.2 s", "5 min 31 s", "1 h 02 min"]


def test_report_lists_configuration_keys_set_by_the_user_with_their_origin(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text("defaults: grpo_tiny.yaml\ngrpo:\n  max_num_steps: 9\n")
    values = {"policy.precision": "float32"}
    config = load_grpo_config("my.yaml", ["grpo.seed=7"], values, {"policy.precision": "argument precision"})
    assert sorted((row["key"], row["value"], row["where"]) for row in keys_set(config)) == [
        ("grpo.max_num_steps", 9, "my.yaml:3"), ("grpo.seed", 7, "command line"),
        ("policy.precision", "float32", "argument precision"),
    ]  # fmt: skip
    ReportWriter(tmp_path, config).update("running", force=True)
    page = " ".join(check(ReportWriter(tmp_path).path.read_text()).text)
    assert "my.yaml:3" in page and "command line" in page and "argument precision" in page
