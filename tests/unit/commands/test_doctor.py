import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from nemo_rl_cpp.commands import doctor
from nemo_rl_cpp.commands.doctor import Exactness


@pytest.mark.slow
def test_the_facts_of_this_machine(capsys):
    assert doctor.main(["--no-train"]) == 0
    shown = capsys.readouterr().out
    for word in (
        "processor",
        "cores",
        "memory",
        "nemo_rl_cpp",
        "Python",
        "torch",
        "native core",
        "kernels for",
        "optional packages",
    ):
        assert word in shown
    assert "Nothing is wrong." in shown


def test_too_many_threads_and_another_torch_are_seen(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    rows = {row.name: row for row in dict(doctor.facts())["machine"]}
    assert rows["threads"].mark == "!" and "they wait for one another" in rows["threads"].advice
    monkeypatch.setattr("nemo_rl_cpp._torch_version._built_for_torch", lambda: "1.0.0")
    rows = {row.name: row for row in dict(doctor.facts())["installation"]}
    assert rows["torch"].mark == "✗" and "built for torch 1.0.0" in rows["torch"].value


@pytest.mark.parametrize(
    ("results", "status", "words"),
    [
        ([Exactness(3, 0.0, 0, ["a", "b"], 5.0)] * 2, 0, "the same weights, bit for bit"),
        ([Exactness(3, 0.0, 0, ["a"], 5.0), Exactness(3, 0.0, 0, ["b"], 5.0)], 1, "other weights"),
        ([Exactness(3, 1e-6, 2, ["a"], 5.0)], 1, "tokens that differ 2"),
        ([None], 1, "no end within the 60 s"),
        ([Exactness(3, 0.0, 0, ["a"], 5.0), None], 0, "! 2 threads: no end within"),
        (["it ended with status 1: no memory"], 1, "it ended with status 1: no memory"),
    ],
)
def test_the_self_test_tells_what_it_found(results, status, words, monkeypatch, capsys):
    left = list(results)
    monkeypatch.setattr(doctor, "train_tiny", lambda threads, seconds: left.pop(0))
    monkeypatch.setattr(doctor, "facts", list)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    assert doctor.main([]) == status and words in capsys.readouterr().out


@pytest.mark.parametrize(("cores", "threads"), [({0, 1, 2}, [1, 3]), ({5}, [1])])
def test_both_runs_of_the_self_test_have_the_threads_that_it_names(cores, threads, monkeypatch, capsys):
    seen = []

    def run(command, env, cwd, **options):
        seen.append(int(env["OMP_NUM_THREADS"]))
        logs = Path(cwd) / "logs" / "exp_001"
        logs.mkdir(parents=True)
        row = {
            "train/loss": 0.0,
            "train/max_logprob_gap": 0.0,
            "train/logprob_mismatched_tokens": 0,
            "train/weights/digest": "a",
        }
        (logs / "metrics.jsonl").write_text(3 * (json.dumps(row) + "\n"))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(doctor, "facts", list)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: cores)
    monkeypatch.setattr("subprocess.run", run)
    assert doctor.main([]) == 0 and seen == threads
    shown = capsys.readouterr().out
    assert ("✓ the same weights" in shown) == (len(cores) > 1) and ("was not tested" in shown) == (len(cores) == 1)


def test_a_run_without_digests_is_no_run_with_equal_ones(tmp_path):
    logs = tmp_path / "logs" / "exp_001"
    logs.mkdir(parents=True)
    row = {"train/loss": 0.0, "train/max_logprob_gap": 0.0, "train/logprob_mismatched_tokens": 0}
    (logs / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert doctor._read(str(tmp_path), 1.0) == "its metrics do not hold a digest of the weights after each step"


def test_the_facts_are_told_without_torch(monkeypatch, capsys):
    def version(name):
        if name == "torch":
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(doctor.metadata, "version", version)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert doctor.main(["--no-train"]) == 1
    shown = capsys.readouterr().out
    assert "processor" in shown and "✗ torch" in shown and "is not installed" in shown and "1 thing is wrong" in shown
    assert "torch cannot be imported" in shown and "optional packages" in shown


@pytest.mark.slow
def test_three_tiny_steps_are_exact():
    found = doctor.train_tiny(1, 120.0)
    assert isinstance(found, Exactness), found
    assert (found.steps, found.largest_gap, found.mismatched_tokens) == (3, 0.0, 0)
    assert len(set(found.digests)) == 3 and all(re.fullmatch(r"[0-9a-f]{16}", digest) for digest in found.digests)
