"""The command `nemo-rl-cpp` with its subcommands. Almost nothing is imported before `main` handles Ctrl-C."""

import os
import sys
from _signal import SIGINT, signal  # the module `signal` is slow to import, because it creates enums
from collections.abc import Sequence
from importlib import import_module

from nemo_rl_cpp import __version__

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("runs:train", "train with GRPO, PPO, distillation or SFT, as the configuration says"),
    "eval": ("runs:evaluate", "evaluate a model or a checkpoint"),
    "generate": ("generate:generate", "write text with a model or a checkpoint"),
    "chat": ("generate:chat", "talk to a model or a checkpoint"),
    "serve": ("serve:main", "serve a model or a checkpoint over HTTP, as OpenAI and vLLM do"),
    "export": ("export:main", "write a model or a checkpoint as a GGUF file, for llama.cpp, Ollama and LM Studio"),
    "check": ("runs:check", "check a configuration, its data and the code that it names, without loading a model"),
    "configs": ("runs:configs", "list the shipped configurations, each with what it is"),
    "models": ("models:main", "list the supported models with the memory that they need"),
    "report": ("reports:report", "write report.html of a log folder again"),
    "compare": (
        "reports:compare",
        "compare runs or evaluations: results, keys that differ, curves, prompts that changed",
    ),
}
"""Name of a command -> (module of commands/ and its function, description)."""
_EXAMPLES = """examples:
  nemo-rl-cpp train --config grpo_tiny.yaml
  nemo-rl-cpp train --config my.yaml policy.optimizer.kwargs.lr=1e-5
  nemo-rl-cpp compare logs/a/exp_001 logs/b/exp_001 --out compare.html
  nemo-rl-cpp generate --model results/grpo_arithmetic_smollm2 --chat "What is 12 plus 30?"

nemo-rl-cpp COMMAND --help says more about one of them."""


def _leave(number: int, frame: object) -> None:
    """Handle SIGINT during imports: end the program at once, since an exception there might be lost or printed."""
    os.write(2, b"\ninterrupted: stopped at once\n")
    os._exit(130)


def main(argv: Sequence[str] | None = None, command: str | None = None, **options: object) -> int:
    """Run one subcommand and return its exit status: 0; 1 after an error (one sentence on stderr); 2 for an invalid
    command line or configuration; 130 after Ctrl-C.

    `command` is the subcommand; if it is None, the first argument is. `options` are passed to the subcommand's
    function; scripts in examples/ use them."""
    if argv is None:
        signal(SIGINT, _leave)
    from nemo_rl_cpp.command_line import program
    from nemo_rl_cpp.interrupts import end_soon

    words = list(sys.argv[1:] if argv is None else argv)
    with program("--debug" in words) as outcome:
        name = command or _command(words)
        if name is None:
            outcome.status = 2
        else:
            if argv is None and command is None:
                sys.argv[0] = f"nemo-rl-cpp {name}"  # the program's name in argparse's messages
            if name not in ("train", "eval"):  # these find mistakes before they start; later errors are of the run
                outcome.mistakes = (ValueError,)
            place, _, function = COMMANDS[name][0].partition(":")
            run = getattr(import_module(f"nemo_rl_cpp.commands.{place}"), function)
            outcome.status = run(words if command else words[1:], **options)
    if argv is None and outcome.status >= 128:  # so that no thread of a library or of user code keeps the process alive
        end_soon(outcome.status)
    return outcome.status


def _command(words: Sequence[str]) -> str | None:
    """Return the first of the command line's arguments `words` if it is a subcommand. Otherwise print an error, or the
    help if there are no arguments, and return None. For --help and --version, print the requested text and exit."""
    from nemo_rl_cpp.argument_checks import did_you_mean
    from nemo_rl_cpp.command_line import Exit

    name = words[0] if words else ""
    if name in COMMANDS:
        return name
    if name in ("--version", "-h", "--help"):
        print(f"nemo_rl_cpp {__version__}" if name == "--version" else help_text())
        raise Exit(0)
    if name:
        kind = "option" if name.startswith("-") else "command"
        hint = did_you_mean(name, COMMANDS, f"there are {', '.join(COMMANDS)}")
        print(f"error: unknown {kind} {name}; {hint}", file=sys.stderr)
    else:
        print(help_text(), file=sys.stderr)
    return None


def help_text() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = "\n".join(f"  {name:<{width}}{text}" for name, (_, text) in COMMANDS.items())
    return (
        "usage: nemo-rl-cpp COMMAND ...\n\nReinforcement learning of language models.\n\ncommands:\n"
        f"{lines}\n\noptions:\n  -h, --help, --version\n\n{_EXAMPLES}"
    )


if __name__ == "__main__":
    sys.exit(main())
