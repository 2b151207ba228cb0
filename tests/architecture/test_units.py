"""With several processes the tests of a file run in one of them, so that what they share is made once."""

from types import SimpleNamespace

import pytest
from tiers import SECONDS, TESTS, TOGETHER, scheduler, seconds_of, unit_of

Producer = pytest.importorskip("xdist.remote").Producer
TESTS_OF = [f"tests/{name}.py::test_{i}[a::b]" for name in ("x/test_a", "x/test_b", "unit/cuda/test_c", "unit/cuda/test_d") for i in range(5)]  # fmt: skip


class Process:
    """Notes what it is told to run."""

    shutting_down, gateway = False, SimpleNamespace(id="gw")

    def __init__(self):
        self.given = []

    def send_runtest_some(self, numbers):
        self.given += numbers

    def shutdown(self):
        self.shutting_down = True


def test_tests_that_share_fixtures_run_in_one_process():
    config = SimpleNamespace(getvalue={"tx": ["popen", "popen"]}.get, option=SimpleNamespace())
    units, processes = scheduler(config, Producer("test", enabled=False)), (Process(), Process())
    for process in processes:
        units.add_node(process)
    for process in processes:
        units.add_node_collection(process, TESTS_OF)
    units.schedule()
    for turn in range(len(TESTS_OF)):
        for process in processes:
            if turn < len(process.given):
                units.mark_test_complete(process, process.given[turn])
    ran = [{unit_of(TESTS_OF[number]) for number in process.given} for process in processes]
    assert sorted(number for process in processes for number in process.given) == list(range(len(TESTS_OF)))
    assert not ran[0] & ran[1] and ran[0] | ran[1] == {"tests/x/test_a.py", "tests/x/test_b.py", "tests/unit/cuda/"}


def test_pytest_options_distribute_tests_by_file(request):
    assert "--dist=loadfile" in request.config.getini("addopts")


def test_every_scheduled_test_unit_exists():
    assert all((TESTS.parent / unit).exists() for unit in (*SECONDS, *TOGETHER))
    assert seconds_of(unit_of("tests/integration/test_resume.py::test_x")) > seconds_of(unit_of("tests/unit/test_x.py"))
