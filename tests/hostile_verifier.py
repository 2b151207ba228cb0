"""A verifier that hangs, crashes or prints as the response tells it, for tests of the processes that run verifiers."""

import os
import signal
import subprocess
import sys
import tempfile
import time

from nemo_rl_cpp.environments.verifiers import VerifierBase, VerifierUseError


def child_pid_file(parent: int) -> str:
    return os.path.join(tempfile.gettempdir(), f"nemo_rl_cpp_hostile_child_{parent}")


class HostileVerifier(VerifierBase):
    def judge(self, response, ground_truth, **kwargs):
        if response in ("bigint", "sleep"):
            with open("/proc/self/comm", "w") as name:
                name.write("judging")
        if response == "bigint":
            return float((7 ** (10**9)) % 10), None  # holds the GIL, so no signal handler runs
        if response == "sleep":
            time.sleep(3600)
        if response == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if response == "abort":
            os.abort()
        if response == "exit":
            os._exit(0)
        if response == "memory":
            return float(len(bytearray(10 * 2**30))), None
        if response == "print":
            print("x" * 100_000)
            sys.stderr.write("y" * 100_000)
            os.write(1, b"z" * 10)
        if response == "child":
            child = subprocess.Popen(["sleep", "3600"])
            with open(child_pid_file(os.getppid()), "w") as out:
                out.write(str(child.pid))
            time.sleep(3600)
        if response == "misuse":
            raise VerifierUseError("unknown option")
        return float(response == ground_truth), response


class NeverStarts(HostileVerifier):
    def __init__(self):
        raise FileNotFoundError("the dictionary is missing")
