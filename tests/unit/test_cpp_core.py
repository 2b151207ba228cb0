"""Builds the GoogleTest binary of the C++ core, where it is older than its sources, and runs it: one command for both."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TARGET = "nemo_core_tests"


def built_in(folder: Path) -> Path:
    """The binary. It is not part of the package's build, which so takes minutes less; its first build takes them here."""
    tools = Path(sys.executable).parent
    cmake = shutil.which("cmake", path=f"{tools}{os.pathsep}{os.environ.get('PATH', '')}")
    if cmake is None:
        pytest.fail("cmake is missing, which builds the C++ tests: `uv sync` installs it")
    environment = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"}
    build = [cmake, "--build", str(folder), "--target", TARGET]
    done = subprocess.run(build, capture_output=True, text=True, env=environment)
    if f"unknown target '{TARGET}'" in done.stdout + done.stderr:
        pytest.fail(
            "GoogleTest was not found when the package was built: install it (apt-get install libgtest-dev), then run "
            "`uv sync --reinstall-package nemo-rl-cpp`"
        )
    if done.returncode != 0:
        pytest.fail(f"{' '.join(build)} failed:\n{(done.stdout + done.stderr)[-8000:]}")
    return folder / TARGET


@pytest.mark.slow
@pytest.mark.timeout(3600)  # the first build, on a busy machine
def test_googletest_suite_of_the_cpp_core_passes():
    folders = sorted(ROOT.glob("build/editable-*/build.ninja"), key=lambda path: path.stat().st_mtime)
    if not folders:
        pytest.fail("the core was not built in this tree: `uv sync --reinstall-package nemo-rl-cpp` does it")
    run = subprocess.run([str(built_in(folders[-1].parent)), "--gtest_brief=1"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
