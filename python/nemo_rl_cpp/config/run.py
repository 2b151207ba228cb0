"""What the run scripts share: read the command line, check the configuration, show it, start the loop."""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from nemo_rl_cpp.checks import Finding, banner_lines, preflight
from nemo_rl_cpp.command_line import OneLineParser, add_common_options, own_the_process, plain_warnings, unknown_option
from nemo_rl_cpp.config.access import written
from nemo_rl_cpp.config.master import WholeConfig
from nemo_rl_cpp.dotted_names import search_for_modules
from nemo_rl_cpp.errors import guarded
from nemo_rl_cpp.files.yaml_text import dump_yaml
from nemo_rl_cpp.interrupts import raise_if_interrupted, say
from nemo_rl_cpp.models.sources import TINY_RANDOM, resolve_tokenizer
from nemo_rl_cpp.stages import stage, stages_shown

from .errors import ConfigError
from .fold import keys_without_effect_text
from .locate import find_config, shipped_configs
from .master import EvalMasterConfig
from .memory import forecast_text

C = TypeVar("C", bound="WholeConfig")
_EVAL_KEYS = (
    ("data.train.dataset_name", "data.dataset_name"),
    ("policy.model_name", "generation.model_name"),
    ("configs/grpo_arithmetic_smollm2.yaml", "configs/evals/arithmetic_smollm2.yaml"),
)


def parse_arguments(
    argv: Sequence[str] | None, default_config: str, description: str
) -> tuple[argparse.Namespace, list[str]]:
    """(--config, --dry-run, --debug) and the overrides: everything else on the command line. An option that is unknown ends
    the program with status 2 and the override to write."""
    parser = OneLineParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_help(default_config),
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", default=default_config, help="YAML file, or the name of a shipped one (default: %(default)s)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show a memory forecast and the resolved configuration, then stop"
    )
    add_common_options(parser)
    arguments, overrides = parser.parse_known_args(argv)
    if message := unknown_option(overrides):
        parser.error(message)
    return arguments, overrides


def _help(default_config: str) -> str:
    kind = Path(default_config).parent.name
    names = [
        name
        for name in shipped_configs()
        if (Path(name).parent.name == "evals") == (kind == "evals") and "recipes" not in name
    ]
    prefix = "ppo" if "ppo" in default_config else ""
    shown = [name for name in names if ("ppo" in name or "vapo" in name) == bool(prefix)]
    return (
        "Everything else is an override in Hydra's words: section.key=value changes a key, +section.key=value\n"
        "adds one, ~section.key deletes one.\n\n"
        f"examples:\n  %(prog)s --config {shown[0]}\n  %(prog)s --config {shown[-1]} --dry-run\n"
        f"  %(prog)s --config my.yaml {'generation' if kind == 'evals' else 'policy.generation'}.temperature=0.7\n\n"
        "shipped configurations:\n  " + "\n  ".join(shown)
    )


def run(
    load: Callable[[str, Sequence[str]], C],
    start: Callable[[C], object],
    argv: Sequence[str] | None,
    default_config: str,
    description: str,
) -> int:
    """Loads and checks, then starts. The exit status: 0 after a run; 2 for a command line or configuration with mistakes (all of
    them on stderr); 1 after any other error, told in one sentence on stderr with the file of its traceback; 130 or 143 where
    Ctrl-C or SIGTERM ended it at once."""
    with plain_warnings():
        arguments, overrides = parse_arguments(argv, default_config, description)
        config_file: list[C] = []  # filled by _run, so that an error can speak in the keys of its kind
        try:
            status = guarded(
                partial(_run, load, start, arguments, overrides, config_file),
                arguments.debug,
                lambda text: own_keys(text, *config_file),
            )
        except BrokenPipeError:
            if not arguments.dry_run:
                say("ended: nobody reads what the run prints, its output is a closed pipe")
            raise
    return own_the_process(argv, status)


def _run(
    load: Callable[[str, Sequence[str]], C],
    start: Callable[[C], object],
    arguments: argparse.Namespace,
    overrides: list[str],
    seen: list[C],
) -> int:
    try:
        file = find_config(arguments.config)
        search_for_modules(Path.cwd(), file.resolve().parent)
        config = load(arguments.config, overrides)
    except ConfigError as error:
        print_mistakes(error)
        return 2
    seen.append(config)
    if arguments.dry_run:
        if hasattr(config, "policy"):  # an evaluation holds no more than the model and its cache
            print(forecast_text(config), end="\n\n")
        print(dump_yaml(written(config)))
        if (ineffective := keys_without_effect_text(config)) is not None:
            print(ineffective)
        return 2 if print_findings(preflight(config)) else 0
    with stages_shown():
        return _begin(config, start)


def _begin(config: C, start: Callable[[C], object]) -> int:
    for line in banner_lines(config):
        print(line, flush=True)
    stage("checking data, model and folders")
    if print_findings(preflight(config)):
        return 2
    find_tokenizer(config)
    raise_if_interrupted()
    stage("loading torch")
    start(config)
    return 0


def own_keys(text: str, config: WholeConfig | None = None) -> str:
    """A sentence that names keys of a training run, in those of an evaluation where `config` is one."""
    if isinstance(config, EvalMasterConfig):
        for theirs, own in _EVAL_KEYS:
            text = text.replace(theirs, own)
    return text


def find_tokenizer(config: WholeConfig) -> None:
    """Fetches the tokenizer's files, if none are here (the run looks for newer ones); SourceError says why not."""
    name = (config.policy if hasattr(config, "policy") else config).tokenizer.name
    if name != TINY_RANDOM:
        resolve_tokenizer(name, ask_hub=False)


def print_findings(findings: Sequence[Finding]) -> int:
    """Prints what `checks` found to stderr; returns the number of errors."""
    for finding in findings:
        print(f"{finding.level}: {finding}", file=sys.stderr)
    return sum(finding.level == "error" for finding in findings)


def print_mistakes(error: ConfigError) -> None:
    count = len(error.problems)
    print(f"The configuration has {count} mistake{'s' if count != 1 else ''}:", file=sys.stderr)
    for problem in error.problems:
        print(f"  {problem}", file=sys.stderr)
