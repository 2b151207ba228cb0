"""tests/tools/from_nothing.py, which renews a part of docs/installation.md: that part is there, and what the tool measures is measured."""

import os
import sys

import pytest
from documents.snippets import ROOT

sys.path.insert(0, str(ROOT / "tests" / "tools"))
import from_nothing  # noqa: E402


def test_the_page_has_the_part_that_is_renewed():
    page = (ROOT / "docs" / "installation.md").read_text()
    renewed = from_nothing.replaced(page, "| new |")
    assert f"{from_nothing.BEGIN}\n| new |\n{from_nothing.END}\n" in renewed
    assert from_nothing.replaced(renewed, "| newer |") == renewed.replace("| new |", "| newer |")
    with pytest.raises(ValueError, match="the page has no"):
        from_nothing.replaced("a page without marks", "")


def test_a_command_is_timed_up_to_a_line_and_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setenv("CMAKE_CXX_COMPILER_LAUNCHER", "ccache")
    monkeypatch.setenv("NEMO_RL_CUDA", "on")
    stranger = from_nothing.Stranger(tmp_path, own_cache=True)
    took = stranger.run("bash", "-c", "echo step 1/2; env; echo end", waits_for="step 1/")
    assert took.last == "end" and took.peak > 0 and took.moment is not None and took.moment < took.seconds
    printed = (tmp_path / "log.txt").read_text()
    assert "ccache" not in printed and "NEMO_RL_CUDA" not in printed and f"UV_CACHE_DIR={tmp_path}/uv" in printed
    with pytest.raises(SystemExit, match="why\nbash ended with status 3"):
        stranger.run("bash", "-c", "echo why; exit 3")


def test_a_file_with_two_names_is_counted_once(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 100_000)
    once = from_nothing.size(tmp_path)
    os.link(tmp_path / "a", tmp_path / "b")
    (tmp_path / "folder").mkdir()
    assert once >= 100_000 and from_nothing.size(tmp_path) == once
    assert from_nothing.size(tmp_path / "nowhere") == 0


def test_numbers_in_words():
    assert [from_nothing.duration(seconds) for seconds in (4.4, 89.0, 125.0)] == ["4 s", "89 s", "2 min 5 s"]
    assert [from_nothing.bytes_of(number) for number in (6_460_000_000, 13_400_000)] == ["6.5 GB", "13 MB"]
