import os
import signal
import subprocess
import sys
import threading

import pytest

from nemo_rl_cpp.utils.interrupts import GracefulStop


def test_the_first_ctrl_c_only_asks():
    said = []
    before = signal.getsignal(signal.SIGINT)
    with GracefulStop(said.append) as stop:
        assert not stop.requested
        signal.raise_signal(signal.SIGINT)
        assert stop.requested and stop.reason == "interrupted"
        assert "ends after this step" in said[0]
    assert signal.getsignal(signal.SIGINT) is before


def test_the_second_ctrl_c_stops_at_once():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), GracefulStop(lambda text: None):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_sigterm_and_its_repetition():
    with pytest.raises(SystemExit) as caught, GracefulStop(lambda text: None) as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.reason == "terminated"
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == 143


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_a_closed_terminal_and_a_scheduler_s_warning_end_a_run_like_sigterm(number):
    said, before = [], signal.getsignal(number)
    with GracefulStop(said.append) as stop:
        signal.raise_signal(number)
        assert stop.reason == "terminated" and said[0].startswith(f"{signal.Signals(number).name}: the run ends after this step, with a checkpoint")
    assert signal.getsignal(number) is before


def test_what_the_caller_ignores_stays_ignored():
    """nohup: the run outlives its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with GracefulStop(lambda text: None) as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.requested and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_the_main_thread_it_does_nothing():
    results = []

    def work():
        with GracefulStop() as stop:
            results.append(stop.requested)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [False] and signal.getsignal(signal.SIGINT) is before


def test_a_real_process_finishes_its_step_and_exits_cleanly():
    program = (
        "import sys, time\n"
        "from nemo_rl_cpp.utils.interrupts import GracefulStop\n"
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
