"""What the run scripts share: read the command line, check the configuration, show it, start the loop."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from nemo_rl_cpp.models.sources import TINY_RANDOM, SourceError, resolve_tokenizer
from nemo_rl_cpp.preflight import Finding, preflight
from nemo_rl_cpp.utils.access import written
from nemo_rl_cpp.utils.yaml_text import dump_yaml

from .errors import ConfigError
from .master import MasterConfig
from .fold import keys_without_effect_text
from .memory import forecast_text


def parse_arguments(
    argv: Sequence[str] | None, default_config: str, description: str
) -> tuple[argparse.Namespace, list[str]]:
    """(--config, --dry-run) and the overrides: everything else on the command line."""
    parser = argparse.ArgumentParser(
        description=description,
        epilog="Everything else is an override in Hydra's words: section.key=value changes a key, +section.key=value "
        "adds one, ~section.key deletes one.",
    )
    parser.add_argument(
        "--config", default=default_config, help="YAML file, or the name of a shipped one (default: %(default)s)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show the resolved configuration and a memory forecast, then stop"
    )
    return parser.parse_known_args(argv)


def run(
    load: Callable[[str, Sequence[str]], MasterConfig],
    start: Callable[[Any], Any],
    argv: Sequence[str] | None,
    default_config: str,
    description: str,
) -> int:
    """Loads and checks, then starts; exit status 2 for a configuration with mistakes (all of them on stderr), 1 when its
    tokenizer cannot be had, which is known before torch has loaded."""
    arguments, overrides = parse_arguments(argv, default_config, description)
    try:
        config = load(arguments.config, overrides)
    except ConfigError as error:
        print_mistakes(error)
        return 2
    if arguments.dry_run:
        print(dump_yaml(written(config)))
        if hasattr(config, "policy"):  # an evaluation holds no more than the model and its cache
            print(forecast_text(config))  # type: ignore[arg-type]
        if (ineffective := keys_without_effect_text(config)) is not None:
            print(ineffective)
        return 2 if print_findings(preflight(config)) else 0
    if print_findings(preflight(config)):
        return 2
    try:
        _find_tokenizer(config)
    except SourceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    start(config)
    return 0


def _find_tokenizer(config: Any) -> None:
    """Fetches the tokenizer's files, if none are here (the run looks for newer ones); SourceError says why not."""
    name = (config.policy if hasattr(config, "policy") else config).tokenizer.name
    if name != TINY_RANDOM:
        resolve_tokenizer(name, ask_hub=False)


def print_findings(findings: Sequence[Finding]) -> int:
    """Prints what `preflight` found to stderr; returns the number of errors."""
    for finding in findings:
        print(f"{finding.level}: {finding}", file=sys.stderr)
    return sum(finding.level == "error" for finding in findings)


def print_mistakes(error: ConfigError) -> None:
    count = len(error.problems)
    print(f"The configuration has {count} mistake{'s' if count != 1 else ''}:", file=sys.stderr)
    for problem in error.problems:
        print(f"  {problem}", file=sys.stderr)
