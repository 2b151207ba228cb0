"""How threads wait, how many a run has, and what is said of a busy machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from nemo_rl_cpp.stages import stage, stages_shown
from nemo_rl_cpp.telemetry import starvation
from nemo_rl_cpp.telemetry.starvation import CoreTime, StarvationWatch
from nemo_rl_cpp.threads import SPIN_COUNT, bound_spinning, cores, processors, threads_at_start


def test_spinning_is_bounded_unless_the_user_has_said_how_to_wait():
    environment = {}
    bound_spinning(environment)
    assert environment == {"GOMP_SPINCOUNT": str(SPIN_COUNT)}
    for given in ({"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}):
        environment = dict(given)
        assert not bound_spinning(environment) and environment == given


@pytest.mark.slow
def test_libgomp_reads_the_bound_that_the_package_sets():
    """OMP_DISPLAY_ENV lets libgomp say what it uses, when torch loads it."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", "import nemo_rl_cpp, torch"], env=environment | {"OMP_DISPLAY_ENV": "verbose"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and f"GOMP_SPINCOUNT = '{SPIN_COUNT}'" in done.stderr


def test_threads_of_a_run_are_those_of_its_key_then_the_variable_then_the_cores():
    assert threads_at_start(5, {"OMP_NUM_THREADS": "3"}) == 5
    assert threads_at_start(None, {"OMP_NUM_THREADS": "3,2"}) == 3
    assert threads_at_start(None, {"OMP_NUM_THREADS": "no"}) == threads_at_start(None, {}) == cores()
    assert 1 <= cores() <= processors()


def watch(monkeypatch, *times):
    """A watch that sees these (seconds on a core, seconds of waiting), one after the other."""
    given = iter(times)
    monkeypatch.setattr(starvation, "core_time", lambda: CoreTime(*next(given)))
    monkeypatch.setattr(starvation, "processors", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (6.04, 0, 0))
    return StarvationWatch(most=0.25, least_seconds=5.0)


def test_a_starved_run_says_so_once(monkeypatch):
    seen = watch(monkeypatch, (10, 1), (12, 2), (13.5, 7.5), (20, 40))
    assert seen.look() is None  # 3 seconds prove nothing
    assert seen.look().startswith(
        "this machine is busy: the run's threads had a core for 35 % of the time that they wanted one (2 processors, load 6.0)."
    )
    assert seen.look() is None


def test_a_run_that_has_its_cores_says_nothing(monkeypatch):
    seen = watch(monkeypatch, (0, 0), (8, 2), (9, 2), (17, 3.9))
    assert seen.look() is seen.look() is seen.look() is None


def test_no_numbers_no_sentence(monkeypatch):
    monkeypatch.setattr(starvation, "core_time", lambda: None)
    assert StarvationWatch().look() is None


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not count waiting")
def test_time_on_a_core_is_counted():
    before = starvation.core_time()
    total = sum(i * i for i in range(300_000))
    spent = starvation.core_time() - before
    assert total and 0 < spent.running < 60 and spent.waiting >= 0


def test_stages_are_shown_to_command_lines_alone(capsys):
    stage("unheard")
    with stages_shown():
        stage("loading torch")
    stage("unheard")
    shown = capsys.readouterr().out
    assert shown.startswith("[  ") and shown.endswith(" s] loading torch\n") and "unheard" not in shown
