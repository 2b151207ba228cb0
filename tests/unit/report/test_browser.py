"""Tests of the report in Chromium. They are skipped if it is not installed."""

import json
import sys
from pathlib import Path

import pytest
import synthetic_run
from nemo_rl_cpp.report import ReportWriter
from nemo_rl_cpp.report.compare import compare_runs

sys.path.insert(0, str(Path(__file__).parents[2]))
from browser import CHROMIUM, READY, Browser

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: apt-get install chromium)"),
]


@pytest.fixture(scope="module")
def browser():
    with Browser() as browser:
        yield browser


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "exp_001"
    synthetic_run.write_run(folder, steps=40)
    return folder


def write(folder, status):
    writer = ReportWriter(folder, total_steps=60, title="run", token_bytes=synthetic_run.token_bytes)
    writer.update(status, force=True)
    return writer


def saved(browser, script):
    """Return the content of the file that the page saves when `script` clicks a button (of a picture, its size in
    bytes)."""
    browser.ask("window.kept = null; window.saveFile = (name, content) => { window.kept = [name, content]; }")
    browser.ask(script)
    browser.wait("window.kept !== null")
    return browser.ask("window.kept[1] instanceof Blob ? window.kept[1].size : window.kept[1]")


def test_charts_of_the_report_draw_and_export_without_errors_or_network_requests(browser, run):
    browser.open(write(run, "finished").path)
    charts = browser.ask(
        "charts.filter((c) => c.width).map((c) => [c.spec.title, c.plot.querySelectorAll('path, circle, rect').length])"
    )
    assert dict(charts).keys() >= {"Reward", "Validation accuracy", "Loss", "Seconds per step"}
    assert all(count > 0 for _, count in charts)
    assert browser.ask("document.querySelectorAll('.band').length") == 1
    assert browser.ask("getComputedStyle(document.querySelector('#live')).display") == "none"
    # the drawn line lies where the numbers say
    rewards = [json.loads(line).get("train/reward") for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = [reward for reward in rewards if reward is not None]
    heights = browser.ask(
        "(() => { const c = charts[0]; return [c.f.py(0), c.f.py(1), c.lines[0].y.map((y) => c.f.py(y))]; })()"
    )
    expected = [heights[0] + (heights[1] - heights[0]) * reward for reward in rewards]
    path = browser.ask("charts[0].plot.querySelector('path.raw').getAttribute('d')").replace("M", "L").split("L")[1:]
    assert [float(point.split()[1]) for point in path] == pytest.approx(expected, abs=0.06)
    # search, draw, save
    browser.ask(
        "(() => { const box = document.getElementById('metric-search'); box.value = 'timing reward'; box.dispatchEvent(new Event('input')); })()"
    )
    shown = browser.ask(
        "[...document.querySelectorAll('#metric-list tbody tr:not([hidden]) code')].map((n) => n.textContent)"
    )
    assert shown == ["timing/train/reward_calculation"]
    browser.ask("document.querySelector('#metric-list tbody tr:not([hidden]) input').click()")
    browser.wait("document.querySelectorAll('#metric-cards path').length > 0")
    table = saved(browser, "document.getElementById('csv').click()").splitlines()
    column = table[0].split(",").index("train/reward")
    assert [float(line.split(",")[column]) for line in table[1:]] == pytest.approx(rewards, rel=1e-5)
    picture = saved(browser, "charts[0].figure.querySelector('.choices button').click()")
    assert picture.startswith("<svg xmlns=") and "class=" not in picture and "var(" not in picture
    size = saved(browser, "charts[0].figure.querySelectorAll('.choices button')[1].click()")
    assert size > 2000  # a PNG with something on it
    assert browser.errors == [] and all(address.startswith(("file:", "data:", "blob:")) for address in browser.requests)


def test_report_shows_responses_of_a_group_with_ground_truth_and_coloured_tokens(browser, run):
    browser.open(write(run, "finished").path)
    sample = browser.ask(
        "(() => { const s = document.querySelector('.sample'); return { truth: s.querySelector('.truth code').textContent,"
        " answers: s.querySelectorAll('.answer').length, prompt: s.querySelector('.prompt').textContent }; })()"
    )
    a, b = sample["prompt"].split("\n")[-1].removesuffix(" =").split(" + ")
    assert sample["truth"] == str(int(a) + int(b)) and sample["answers"] == 4
    tinted = "[...document.querySelectorAll('.token')].filter((n) => n.style.background).length"
    assert browser.ask(tinted) > 10
    choose = "(() => {{ const box = document.getElementById('sample-color'); box.value = '{}'; box.dispatchEvent(new Event('change')); }})()"
    browser.ask(choose.format("ratio"))
    # row 3's trainer gives every token 1 % more; its answers have a few characters
    row = "[...document.querySelectorAll('.answer')].find((n) => n.textContent.endsWith('row 3'))"
    if browser.ask(f"!!{row}"):  # the page shows some rows of each group
        assert "ratio 1.0101\n" in browser.ask(f"{row}.querySelector('.token').title")
        assert browser.ask(tinted) > 0
    browser.ask(choose.format("none"))
    assert browser.ask(tinted) == 0
    assert browser.errors == []


def test_report_of_a_running_training_updates_and_keeps_zoom_and_scroll_position(browser, run):
    writer = write(run, "running")
    browser.open(writer.path)
    assert browser.ask("document.getElementById('live').textContent") == "❚❚ live"
    browser.ask(
        "(() => { document.getElementById('whole').open = true; const box = document.getElementById('metric-search'); box.value = 'grad';"
        " box.dispatchEvent(new Event('input')); document.querySelector('#metric-list tbody tr:not([hidden]) input').click();"
        " charts[0].zoomTo(5, 20); window.scrollTo({top: 900, behavior: 'instant'}); window.old = true; })()"
    )
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 41, "train/reward": 0.987}\n')
    writer.update("running", force=True)
    browser.ask("settings.reloadSeconds = 0.5")
    browser.wait(f"!window.old && {READY}")
    assert browser.ask("document.querySelector('.tile b').textContent") == "41"
    assert browser.ask(
        "[window.scrollY, document.getElementById('whole').open, document.getElementById('metric-search').value]"
    ) == [900, True, "grad"]
    assert browser.ask("[...document.querySelectorAll('#metric-cards h3')].length") == 1
    assert browser.ask("[charts[0].f.x0, charts[0].f.x1]") == [5, 20]
    writer.update("finished", force=True)
    browser.ask("window.old = true; settings.reloadSeconds = 0.5")
    browser.wait(f"!window.old && {READY}")
    assert browser.ask("document.getElementById('live').hidden") is True
    assert browser.errors == []


@pytest.mark.parametrize("width", [400, 1280])
def test_report_pages_need_no_horizontal_scrolling(browser, run, tmp_path, width):
    synthetic_run.write_run(tmp_path / "a_second_run_with_a_long_name", steps=12, seed=3)
    page = tmp_path / "compare.html"
    page.write_text(compare_runs([run, tmp_path / "a_second_run_with_a_long_name"]).page())
    for path in (write(run, "finished").path, page):
        browser.resize(width, 800)
        browser.open(path)
        browser.ask("document.querySelectorAll('details[id]').forEach((node) => { node.open = true; })")
        assert browser.ask("document.documentElement.scrollWidth") == width
    assert browser.errors == []
