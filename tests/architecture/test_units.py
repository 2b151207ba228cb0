"""With several processes the tests of a file run in one of them, so that what they share is made once."""

import pytest
from tiers import SECONDS, TESTS, TOGETHER, seconds_of, unit_of

Producer = pytest.importorskip("xdist.remote").Producer


def test_pytest_options_distribute_tests_by_file(request):
    assert "--dist=loadfile" in request.config.getini("addopts")


def test_every_scheduled_test_unit_exists():
    assert all((TESTS.parent / unit).exists() for unit in (*SECONDS, *TOGETHER))
    assert seconds_of(unit_of("tests/integration/test_resume.py::test_x")) > seconds_of(unit_of("tests/unit/test_x.py"))
