"""The tables of README that repeat other pages: the same figures, and files that are there."""

import re

import pytest
from documents.snippets import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BENCHMARKS = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
IN_FULL = (ROOT / "docs/benchmarks-in-full.md").read_text(encoding="utf-8")

ROWS = {
    "one GRPO step, 64 responses of 64 tokens": "a whole GRPO step: 8 prompts, 8 responses of 64 tokens to each",
    "peak memory of that step": "a whole GRPO step, TRL",
    "generation, 64 texts in groups of 8": "generation, 64 sequences in groups of 8 with a shared prompt",
    "generation, one text": "generation, one sequence",
    "training on 2,048 tokens with shared prompts": "training, 2,048 tokens of GRPO groups",
}
"""Row of README's first table -> row of docs/benchmarks.md."""


def rows(page):
    """First cell -> the other cells, of every table of a page."""
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")
    ]
    return {line[0]: line[1:] for line in lines}


def results():
    return rows(README[README.index("## Results") : README.index("[Benchmarks](docs/benchmarks.md)")])


def test_every_speed_ratio_in_the_readme_is_checked_against_the_benchmarks_page():
    with_ratio = {name for name, cells in results().items() if re.match(r"[\d.]+ ", cells[2])}
    assert with_ratio == set(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_speed_ratios_in_the_readme_equal_those_of_the_benchmarks_page(name):
    """README's machine is the Zen 4: the first of the columns with figures."""
    ours, peer, ratio = results()[name]
    cells = rows(BENCHMARKS)[ROWS[name]]
    zen = cells[0] if "peak memory" in name else cells[1]
    assert ratio.split()[0] == zen
    for figure in (ours, peer.split(": ")[1]):
        assert re.search(rf"(?<![\d.,]){re.escape(figure.split()[0])}(?![\d,])", IN_FULL), figure


def test_gpu_figures_in_the_readme_equal_those_of_the_benchmarks_page():
    claim = re.search(r"On one H200 a training step of 16,384 tokens is ([\d.]+) times as fast", README)
    assert claim is not None
    assert f"a training step of 16,384 tokens is {claim[1]} times as fast as transformers'" in BENCHMARKS


def test_files_that_the_readme_recommends_reading_first_exist():
    page, loop = re.search(
        r"Start reading with \[`([^`]+)`\].*?`([^`]+)` \(the loop of every run\)", README, re.S
    ).groups()
    assert (ROOT / page).is_file()
    assert "def train_loop(" in (ROOT / "python" / "nemo_rl_cpp" / loop).read_text()
