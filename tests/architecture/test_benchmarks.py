"""What docs/benchmarks-in-full.md is made from: run_all.py must know every script and none that is gone, and peers must train on the same tokens."""

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ON_A_GPU_ONLY = {"gpu_step"}


def load(name, monkeypatch, folder=BENCHMARKS):
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # where its dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run_all(monkeypatch):
    return load("run_all", monkeypatch)


@pytest.fixture
def training(monkeypatch):
    return load("training_samples", monkeypatch)


def test_run_all_script_runs_every_benchmark_that_needs_no_gpu(run_all):
    scripts = {path.stem.removeprefix("bench_") for path in BENCHMARKS.glob("bench_*.py")}
    assert {command.split()[0] for command in run_all.RUNS.values()} == scripts - ON_A_GPU_ONLY


def test_benchmark_batches_with_mixed_and_equal_sequence_lengths_have_the_same_token_count(training):
    mixed, equal = training.mixed_lengths(), training.equal_lengths()
    assert sum(mixed) == sum(equal) == 2048 and len(mixed) == len(equal) == 16
    assert 0.5 < 1 - sum(mixed) / (len(mixed) * max(mixed)) < 0.7  # padding of rollouts


@pytest.mark.parametrize("prompt", [0, 40])
@pytest.mark.parametrize("layout", ["padded", "sorted_by_length", "packed"])
def test_benchmark_batch_of_every_layout_trains_each_token_once_with_its_full_context(training, layout, prompt):
    samples = training.Samples.random(training.mixed_lengths(), prompt, seed=1)
    wanted = sorted(
        tuple(row[: t + 1])
        for row, n in zip(samples.ids.tolist(), samples.lengths, strict=True)
        for t in range(max(prompt, 1), n)
    )
    found = []
    for batch in getattr(training, layout)(samples):
        for ids, trained in zip(batch.input_ids.tolist(), batch.trained.tolist(), strict=True):
            positions = batch.options["position_ids"][0].tolist() if layout == "packed" else range(len(ids))
            found += [tuple(ids[t - positions[t] : t + 1]) for t in range(len(ids)) if trained[t]]
    assert sorted(found) == wanted


@pytest.fixture
def card(monkeypatch):
    return load("card", monkeypatch, BENCHMARKS.parent / "tools")


def test_gpu_benchmark_script_calls_only_existing_scripts(card):
    words = [word for step in card.STEPS for word in f"{step.command} {step.tiny}".split() if word.endswith(".py")]
    assert words and all((card.ROOT / word).is_file() for word in words)
    assert len({step.name for step in card.STEPS}) == len(card.STEPS)


@pytest.mark.slow
def test_gpu_benchmark_script_saves_every_output_and_continues_after_a_failure(card, monkeypatch, tmp_path, capsys):
    adamw = next(step for step in card.STEPS if step.name == "adamw")
    broken = card.Step("broken", 1, "a step that fails", "", "python -c 'print(7); raise SystemExit(3)'")
    endless = card.Step("endless", 0.01, "a step that does not end", "", "python -c 'import time; time.sleep(60)'")
    monkeypatch.setattr(card, "STEPS", (broken, endless, adamw))
    monkeypatch.setattr(sys, "argv", ["card.py", "--device", "cpu", "--out", str(tmp_path)])
    assert card.main() == 1
    assert "not done: broken, endless;" in capsys.readouterr().err
    assert (tmp_path / "broken.txt").read_text() == "7\n"
    written = (tmp_path / "tables.md").read_text()
    assert "exit status 3" in written and "stopped after 1 s" in written
    assert "| AdamW, 0.0 M parameters | ours |" in written
    before = (tmp_path / "adamw.txt").stat().st_mtime_ns
    monkeypatch.setattr(card, "STEPS", (card.Step("broken", 1, "mended", "", "python -c 'print(8)'"), adamw))
    assert card.main() == 0
    assert (tmp_path / "broken.txt").read_text() == "8\n"
    assert (tmp_path / "adamw.txt").stat().st_mtime_ns == before
