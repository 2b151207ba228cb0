"""The command `nemo-rl-cpp`: one function a subcommand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence


def _check(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """`check`: reports every mistake of a configuration, or that there is none."""
    from nemo_rl_cpp.config import ConfigError, load_eval_config, load_grpo_config, load_ppo_config
    from nemo_rl_cpp.config.loader import kind_of
    from nemo_rl_cpp.config.run import print_findings, print_mistakes
    from nemo_rl_cpp.preflight import preflight

    loaders = {"grpo": load_grpo_config, "ppo": load_ppo_config, "eval": load_eval_config}
    try:
        kind = arguments.kind or kind_of(arguments.config)
        config = loaders[kind](arguments.config, overrides)
    except ConfigError as error:
        print_mistakes(error)
        return 2
    if print_findings(preflight(config)):
        return 2
    print(f"{arguments.config}: no mistakes ({kind})")
    return 0


def _add_check(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "check", help="check a configuration with its overrides, without loading anything else"
    )
    parser.add_argument("--config", required=True, help="YAML file, or the name of a shipped one")
    parser.add_argument("--kind", choices=("grpo", "ppo", "eval"), help="kind of run (default: by the file's sections)")
    parser.set_defaults(run=_check)


def _generate(arguments: argparse.Namespace, rest: list[str]) -> int:
    """`generate`: text from a model or a checkpoint."""
    from nemo_rl_cpp.generate import run

    if rest:
        print(f"error: unknown arguments: {' '.join(rest)} (a prompt of several words goes into quotes)", file=sys.stderr)
        return 2
    return run(arguments)


def _add_generate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from nemo_rl_cpp.generate import add_arguments

    parser = commands.add_parser("generate", help="write text with a model or a checkpoint of a run")
    add_arguments(parser)
    parser.set_defaults(run=_generate)


_COMMANDS: tuple[Callable[[argparse._SubParsersAction[argparse.ArgumentParser]], None], ...] = (_add_check, _add_generate)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns its exit status."""
    parser = argparse.ArgumentParser(prog="nemo-rl-cpp", description="Reinforcement learning of language models.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in _COMMANDS:
        add(commands)
    arguments, rest = parser.parse_known_args(argv)
    return arguments.run(arguments, rest)


if __name__ == "__main__":
    sys.exit(main())
