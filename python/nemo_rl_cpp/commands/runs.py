"""The commands that read a configuration: `train`, `eval`, `check` and `configs`."""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from nemo_rl_cpp.checks import banner_lines, has_time_forecast, preflight
from nemo_rl_cpp.command_line import command_parser, unknown_option
from nemo_rl_cpp.config.access import written
from nemo_rl_cpp.config.errors import KINDS, ConfigError
from nemo_rl_cpp.config.fold import exactness_text, keys_without_effect_text
from nemo_rl_cpp.config.loader import LOADERS, find_config, kind_of, shipped_configs
from nemo_rl_cpp.config.master import EvalMasterConfig, TrainMasterConfig, WholeConfig
from nemo_rl_cpp.config.policy import MEMORY_BUDGET
from nemo_rl_cpp.distributed.launch import serving
from nemo_rl_cpp.distributed.worker_calls import WorkerLostError
from nemo_rl_cpp.dotted_names import search_for_modules
from nemo_rl_cpp.files.yaml_text import dump_yaml
from nemo_rl_cpp.hub.sources import TINY_RANDOM, TOKENIZER_FILES, resolve_model
from nemo_rl_cpp.interrupts import nobody_reads, say
from nemo_rl_cpp.models.budget import budget_text, within_budget
from nemo_rl_cpp.models.memory import forecast_text
from nemo_rl_cpp.stages import stage, stages_shown

_CHECK_EXAMPLES = """examples:
  nemo-rl-cpp check --config my.yaml
  nemo-rl-cpp check --config grpo_tiny.yaml grpo.num_generations_per_prompt=16

If the native core trains in one process on the CPU, check also measures it for about a second, and prints how long a
step and the run take if every response has the maximum length. Validation, checkpoints and the time that environments
take are not counted. A machine that is busy with other programs measures longer times. A run that takes more than some
minutes prints the same before it loads the model."""
_CONFIGS_EXAMPLES = """examples:
  nemo-rl-cpp configs
  nemo-rl-cpp configs ppo"""


def train(arguments: Sequence[str], kind: str | None = None) -> int:
    """Load and check a configuration, train, and return the exit status. `kind` is the kind of run, such as "ppo"; if
    it is None, the sections of the file determine it."""
    return _run(arguments, kind or "grpo", kind, train_to_the_end)


def train_to_the_end(config: TrainMasterConfig) -> None:
    """Build the run and train it. If a worker is lost (killed, stopped, or its machine is gone), resume from the newest
    checkpoint with new workers, at most `cluster.max_restarts` times, unless the user has asked the run to end."""
    from nemo_rl_cpp.algorithms.build import build_run  # loads torch, so only after the configuration was checked

    run = None
    for restarts in count(1):
        try:
            with build_run(config) as run:
                return run.train()
        except WorkerLostError as error:
            asked_to_end = run is not None and run.stop.reason is not None
            if restarts > config.cluster.max_restarts or asked_to_end:
                raise
            resumed = config.checkpointing.model_copy(update={"resume": "auto"})
            config = config.model_copy(update={"checkpointing": resumed})
            number = f"restart {restarts} of {config.cluster.max_restarts}"
            text = f"warning: {error}; {number}, from the newest checkpoint if there is one"
            print(text, file=sys.stderr, flush=True)


def evaluate(arguments: Sequence[str]) -> int:
    """Load and check the configuration of an evaluation, then evaluate."""

    def work(config: EvalMasterConfig) -> None:
        from nemo_rl_cpp.evals.eval import main  # loads torch, so only after the configuration was checked

        main(config)

    return _run(arguments, "eval", "eval", work)


def check(arguments: Sequence[str]) -> int:
    """Print every error in a configuration, or that there is none. Return the exit status."""
    what = "Check a configuration, its data and the code that it names, without loading a model."
    parser = command_parser("check", what, _CHECK_EXAMPLES)
    parser.add_argument("--config", help="YAML file, or the name of a shipped one")
    parser.add_argument("--kind", choices=tuple(KINDS), help="kind of run (default: by the file's sections)")
    known, overrides = parser.parse_known_args(arguments)
    missing = None if known.config else "--config is missing: give a YAML file, or the name of a shipped one"
    if message := unknown_option(overrides, parser.options) or missing:
        parser.error(message)
    config = _loaded(known.config, overrides, known.kind, is_check=True)
    if config is None or _print_findings(config):
        return 2
    training = isinstance(config, TrainMasterConfig)
    print(f"{known.config}: no mistakes ({config.algorithm if training else 'eval'})")
    if (text := exactness_text(config)) is not None:
        print(text)
    if training and (text := budget_text(config)) is not None:
        print(f"{MEMORY_BUDGET} {text}")
    _, generation = config.sampling
    if generation.runs_vllm and generation.vllm_cfg.server_url is not None:
        from nemo_rl_cpp.models.generation.vllm.server import server_command

        print(f"the server is started like this:\n  {server_command(config.policy, config.cluster.device)}")
    if (text := _time_text(config)) is not None:
        print(text)
    return 0


def configs(arguments: Sequence[str]) -> int:
    """Run the command `configs`: print name and description of each shipped configuration, one per line, or only of
    those that contain the word in `arguments`. Return the exit status."""
    parser = command_parser("configs", "List the shipped configurations.", _CONFIGS_EXAMPLES)
    parser.add_argument("word", nargs="?", default="", help="only those with this word in their name or description")
    word = parser.parse_args(arguments).word.lower()
    lines = {name: text for name, text in descriptions().items() if word in f"{name} {text}".lower()}
    if not lines:
        print(f"no shipped configuration has {word!r} in its name or description; nemo-rl-cpp configs lists all")
        return 1
    width = max(map(len, lines)) + 2
    for name, text in lines.items():
        print(f"{name:<{width}}{text}".rstrip())
    return 0


def descriptions() -> dict[str, str]:
    """Return {name of a shipped configuration: first sentence of the comment at the top of its file}."""
    texts = {}
    for name, file in shipped_configs().items():
        text = file.read_text(encoding="utf-8")
        comment = re.match(r"(?:#.*\n)*", text)[0].splitlines()
        whole = " ".join(line.lstrip("# ").strip() for line in comment).strip()
        texts[name] = re.split(r"(?<=[a-z0-9)]\.)\s", whole, maxsplit=1)[0].rstrip(".:")
    return texts


# ---- from command-line arguments to a checked configuration


def _run(words: Sequence[str], default: str, kind: str | None, work: Callable[[WholeConfig], None]) -> int:
    """Load the configuration that the arguments `words` give, call `work` with it, and return the exit status.
    `default` is the kind of run for help and default configuration; if `kind` is None, the sections of the file
    determine the kind."""
    parser = command_parser(None, KINDS[default].description, _help(default))
    names = "YAML file, or the name of a shipped one (default: %(default)s)"
    parser.add_argument("--config", default=f"configs/{KINDS[default].default_config}", help=names)
    shown = "show a memory forecast and the resolved configuration, then stop"
    parser.add_argument("--dry-run", action="store_true", help=shown)
    known, overrides = parser.parse_known_args(words)  # all other words are overrides
    if message := unknown_option(overrides, parser.options):
        parser.error(message)
    config = _loaded(known.config, overrides, kind)
    if config is None:
        return 2
    if known.dry_run:
        return _dry_run(config)
    with _started():
        if not _is_ready(config):
            return 2
        work(config)
    return 0


def _help(kind: str) -> str:
    is_eval = kind == "eval"
    files = {name: file for name, file in shipped_configs().items() if "recipes" not in name}
    names = [name for name in files if (Path(name).parent.name == "evals") == is_eval]
    shown = [name for name in names if is_eval or kind_of(files[name]) == kind]
    return (
        "Everything else is an override in Hydra's words: section.key=value changes a key, +section.key=value\n"
        "adds one, ~section.key deletes one.\n\n"
        f"examples:\n  %(prog)s --config {shown[0]}\n  %(prog)s --config {shown[-1]} --dry-run\n"
        f"  %(prog)s --config my.yaml {'generation' if is_eval else 'policy.generation'}.temperature=0.7\n\n"
        "shipped configurations:\n  " + "\n  ".join(shown)
    )


def _loaded(file: str, overrides: Sequence[str], kind: str | None, is_check: bool = False) -> WholeConfig | None:
    """Load the configuration `file` as one of the kind `kind`, or if that is None, of the kind that its sections show.
    Print its errors and return None if there are any. Unless `is_check`: a process that a launcher started with a rank
    above 0 becomes a worker and never returns; and the configuration of an evaluation is an error if `kind` is None."""
    try:
        search_for_modules(Path.cwd(), find_config(file).resolve().parent)
        found = kind or kind_of(file)
        kind = "grpo" if kind is None and found == "eval" and not is_check else found
        load = LOADERS[kind] if is_check or kind == "eval" else serving(LOADERS[kind])
        return within_budget(load(file, overrides))
    except ConfigError as error:
        many = len(error.problems) != 1
        print(f"The configuration has {len(error.problems)} mistake{'s' if many else ''}:", file=sys.stderr)
        for problem in error.problems:
            print(f"  {problem}", file=sys.stderr)
        return None


def _dry_run(config: WholeConfig) -> int:
    if isinstance(config, TrainMasterConfig):  # an evaluation holds only the model and its cache
        print(forecast_text(config), end="\n\n")
    print(dump_yaml(written(config)))
    if (ineffective := keys_without_effect_text(config)) is not None:
        print(ineffective)
    return 2 if _print_findings(config) else 0


@contextmanager
def _started() -> Iterator[None]:
    """A context manager that shows what a run does before its first step, such as loading the model. If stdout is a
    closed pipe, print the reason of the end on stderr."""
    try:
        with stages_shown():
            yield
    except BrokenPipeError:
        if nobody_reads():
            say("ended: nobody reads what the run prints, its output is a closed pipe")
        raise


def _is_ready(config: WholeConfig) -> bool:
    """Print the banner, run the checks, download missing tokenizer files, and return whether the run can start."""
    for line in banner_lines(config):
        print(line, flush=True)
    stage("checking data, model and folders")
    if _print_findings(config):
        return False
    part, section = (config.policy, "policy") if isinstance(config, TrainMasterConfig) else (config, "generation")
    if part.tokenizer.name != TINY_RANDOM:  # the run looks for newer files
        resolve_model(part.tokenizer.name, key=f"{section}.model_name", files=TOKENIZER_FILES, ask_hub=False)
    stage("loading torch")
    return True


def _time_text(config: WholeConfig) -> str | None:
    """Return a sentence on how long a step and the run take, measured in about a second; None if it is not known."""
    if not has_time_forecast(config):
        return None
    try:
        from nemo_rl_cpp.algorithms.step_time import configured_steps, time_text  # loads torch
    except ImportError:
        return None
    return time_text(config, configured_steps(config))


def _print_findings(config: WholeConfig) -> int:
    """Print the problems that `checks` finds to stderr, and return the number of errors."""
    findings = preflight(config)
    for finding in findings:
        print(f"{finding.level}: {finding}", file=sys.stderr)
    return sum(finding.level == "error" for finding in findings)
