import os
import signal
import subprocess
import sys
import threading

import pytest
from nemo_rl_cpp.interrupts import GracefulStop, restore_signal_handlers


@pytest.fixture(autouse=True)
def a_terminal_that_may_close():
    """The tests themselves may run under nohup, which ignores SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("number", "name", "reason"), [
    (signal.SIGINT, "Ctrl-C", "interrupted"), (signal.SIGTERM, "SIGTERM", "terminated"),
    (signal.SIGHUP, "SIGHUP", "terminated"), (signal.SIGUSR1, "SIGUSR1", "terminated"),
])  # fmt: skip
def test_second_interrupt_signal_ends_a_run_that_the_first_signal_asked_to_stop(number, name, reason):
    before, said = signal.getsignal(number), []
    with GracefulStop(said.append, saves=False) as stop:
        assert not stop.requested
        signal.raise_signal(number)
        assert stop.requested and stop.reason == reason
    lost = "and saves nothing, since checkpointing.enabled is false"
    assert said == [f"{name}: the run ends after this step {lost}; once more to stop at once"]
    with pytest.raises((KeyboardInterrupt, SystemExit)) as caught, GracefulStop(said.append):
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
    assert said[1:] == [f"{name}: the run ends after this step, with a checkpoint; once more to stop at once"]
    assert caught.type is KeyboardInterrupt if number == signal.SIGINT else caught.value.code == 143
    assert signal.getsignal(number) is before


def test_signals_ignored_by_the_parent_process_stay_ignored():
    """nohup: the run outlives its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with GracefulStop(lambda text: None) as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.requested and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_graceful_stop_changes_no_signal_handlers_outside_the_main_thread():
    results = []

    def work():
        with GracefulStop() as stop:
            results.append(stop.requested)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [False] and signal.getsignal(signal.SIGINT) is before


def test_interrupted_process_finishes_its_step_and_exits_with_status_0():
    program = (
        "import sys, time\n"
        "from nemo_rl_cpp.interrupts import GracefulStop\n"
        "with GracefulStop() as stop:\n"
        "    print('ready', flush=True)\n"
        "    while not stop.requested:\n"
        "        time.sleep(0.005)\n"
        "    print('saved', stop.reason)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and out == "saved terminated\n" and "SIGTERM: the run ends after this step" in err


def test_second_interrupt_signal_ends_a_call_that_never_returns():
    """Python runs signal handlers between two of its own instructions: a call that swallows what they raise, or that never
    returns, is ended from beside."""
    program = (
        "import time\n"
        "from nemo_rl_cpp import interrupts\n"
        "interrupts.GRACE_SECONDS = 0.2\n"
        "with interrupts.GracefulStop():\n"
        "    while True:\n"
        "        try:\n"
        "            print('ready', flush=True)\n"
        "            time.sleep(1000)\n"
        "        except BaseException:\n"
        "            pass\n"
    )
    for second, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGTERM)
        assert process.stderr.readline() == "\n" and "once more to stop at once" in process.stderr.readline()
        os.kill(process.pid, second)
        process.communicate(timeout=60)
        assert process.returncode == status


def test_forked_child_process_does_not_delay_exit_and_has_default_signal_handlers():
    """A reward function may leave a forked worker behind, and end its workers by SIGTERM."""
    program = (
        "import multiprocessing, os, signal, time\n"
        "from nemo_rl_cpp import interrupts\n"
        "interrupts.GRACE_SECONDS = 0.2\n"
        "fork = multiprocessing.get_context('fork')\n"
        "def wait(pipe):\n"
        "    pipe.send('there')\n"
        "    time.sleep(1000)\n"
        "def start():\n"
        "    here, there = fork.Pipe()\n"
        "    worker = fork.Process(target=wait, args=(there,), daemon=True)\n"
        "    worker.start()\n"
        "    here.recv()\n"
        "    return worker\n"
        "with interrupts.GracefulStop() as stop:\n"
        "    ended, left = [start(), start()], start()\n"
        "    for worker in ended:\n"
        "        worker.terminate()\n"
        "        worker.join()\n"
        "    print([worker.exitcode for worker in ended], stop.requested, flush=True)\n"
        "    time.sleep(0.5)\n"
        "print('went on', left.is_alive())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("[-15, -15] False\nwent on True\n", "", 0)


def test_signal_handlers_replaced_by_user_code_are_restored_at_the_next_check():
    said = []
    with GracefulStop(said.append) as stop:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *args: None)
        assert not stop.requested and said == [
            "warning: code that the run called has changed what SIGINT, SIGTERM does; it ends the run again"
        ]
        signal.raise_signal(signal.SIGINT)
        assert stop.reason == "interrupted"


def test_signal_handlers_of_a_run_within_a_callback_of_a_run_are_kept_without_a_warning():
    said = []
    with GracefulStop(said.append) as outer:
        with GracefulStop(said.append) as inner:
            restore_signal_handlers()
            signal.raise_signal(signal.SIGINT)
            assert inner.requested and len(said) == 1
        assert not outer.requested and len(said) == 1


def test_repeated_sighup_counts_as_one_request_to_stop():
    with GracefulStop(lambda text: None) as stop:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert stop.reason == "terminated"
