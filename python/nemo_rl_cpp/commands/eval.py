"""`nemo-rl-cpp eval`: an evaluation."""

from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Evaluates; see `run_eval`."""
    from nemo_rl_cpp import run_eval

    return run_eval.main(arguments)
