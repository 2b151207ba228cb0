import re

import pytest
from nemo_rl_cpp.commands import doctor, machine
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
    rows = {row.name: row for row in machine.facts()["machine"]}
    assert rows["threads"].mark == "!" and "they wait for one another" in rows["threads"].advice
    monkeypatch.setattr("nemo_rl_cpp._torch_version._built_for_torch", lambda: "1.0.0")
    rows = {row.name: row for row in machine.facts()["installation"]}
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
    monkeypatch.setattr(machine, "facts", dict)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    assert doctor.main([]) == status and words in capsys.readouterr().out


@pytest.mark.slow
def test_three_tiny_steps_are_exact():
    found = doctor.train_tiny(1, 120.0)
    assert isinstance(found, Exactness), found
    assert (found.steps, found.largest_gap, found.mismatched_tokens) == (3, 0.0, 0)
    assert len(set(found.digests)) == 3 and all(re.fullmatch(r"[0-9a-f]{16}", digest) for digest in found.digests)
