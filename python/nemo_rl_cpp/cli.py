"""The command `nemo-rl-cpp`: the table of its subcommands. The module of a command is loaded when it is called."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module

from nemo_rl_cpp import __version__
from nemo_rl_cpp.argument_checks import did_you_mean
from nemo_rl_cpp.command_line import own_the_process
from nemo_rl_cpp.interrupts import program

COMMANDS: dict[str, str] = {
    "train": "train with GRPO, DAPO, ProRLv2 or PPO, as the configuration says",
    "eval": "evaluate a model or a checkpoint",
    "generate": "write text with a model or a checkpoint",
    "chat": "talk to a model or a checkpoint",
    "serve": "serve a model or a checkpoint over HTTP, as OpenAI and vLLM do",
    "check": "check a configuration with its overrides, without loading anything else",
    "configs": "list the shipped configurations, each with what it is",
    "models": "list the supported models with the memory that they need",
    "report": "write report.html of a log folder again",
    "compare": "compare runs or evaluations: results, keys that differ, curves, timings, prompts that changed",
    "doctor": "look at this machine and this installation, and train three tiny steps",
}
"""Name of a command -> what it does; the module commands/NAME.py runs it."""
_EXAMPLES = """examples:
  nemo-rl-cpp train --config grpo_tiny.yaml
  nemo-rl-cpp train --config my.yaml policy.optimizer.kwargs.lr=1e-5
  nemo-rl-cpp compare logs/a/exp_001 logs/b/exp_001 --out compare.html
  nemo-rl-cpp chat --model results/grpo_arithmetic_smollm2

nemo-rl-cpp COMMAND --help says more about one of them."""


def help_text() -> str:
    """What `nemo-rl-cpp --help` prints."""
    width = max(map(len, COMMANDS)) + 2
    lines = "\n".join(f"  {name:<{width}}{text}" for name, text in COMMANDS.items())
    return (
        "usage: nemo-rl-cpp COMMAND ...\n\nReinforcement learning of language models.\n\ncommands:\n"
        f"{lines}\n\noptions:\n  -h, --help, --version\n\n{_EXAMPLES}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns its exit status: 0, 1 after an error (one sentence on stderr), 2 for a command line or
    configuration with mistakes, 130 after Ctrl-C."""
    return program(partial(_main, argv))


def _main(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else ""
    if name in ("--version", "-h", "--help"):
        print(f"nemo_rl_cpp {__version__}" if name == "--version" else help_text())
        sys.exit(0)
    if not name:
        print(help_text(), file=sys.stderr)
        return 2
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        hint = did_you_mean(name, COMMANDS, f"there are {', '.join(COMMANDS)}")
        print(f"error: unknown {kind} {name}; {hint}", file=sys.stderr)
        return 2
    if argv is None:
        sys.argv[0] = f"nemo-rl-cpp {name}"  # what argparse calls the program
    return own_the_process(argv, import_module(f"nemo_rl_cpp.commands.{name}").main(words[1:]))


if __name__ == "__main__":
    sys.exit(main())
