import json
import os
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from typing import ClassVar

import pytest
import synthetic_run
from nemo_rl_cpp.config.access import to_plain
from nemo_rl_cpp.report import ReportWriter, write_report
from nemo_rl_cpp.report.defaults import schema_defaults
from nemo_rl_cpp.report.findings_health import stage_shares
from nemo_rl_cpp.report.history import MetricHistory
from nemo_rl_cpp.report.page import RunFacts, differences, duration, render
from nemo_rl_cpp.report.samples import MAX_CHARS, SampleBook, clip, pick, read_rollouts, spread
from pydantic import BaseModel, Field

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Checker(HTMLParser):
    """Checks that tags nest, and collects texts, ids and everything that could fetch something."""

    def __init__(self):
        super().__init__()
        self.stack, self.ids, self.fetches, self.text, self.scripts = [], [], [], [], {}

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag not in VOID:
            self.stack.append((tag, attributes))
        self.ids.append(attributes.get("id"))
        self.fetches += [
            value for key, value in attributes.items() if key in ("src", "srcset", "action", "data", "poster")
        ]
        self.fetches += [v for k, v in attributes.items() if k in ("href", "xlink:href") and not v.startswith("#")]
        assert tag not in ("link", "iframe", "object", "embed", "img", "base")

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.stack.pop()

    def handle_endtag(self, tag):
        assert self.stack and self.stack[-1][0] == tag, f"</{tag}> closes {self.stack[-1:]}"
        self.stack.pop()

    def handle_data(self, data):
        if self.stack and self.stack[-1][0] == "script":
            self.scripts[self.stack[-1][1].get("id")] = data
        elif self.stack and self.stack[-1][0] != "style":
            self.text.append(data)


def check(page):
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.stack == [] and checker.fetches == []
    outside = re.findall(r"(?:https?:)?//[a-z][\w.-]*", re.sub(r"http://www\.w3\.org/2000/svg", "", page))
    assert outside == [] and "@import" not in page and "url(" not in page
    return checker


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs") / "exp_001"
    synthetic_run.write_run(folder, steps=60)
    return folder


def test_the_page_of_a_run_is_whole_and_refers_to_nothing_outside(run):
    writer = ReportWriter(run, synthetic_run.CONFIG, synthetic_run.DEFAULTS, total_steps=60, title="exp_001")
    writer.finish()
    checker = check(writer.path.read_text())
    text = " ".join(checker.text)
    assert "The policy is learning: reward 0.2" in text and "60 / 60" in text and "finished" in text
    for section in ("findings", "curves", "time", "memory", "samples", "config"):
        assert section in checker.ids
    assert "agree bit for bit" in text and "of groups had equal rewards" in text and "spiked in 1 step (33)" in text
    assert "generation" in text and "policy.optimizer.kwargs.lr" in text and "2e-05" in text and "5e-06" in text
    assert "grpo.seed" not in text, "values equal to the defaults are not among the differences"
    assert len(list(os.scandir(run))) == len({e.name for e in os.scandir(run)}) and not list(run.glob(".*tmp"))


def test_the_embedded_samples_are_valid_and_telling(run):
    samples = json.loads(
        check(render(MetricHistory(), RunFacts("t", samples=SampleBook(run).samples()))).scripts["sample-data"]
    )
    last = [s for s in samples if s["step"] == 60]
    tags = {tag for sample in last for tag in sample["tags"]}
    assert {"best", "worst", "longest", "truncated"} <= tags and len(last) <= 5
    assert max(s["reward"] for s in last) == next(s for s in last if "best" in s["tags"])["reward"]
    assert last[0]["prompt"].startswith("3 + 4 = 7") and {1, 60} <= {s["step"] for s in samples}


def test_the_cross_hair_data_match_the_curves(run):
    writer = ReportWriter(run)
    writer.update(force=True)
    charts = re.findall(r'data-chart="([^"]+)"', writer.path.read_text())
    from html import unescape

    data = [json.loads(unescape(chart)) for chart in charts]
    reward = next(d for d in data if d["s"][0]["l"] == "reward")
    assert len(reward["s"][0]["p"]) == 60 and reward["s"][0]["p"][0][0] == 1 and len(reward["f"]) == 8


def test_hostile_text_cannot_leave_its_place(tmp_path):
    evil = "</script><script>alert(1)</script><!-- <b>\"'&"
    (tmp_path / "train_data_step1.jsonl").write_text(json.dumps({"content": [evil, evil], "rewards": 1.0}) + "\n")
    facts = RunFacts(
        evil,
        status=evil,
        config={evil: evil},
        defaults={"a": evil},
        message=evil,
        environment={evil: evil},
        samples=SampleBook(tmp_path).samples(),
    )
    page = render(MetricHistory([{"step": 1, "train/reward": 1.0, f"timing/train/{evil[2:6]}": 1.0}]), facts)
    checker = check(page)
    assert json.loads(checker.scripts["sample-data"])[0]["response"] == evil
    assert "<script>alert" not in page and page.count("<script") == 2


def test_an_empty_run_has_a_page_too(tmp_path):
    writer = ReportWriter(tmp_path, total_steps=10)
    writer.start()
    text = " ".join(check(writer.path.read_text()).text)
    assert "No step has finished yet." in text and "running" in text


def test_updates_come_seldom_and_a_resumed_log_is_read_anew(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "train/reward": 0.25}\n')
    writer = ReportWriter(tmp_path, min_interval=3600)
    assert writer.update() and not writer.update() and writer.update(force=True)
    with open(metrics, "a") as file:
        file.write('{"step": 2, "train/reward": 0.75}\n')
    writer.update(force=True)
    assert "2 steps done, reward 0.5 so far" in writer.path.read_text()
    metrics.write_text('{"step": 1, "train/reward": 0.25}\n')
    writer.finish("interrupted", "Stopped by Ctrl-C.")
    page = writer.path.read_text()
    assert "1 step done, reward 0.25 so far. Stopped by Ctrl-C." in page and 'data-status="interrupted"' in page


def test_a_page_that_cannot_be_written_does_not_end_the_run(tmp_path, capsys, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    writer = ReportWriter(tmp_path)
    monkeypatch.setattr("nemo_rl_cpp.report.writer.write_atomic", fail)
    assert not writer.update(force=True) and not writer.update(force=True)
    assert capsys.readouterr().err.count("No space left") == 1


@pytest.mark.slow
def test_the_report_can_be_made_again_from_the_folder(run):
    ReportWriter(run, synthetic_run.CONFIG, synthetic_run.DEFAULTS, total_steps=60, title="first").finish()
    before = (run / "report.html").read_text()
    (run / "report.html").unlink()
    done = subprocess.run([sys.executable, "-m", "nemo_rl_cpp.report", str(run)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == str(run / "report.html"), done.stderr

    def stable(page):
        return re.sub(r'data-written="\d+"|Written [^<]*', "", page)

    assert stable((run / "report.html").read_text()) == stable(before)
    with pytest.raises(ValueError, match="holds no metrics.jsonl"):
        write_report(run.parent)
    bad = subprocess.run([sys.executable, "-m", "nemo_rl_cpp.report", str(run.parent)], capture_output=True, text=True)
    assert bad.returncode == 2 and "Traceback" not in bad.stderr


@pytest.mark.slow
def test_a_run_killed_at_any_moment_leaves_a_whole_page(tmp_path):
    program = (
        "import sys\nfrom nemo_rl_cpp.loggers.logger import Logger\nfrom nemo_rl_cpp.report import ReportWriter\n"
        "logger = Logger({'log_dir': sys.argv[1], 'tensorboard_enabled': False})\n"
        "writer = ReportWriter(sys.argv[1], min_interval=0)\nstep = 0\n"
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


def test_a_long_run_stays_small_and_fast(tmp_path):
    history = MetricHistory()
    for step in range(1, 20_001):
        history.add(
            {
                "step": step,
                "train/reward": step % 7,
                "train/loss": 0.1,
                "timing/train/total_step_time": 1.0,
                "timing/train/generation": 0.5,
            }
        )
    started = time.process_time()
    page = render(history, RunFacts("long"))
    assert len(page) < 400_000 and time.process_time() - started < 5


def test_rollout_rows_of_every_shape_are_understood(tmp_path):
    path = tmp_path / "train_data_step1.jsonl"
    rows = [
        {"content": ["prompt", "answer"], "rewards": [0.5], "token_loss_mask": [0, 0, 1, 1, 1], "idx": 3},
        {"content": [["p", "a", "Environment: correct"]], "rewards": 1.0, "input_lengths": [9]},
        {
            "content": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}],
            "rewards": "nan",
            "truncated": True,
        },
        {"content": "only text"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"torn": ')
    first, second, third, fourth = read_rollouts(path)
    assert (first["prompt"], first["response"], first["reward"], first["length"]) == ("prompt", "answer", 0.5, 3)
    assert (second["prompt"], second["response"], second["length"]) == ("p", "a\n\nEnvironment: correct", 9)
    assert (third["prompt"], third["response"], third["reward"], third["truncated"]) == ("q", "r", None, True)
    assert (fourth["prompt"], fourth["response"], fourth["reward"]) == ("", "only text", None)
    assert pick([]) == [] and pick([fourth])[0]["tags"] == ["first"]


def test_long_texts_are_clipped_and_shown_steps_change_seldom():
    assert len(clip("x" * 100_000)) < MAX_CHARS + 100 and clip("short") == "short"
    assert spread(list(range(10))) == list(range(10)) and spread([]) == []
    for length in (24, 25, 100, 101, 5000):
        chosen = spread(list(range(length)))
        assert len(chosen) <= 26 and chosen[0] == 0 and chosen[-1] == length - 1
    assert set(spread(list(range(100)))[:-1]) == set(spread(list(range(101)))[:-1]) & set(range(99))


def test_differences_and_durations():
    changed = differences({"a": {"b": 1, "c": [1, 2]}, "new": "x"}, {"a": {"b": 1, "c": [1, 3]}, "gone": None, "g": 2})
    assert changed == [("a.c", "[1, 2]", "[1, 3]"), ("g", "–", "2"), ("new", "x", "–")]
    assert [duration(s) for s in (3.21, 331, 3725)] == ["3.2 s", "5 min 31 s", "1 h 02 min"]


def test_it_shows_itself_in_a_notebook(tmp_path):
    html = ReportWriter(tmp_path)._repr_html_()
    assert html.startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')


def test_schema_defaults_know_what_was_changed_and_what_follows():
    class Inner(BaseModel):
        lr: float = 5e-6
        derived: int | None = None

    class Config(BaseModel):
        inner: Inner = Inner()
        model_name: str
        kind: Inner | dict = {}
        seed: int = Field(42, alias="_seed")

    class Placed(Config):
        positions: ClassVar = {"inner": "f:1", "inner.lr": "f:2", "model_name": "f:3"}

    assert schema_defaults({"a": 1}) == {}
    config = Config(model_name="m", inner=Inner(lr=1e-3, derived=5), _seed=7)
    assert schema_defaults(config) == {"inner": {"lr": 5e-6, "derived": None}, "kind": {}, "_seed": 42}
    placed = Placed(model_name="m", inner=Inner(lr=1e-3, derived=5))
    changed = differences(to_plain(placed.model_dump(by_alias=True)), schema_defaults(placed))
    assert changed == [("inner.lr", "0.001", "5e-06"), ("model_name", "m", "–")], "derived follows from other values"


def test_time_between_steps_is_shown_beside_the_steps():
    history = MetricHistory(
        [
            {
                "step": 1,
                "timing/train/total_step_time": 6.0,
                "timing/train/generation": 4.0,
                "timing/train/checkpointing": 2.0,
                "timing/train/prepare_for_generation/total": 1.0,
            }
        ]
    )
    assert stage_shares(history) == {"generation": 0.5, "checkpointing": 0.25, "prepare_for_generation": 0.125}
    text = " ".join(check(render(history, RunFacts("t"))).text)
    assert re.search(r"other\s+12\.5 %", text)
