"""Runs the GoogleTest binary of the C++ core inside pytest: one command for both."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_cpp_core():
    binaries = sorted(ROOT.glob("build/editable-*/nemo_core_tests"), key=lambda p: p.stat().st_mtime)
    if not binaries:
        pytest.fail(
            "the C++ tests were not built: install GoogleTest (apt-get install libgtest-dev), then run "
            "`uv sync --reinstall-package nemo-rl-cpp`"
        )
    run = subprocess.run([str(binaries[-1]), "--gtest_brief=1"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
