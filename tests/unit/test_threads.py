import os
import subprocess
import sys

import pytest
from nemo_rl_cpp.threads import SPIN_COUNT, bound_spinning, cores, threads_at_start


def test_openmp_busy_waiting_is_limited_unless_the_user_sets_omp_wait_policy():
    environment = {}
    bound_spinning(environment)
    assert environment == {"GOMP_SPINCOUNT": str(SPIN_COUNT)}
    for given in ({"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}):
        environment = dict(given)
        assert not bound_spinning(environment) and environment == given


@pytest.mark.slow
def test_libgomp_uses_the_busy_waiting_limit_set_by_the_package():
    """OMP_DISPLAY_ENV lets libgomp say what it uses, when torch loads it."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", "import nemo_rl_cpp, torch"], env=environment | {"OMP_DISPLAY_ENV": "verbose"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and f"GOMP_SPINCOUNT = '{SPIN_COUNT}'" in done.stderr


def test_thread_count_is_the_configured_value_or_omp_num_threads_or_the_core_count():
    assert threads_at_start(5, {"OMP_NUM_THREADS": "3"}) == 5
    assert threads_at_start(None, {"OMP_NUM_THREADS": "3,2"}) == 3
    assert threads_at_start(None, {"OMP_NUM_THREADS": "no"}) == threads_at_start(None, {}) == cores()
    assert 1 <= cores() <= len(os.sched_getaffinity(0))
