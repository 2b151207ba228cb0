"""Presses Ctrl-C at each moment of a command's first seconds, and says what came of it.

    uv run python tests/tools/press_ctrl_c.py [--from 0.1] [--to 5.0] [--step 0.1] [-- COMMAND ...]

By default the command is `nemo-rl-cpp train --config grpo_tiny.yaml` with as many steps as it likes. Good is: it ends within some
seconds, with status 130 (at once) or 0 (after a step), and without a traceback. The exit status counts the moments that were bad.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path


def press(command: Sequence[str], seconds: float, patience: float = 60.0) -> tuple[int | None, float, str]:
    """(status, None where it had to be killed; seconds from Ctrl-C to the end; what it printed)."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, env=os.environ | {"COLUMNS": "200"}
    )  # fmt: skip
    time.sleep(seconds)
    pressed = time.monotonic()
    process.send_signal(signal.SIGINT)
    try:
        out, _ = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        process.kill()
        return None, time.monotonic() - pressed, process.communicate()[0]
    return process.returncode, time.monotonic() - pressed, out


def verdict(status: int | None, printed: str) -> str | None:
    """What is bad; None for a good end."""
    if status is None:
        return "it went on"
    if "Traceback" in printed:
        return "a traceback"
    return None if status in (0, 130, -signal.SIGINT) else f"status {status}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="first", type=float, default=0.1)
    parser.add_argument("--to", dest="last", type=float, default=5.0)
    parser.add_argument("--step", type=float, default=0.1)
    parser.add_argument("command", nargs="*")
    arguments = parser.parse_args()
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        script = Path(sys.executable).parent / "nemo-rl-cpp"
        command = arguments.command or [
            str(script), "train", "--config", "grpo_tiny.yaml", f"logger.log_dir={folder}/logs", "grpo.max_num_steps=100000",
            "checkpointing.enabled=false",
        ]  # fmt: skip
        for count in range(round((arguments.last - arguments.first) / arguments.step) + 1):
            moment = arguments.first + count * arguments.step
            status, seconds, printed = press(command, moment)
            trouble = verdict(status, printed)
            bad += trouble is not None
            last = printed.strip().splitlines()[-1:] or [""]
            print(
                f"{moment:5.2f} s: status {status}, {seconds:.1f} s later{f' ({trouble})' if trouble else ''}: {last[0][:90]}",
                flush=True,
            )
    return bad


if __name__ == "__main__":
    sys.exit(main())
