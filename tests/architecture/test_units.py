"""With several processes the tests of a file run in one of them, so that what they share is made once."""

import pytest
from tiers import SECONDS, TESTS, TOGETHER, seconds_of, unit_of

Producer = pytest.importorskip("xdist.remote").Producer


def test_pytest_runs_all_tests_of_a_file_in_the_same_process(request):
    assert "--dist=loadfile" in request.config.getini("addopts")


def test_every_path_in_the_table_of_test_durations_exists():
    assert all((TESTS.parent / unit).exists() for unit in (*SECONDS, *TOGETHER))
    assert seconds_of(unit_of("tests/integration/test_resume.py::test_x")) > seconds_of(unit_of("tests/unit/test_x.py"))
