"""Processes of actors that are stopped before they have answered for the first time."""

import os
import signal
import subprocess
import sys

from nemo_rl_cpp.distributed.actor_watch import STARTED_BY, kill_stopped


def test_of_the_stopped_processes_those_that_this_one_has_started_are_killed():
    waits = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    environments = {"stopped": STARTED_BY, "at work": STARTED_BY, "another's": {"NEMO_RL_STARTED_BY": "elsewhere:1"}}
    started = {
        name: subprocess.Popen(waits, stdin=subprocess.PIPE, env=os.environ | mark)
        for name, mark in environments.items()
    }
    try:
        for name in ("stopped", "another's"):
            started[name].send_signal(signal.SIGSTOP)
            os.waitpid(started[name].pid, os.WUNTRACED)  # until it is
        kill_stopped()
        assert started["stopped"].wait(timeout=30) == -signal.SIGKILL
        assert started["at work"].poll() is None and started["another's"].poll() is None
    finally:
        for process in started.values():
            process.kill()
            process.communicate()
