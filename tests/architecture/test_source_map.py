"""docs/source-map.md lists the files that are there, whole, and README.md stays short."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def source_map():
    spec = importlib.util.spec_from_file_location("source_map", ROOT / "tests" / "tools" / "source_map.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(source_map):
    assert source_map.PAGE.read_text() == source_map.page(), "run: python tests/tools/source_map.py --write"


def test_no_sentence_is_cut(source_map):
    assert not [line for line in source_map.page().splitlines() if line.endswith("... |")]


def test_every_tracked_folder_is_listed(source_map):
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("this is no git checkout")
    tracked = {name.split("/")[0] for name in listing.stdout.splitlines() if "/" in name}
    assert tracked == {folder.split("/")[0] for folder in source_map.FOLDERS}


def test_a_row_holds_the_first_sentence_of_the_header(source_map, tmp_path):
    (tmp_path / "adder.h").write_text("#pragma once\n// Adds two numbers.\n// And says so.\n#include <cmath>\n")
    (tmp_path / "adder.cpp").write_text('#include "adder.h"\n')
    (tmp_path / "adder.py").write_text('"""Adds a | b: the sum."""\n')
    (tmp_path / "__init__.py").write_text("")
    assert source_map.rows(source_map.files(tmp_path)) == [
        "| `adder.h, .cpp` | Adds two numbers |",
        "| `adder.py` | Adds a \\| b: the sum |",
    ]


def test_the_readme_is_at_most_160_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 160
