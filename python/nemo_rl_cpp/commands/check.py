"""`nemo-rl-cpp check`: reports every mistake of a configuration, or that there is none."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from nemo_rl_cpp.command_line import command_parser, run_guarded, unknown_option

_EXAMPLES = """examples:
  nemo-rl-cpp check --config my.yaml
  nemo-rl-cpp check --config grpo_tiny.yaml grpo.num_generations_per_prompt=16"""


def main(arguments: Sequence[str]) -> int:
    """Checks a configuration with its overrides."""
    parser = command_parser(
        "check", "Check a configuration with its overrides, without loading anything else.", _EXAMPLES
    )
    parser.add_argument("--config", required=True, help="YAML file, or the name of a shipped one")
    parser.add_argument("--kind", choices=("grpo", "ppo", "eval"), help="kind of run (default: by the file's sections)")
    known, overrides = parser.parse_known_args(arguments)
    return run_guarded(partial(_check, known, overrides), known)


def _check(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from nemo_rl_cpp.checks import preflight
    from nemo_rl_cpp.config import ConfigError, find_config
    from nemo_rl_cpp.config.exactness import exactness_text
    from nemo_rl_cpp.config.loader import LOADERS, kind_of
    from nemo_rl_cpp.config.run import print_findings, print_mistakes
    from nemo_rl_cpp.dotted_names import search_for_modules

    if message := unknown_option(overrides):
        print(f"error: {message}", file=sys.stderr)
        return 2
    try:
        search_for_modules(Path.cwd(), find_config(arguments.config).resolve().parent)
        kind = arguments.kind or kind_of(arguments.config)
        config = LOADERS[kind](arguments.config, overrides)
    except ConfigError as error:
        print_mistakes(error)
        return 2
    if print_findings(preflight(config)):
        return 2
    print(f"{arguments.config}: no mistakes ({kind})")
    if (text := exactness_text(config)) is not None:
        print(text)
    if (
        kind != "eval"
        and config.policy.generation.runs_vllm
        and config.policy.generation.vllm_cfg.server_url is not None
    ):
        from nemo_rl_cpp.models.generation.vllm.server import server_command

        print(f"the server is started like this:\n  {server_command(config.policy, config.cluster.device)}")
    return 0
