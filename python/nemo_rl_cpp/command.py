"""The entry of the command `nemo-rl-cpp`. It imports next to nothing, so that Ctrl-C is heard while the rest is imported."""

import os


def main() -> int:
    """Runs `cli.main`; the exit status."""
    try:
        from nemo_rl_cpp.cli import main as run
    except KeyboardInterrupt:
        os.write(2, b"\ninterrupted: stopped at once\n")
        return 130
    return run()
