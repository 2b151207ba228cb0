"""The command `nemo-rl-cpp`: one function a subcommand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from nemo_rl_cpp import __version__
from nemo_rl_cpp.command_line import OneLineParser, add_common_options, own_the_process, plain_warnings, unknown_option
from nemo_rl_cpp.errors import guarded
from nemo_rl_cpp.interrupts import program


def _check(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """`check`: reports every mistake of a configuration, or that there is none."""
    from nemo_rl_cpp.config import ConfigError, find_config, load_eval_config, load_grpo_config, load_ppo_config
    from nemo_rl_cpp.config.exactness import exactness_text
    from nemo_rl_cpp.config.loader import kind_of
    from nemo_rl_cpp.config.run import print_findings, print_mistakes
    from nemo_rl_cpp.environments.loading import search_for_modules
    from nemo_rl_cpp.preflight import preflight

    if message := unknown_option(overrides):
        return _refuse(message)
    loaders = {"grpo": load_grpo_config, "ppo": load_ppo_config, "eval": load_eval_config}
    try:
        search_for_modules(Path.cwd(), find_config(arguments.config).resolve().parent)
        kind = arguments.kind or kind_of(arguments.config)
        config = loaders[kind](arguments.config, overrides)
    except ConfigError as error:
        print_mistakes(error)
        return 2
    if print_findings(preflight(config)):
        return 2
    print(f"{arguments.config}: no mistakes ({kind})")
    if (text := exactness_text(config)) is not None:
        print(text)
    return 0


def _refuse(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


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
        return _refuse(f"unknown arguments: {' '.join(rest)} (a prompt of several words goes into quotes)")
    return run(arguments)


def _add_generate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from nemo_rl_cpp.generate import add_arguments

    parser = commands.add_parser("generate", help="write text with a model or a checkpoint of a run")
    add_arguments(parser)
    parser.set_defaults(run=_generate)


def _serve(arguments: argparse.Namespace, rest: list[str]) -> int:
    """`serve`: a model behind HTTP."""
    from nemo_rl_cpp.serving.command import run

    return _refuse(f"unknown arguments: {' '.join(rest)}") if rest else run(arguments)


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from nemo_rl_cpp.serving.command import add_arguments

    parser = commands.add_parser("serve", help="serve a model or a checkpoint over HTTP, as OpenAI and vLLM do")
    add_arguments(parser)
    parser.set_defaults(run=_serve)


def _train(arguments: Sequence[str]) -> int:
    """`train`: the run script of the configuration's kind."""
    from nemo_rl_cpp import run_grpo_math, run_ppo
    from nemo_rl_cpp.config import ConfigError
    from nemo_rl_cpp.config.loader import kind_of
    from nemo_rl_cpp.config.run import print_mistakes

    parser = OneLineParser(add_help=False)
    parser.add_argument("--config")
    known, _ = parser.parse_known_args(arguments)
    try:
        kind = kind_of(known.config) if known.config is not None else "grpo"
    except ConfigError as error:
        print_mistakes(error)
        return 2
    return (run_ppo if kind == "ppo" else run_grpo_math).main(arguments)


def _eval(arguments: Sequence[str]) -> int:
    """`eval`: an evaluation."""
    from nemo_rl_cpp import run_eval

    return run_eval.main(arguments)


def _report(arguments: Sequence[str]) -> int:
    """`report`: report.html of a log folder, written again."""
    from nemo_rl_cpp.report.__main__ import main as write

    return write(list(arguments))


def _configs(arguments: Sequence[str]) -> int:
    """`configs`: names of the shipped configurations."""
    from nemo_rl_cpp.config.locate import shipped_configs

    print("\n".join(shipped_configs()))
    return 0


_PASSED_ON: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "train": (_train, "train with GRPO, DAPO, ProRLv2 or PPO, as the configuration says (train --help)"),
    "eval": (_eval, "evaluate a model (eval --help)"),
    "report": (_report, "write report.html of a log folder again"),
    "configs": (_configs, "list the shipped configurations"),
}
"""Commands that get everything behind their name as it is."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns its exit status: 0, 1 after an error (one sentence on stderr), 2 for a command line or
    configuration with mistakes, 130 after Ctrl-C."""
    return program(partial(_main, argv))


def _main(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in _PASSED_ON:
        return own_the_process(argv, _PASSED_ON[words[0]][0](words[1:]))
    parser = OneLineParser(prog="nemo-rl-cpp", description="Reinforcement learning of language models.")
    parser.add_argument("--version", action="version", version=f"nemo_rl_cpp {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=OneLineParser)
    for name, (_, help_text) in _PASSED_ON.items():
        commands.add_parser(name, help=help_text, add_help=False)
    _add_check(commands)
    _add_generate(commands)
    _add_serve(commands)
    for name in set(commands.choices) - set(_PASSED_ON):
        add_common_options(commands.choices[name])
    arguments, rest = parser.parse_known_args(words)
    if not hasattr(arguments, "run"):
        parser.print_help(sys.stderr)
        return 2
    with plain_warnings():
        status = guarded(partial(arguments.run, arguments, rest), arguments.debug)
    return own_the_process(argv, status)


if __name__ == "__main__":
    sys.exit(main())
