import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from nemo_rl_cpp.environments.code_environment import CodeEnvironment
from processes import children_of, left_over, verifier_pids

PACKAGE = Path(__file__).resolve().parents[3] / "python" / "nemo_rl_cpp"
HERE = Path(__file__)
TRUTH = {"inputs": [""], "outputs": ["pwned"]}

# name -> (program, reason); all of them are given "pwned" as the right answer
ATTACKS = {
    "fork bomb": ("import os\nwhile True:\n    os.fork()", "process_limit"),
    "stubborn fork bomb": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "time_limit"),
    "another interpreter": ("import subprocess, sys; subprocess.run([sys.executable, '-c', 'pass'])", "process_limit"),
    "a process that shares its memory": ("import ctypes\nif ctypes.CDLL(None).syscall({clone}, 0x4111, 0, 0, 0, 0) < 0: raise BlockingIOError(11, '')", "process_limit"),
    "thread bomb": ("import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()", "process_limit"),
    "10 GB": ("x = bytearray(10 * 2**30)", "memory_limit"),
    "memory of many processes": (
        "import os, time\nfor i in range(6):\n    if os.fork() == 0:\n        x = bytearray(100 * 2**20)\n        time.sleep(60)\ntime.sleep(60)",
        "process_limit",
    ),
    "its folder full": ("with open('x', 'wb') as f:\n    while True: f.write(bytes(2**20)); f.flush()", "memory_limit"),
    "endless loop": ("while True: pass", "time_limit"),
    "sleep": ("import time; time.sleep(60)", "time_limit"),
    "deaf": ("import signal, time\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: time.sleep(9)", "time_limit"),
    "stopped": ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "time_limit"),
    "read a file": ("print(open('/etc/passwd').read())", "file_access"),
    "read through ..": ("print(open('../../etc/hostname').read())", "file_access"),
    "read through a link": ("import os; os.symlink('/etc/passwd', '/box/a'); print(open('/box/a').read())", "runtime_error"),
    "read a secret": ("print(open({secret!r}).read())", "file_access"),
    "read another process": ("print(open('/proc/1/environ').read())", "file_access"),
    "write a file": ("open('/written', 'w').write('x')", "file_access"),
    "write into a library": ("import os; open(os.__file__, 'a').write('import evil')", "file_access"),
    "delete": ("import shutil; shutil.rmtree('/usr')", "file_access"),
    "socket": ("import socket; socket.create_connection(('127.0.0.1', 80))", "forbidden_call"),
    "caught socket": ("import socket\ntry: socket.socket()\nexcept OSError: pass\nprint('pwned')", "forbidden_call"),
    "socket of a thread": ("import socket, threading, time\nthreading.Thread(target=socket.socket).start()\ntime.sleep(60)", "forbidden_call"),
    "ptrace": ("import ctypes; ctypes.CDLL(None).ptrace(0, 0, 0, 0)", "forbidden_call"),
    "new namespace": ("import ctypes; ctypes.CDLL(None).unshare(0x10000000)", "forbidden_call"),
    "clone into a namespace": ("import ctypes; ctypes.CDLL(None).syscall({clone}, 0x10000011, 0, 0, 0, 0)", "forbidden_call"),
    "mount": ("import ctypes; ctypes.CDLL(None).mount(b'proc', b'/box', b'proc', 0, None)", "forbidden_call"),
    "much output": ("while True: print('x' * 1000)", "output_limit"),
    "much error output": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "output_limit"),
    "kill the parent": ("import os, time\nos.kill(os.getppid(), 9)\nprint(os.getppid()); raise SystemExit(1)", "runtime_error"),
    "kill everything": ("import os\nfor target in (-1, 0): os.kill(target, 9)", "any"),
    "orphans": ("import os, time\nfor i in range(3):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0: time.sleep(60)\n        os._exit(0)\nraise SystemExit(1)", "process_limit"),
    "raise the limits": ("import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (10**6, 10**6))", "runtime_error"),
    "become root": ("import os; os.setuid(0)", "any"),
    "crash": ("import ctypes; ctypes.string_at(0)", "runtime_error"),
    "recursion": ("import sys; sys.setrecursionlimit(10**9)\ndef f(): return f()\nf()", "any"),
    "another program": ("import os; os.execv('/bin/sh', ['sh', '-c', 'echo pwned'])", "runtime_error"),
}  # fmt: skip


def made(time_limit_s):
    environment = CodeEnvironment(
        {"time_limit_s": time_limit_s, "total_time_limit_s": 3 * time_limit_s, "memory_mb": 256, "max_output_kb": 256, "num_workers": 2}
    )  # fmt: skip
    yield environment
    environment.shutdown()


@pytest.fixture(scope="module")
def env():
    yield from made(60.0)


@pytest.fixture(scope="module")
def impatient():
    """Yield an environment with a short time limit, for programs that end only at the limit."""
    yield from made(2.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_malicious_programs_cannot_affect_the_host_outside_the_sandbox(env, impatient, name, tmp_path):
    program, reason = ATTACKS[name]
    env = impatient if reason in ("time_limit", "process_limit", "any") else env
    secret = tmp_path / "secret"
    secret.write_text("pwned")
    clone = "56" if os.uname().machine == "x86_64" else "220"
    program = program.replace("{secret!r}", repr(str(secret))).replace("{clone}", clone)
    result = env.step([[{"role": "assistant", "content": program}]], [{"ground_truth": TRUTH}])
    assert result.rewards.tolist() == [0.0]
    if reason != "any":
        assert result.answers[0].partition(":")[0] == reason, result.answers
    assert not left_over()
    assert all(not children_of(pid) for pid in verifier_pids(env))
    assert env.pop_metrics()["verifier_timeouts"] == 0  # the sandbox itself noticed
    good = env.step([[{"role": "assistant", "content": "print('pwned')"}]], [{"ground_truth": TRUTH}])
    assert good.rewards.tolist() == [1.0]  # and goes on working


OPEN = "def is_open(i):\n    try: os.fstat(i)\n    except OSError: return False\n    return True"
FOLDERS = ("/tmp", "/home", "/proc", "/sys", "/var", "/run", "/mnt", "/opt", "/srv")
# name -> (a function of the program, what it returns)
SEEN = {
    "folders": (f"def f(): return [p for p in {FOLDERS} if os.path.exists(p)]", []),
    # 3 is the harness' own copy of standard output
    "descriptors": (f"{OPEN}\ndef f(): return [i for i in range(64) if is_open(i)]", [0, 1, 2, 3]),
    "variables": ("def f(): return sorted(os.environ)", ["HOME", "LANG", "MALLOC_ARENA_MAX", "PATH", "PYTHONHASHSEED", "TMPDIR"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEN)
def test_sandboxed_program_sees_no_files_processes_or_network_of_the_host(env, name):
    program, seen = SEEN[name]
    truth = {"fn_name": "f", "inputs": [[]], "outputs": [seen]}
    leaky = os.open("/etc/passwd", os.O_RDONLY)
    os.set_inheritable(leaky, True)
    try:
        result = env.step([[{"role": "assistant", "content": f"import os\n{program}"}]], [{"ground_truth": truth}])
    finally:
        os.close(leaky)
    assert result.rewards.tolist() == [1.0]


def test_files_written_by_a_sandboxed_program_do_not_exist_in_the_next_run(env):
    truth = {"inputs": ["", ""], "outputs": ["0", "0"]}
    program = "import os\nprint(len(os.listdir('.')) - 1)\nopen('left', 'w').write('x')"
    assert env.step([[{"role": "assistant", "content": program}]], [{"ground_truth": truth}]).rewards.tolist() == [1.0]


def interpreter_for_everyone() -> str | None:
    """Return the path of a Python of this version that every user may run, or None."""
    system = shutil.which("python3", path="/usr/bin:/usr/local/bin") or ""
    for name in (getattr(sys, "_base_executable", sys.executable), system):
        path = os.path.realpath(name)
        parents = Path(path).parents
        if name and all(parent.stat().st_mode & 0o005 == 0o005 for parent in parents):
            return path
    return None


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="the tests above already run as an unprivileged user")
@pytest.mark.parametrize(
    "name",
    ["fork bomb", "10 GB", "memory of many processes", "read a file", "caught socket", "kill everything", "orphans"],
)
def test_malicious_programs_cannot_affect_the_host_outside_an_unprivileged_users_sandbox(name):
    python = interpreter_for_everyone()
    if python is None:
        pytest.skip("no Python that another user may run")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "nemo_rl_cpp"
        shutil.copytree(PACKAGE / "environments" / "sandbox", target / "environments" / "sandbox")
        (target / "__init__.py").touch()
        (target / "environments" / "__init__.py").touch()
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        code = (
            "import os, sys\n"
            "from nemo_rl_cpp.environments.sandbox import Limits, run_program\n"
            "assert os.getuid() == 54321\n"
            "outcome = run_program(sys.argv[1], limits=Limits(time_s=1, memory_mb=256))\n"
            "print(outcome.exit_code, outcome.stopped)\n"
            "assert outcome.exit_code != 0 or outcome.stopped\n"
            "assert run_program('print(41 + 1)').stdout == b'42\\n'\n"
        )
        ran = subprocess.run(
            [python, "-c", code, ATTACKS[name][0]], env={"PYTHONPATH": folder}, user=54321, group=54321, extra_groups=[],
            capture_output=True, text=True, cwd="/",
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout + ran.stderr
    assert not left_over()
