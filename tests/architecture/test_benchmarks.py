"""run_all.py is what docs/benchmarks.md is made from: it must know every script, and no script that is gone."""

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ON_A_GPU_ONLY = {"gpu_step"}


@pytest.fixture
def run_all():
    spec = importlib.util.spec_from_file_location("run_all", BENCHMARKS / "run_all.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_run_all_runs_every_benchmark(run_all):
    scripts = {path.stem.removeprefix("bench_") for path in BENCHMARKS.glob("bench_*.py")}
    assert {command.split()[0] for command in run_all.RUNS.values()} == scripts - ON_A_GPU_ONLY


def test_a_script_that_fails_is_named_and_the_others_go_on(run_all, monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(run_all, "RUNS", {"broken": "gae --no-such-option", "help": "gae --help"})
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--out", str(tmp_path)])
    assert run_all.main() == 1
    assert "failed: broken" in capfd.readouterr().err
    assert "--no-such-option" in (tmp_path / "broken.txt").read_text()
    assert "usage" in (tmp_path / "help.txt").read_text()
