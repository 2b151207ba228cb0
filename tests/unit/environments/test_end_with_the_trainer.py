import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import alive, descendants, processes_inside, wait_until_gone

pytestmark = pytest.mark.slow
DEAF = "import os, signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass"
# a process that forks a trainer for each line of its input, and says when that has ended
TRAINERS = f"""
import os, sys, threading
from hostile_verifier import HostileVerifier
from nemo_rl_cpp.environments.code_environment import CodeEnvironment
from nemo_rl_cpp.config.env import VerifierPoolConfig
from nemo_rl_cpp.environments.verifier_pool import VerifierPool

def code():
    env = CodeEnvironment({{"num_workers": 2, "time_limit_s": 60.0, "total_time_limit_s": 60.0}})
    programs = [[{{"role": "assistant", "content": text}}] for text in (import_and_sleep, deaf)]
    env.step(programs, [{{"ground_truth": {{"inputs": [""], "outputs": [""]}}}}] * 2)

def verifiers():
    cfg = VerifierPoolConfig(num_workers=2, verifier_deadline_s=60.0)
    VerifierPool(HostileVerifier, cfg).verify(["bigint", "sleep"], ["ok", "ok"])

import_and_sleep, deaf = "import time; time.sleep(60)", {DEAF!r}
for _ in sys.stdin:
    pid = os.fork()
    if pid == 0:
        threading.Thread(target=code).start()
        verifiers()
    print(pid, flush=True)
    os.waitpid(pid, 0)
    print("ended", flush=True)
"""


class Trainer:
    def __init__(self, starter):
        self._starter = starter
        starter.stdin.write("\n")
        starter.stdin.flush()
        self.pid = int(starter.stdout.readline())

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)

    def wait(self):
        assert self._starter.stdout.readline() == "ended\n"


@pytest.fixture(scope="module")
def starter():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", TRAINERS]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.stdin.close()


def judges(pid: str) -> bool:
    """Return whether a verifier process has received its task, for which `HostileVerifier` changes the process's
    name."""
    try:
        return Path(f"/proc/{pid}/comm").read_text() == "judging\n"
    except OSError:
        return False


def killed(trainer):
    trainer.kill()


def stopped_and_killed(trainer):
    """Kill a stopped trainer, as an out-of-memory killer may."""
    os.kill(trainer.pid, signal.SIGSTOP)
    trainer.kill()


def left_by_an_abort(trainer):
    os.kill(trainer.pid, signal.SIGABRT)


def its_workers_killed(trainer):
    """Kill the trainer's worker processes before the trainer."""
    children = Path(f"/proc/{trainer.pid}/task/{trainer.pid}/children").read_text().split()
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    trainer.kill()


@pytest.mark.parametrize(
    "end", [killed, stopped_and_killed, left_by_an_abort, its_workers_killed], ids=lambda end: end.__name__
)
def test_environment_processes_end_when_the_trainer_process_is_killed(starter, end):
    trainer = Trainer(starter)
    try:
        while True:
            assert alive(trainer.pid)
            started = descendants(trainer.pid)
            if len(started & processes_inside()) == 2 and sum(map(judges, started)) == 2:
                break
            time.sleep(0.05)
    finally:
        end(trainer)
        trainer.wait()
    assert wait_until_gone(started, 5.0) == []
