"""`nemo-rl-cpp generate`: text from a model or a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from nemo_rl_cpp.command_line import command_parser, plain_warnings

_EXAMPLES = """examples:
  nemo-rl-cpp generate --model results/grpo/step_10 "12 + 30 ="
  nemo-rl-cpp generate --model smollm2-135m-instruct --chat "Why is the sky blue?"
  echo "12 + 30 =" | nemo-rl-cpp generate --model results/grpo --greedy"""


def main(arguments: Sequence[str]) -> int:
    """Writes a text."""
    from nemo_rl_cpp.generate import add_arguments, run

    parser = command_parser("generate", "Write text with a model or a checkpoint of a run.", _EXAMPLES)
    add_arguments(parser)
    known, rest = parser.parse_known_args(arguments)
    if rest:
        words = " ".join(rest)
        print(f"error: unknown arguments: {words} (a prompt of several words goes into quotes)", file=sys.stderr)
        return 2
    with plain_warnings():
        return run(known)
