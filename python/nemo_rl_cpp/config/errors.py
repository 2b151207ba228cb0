"""Configuration mistakes: their places in files and overrides, and their messages."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic_core import ErrorDetails

from nemo_rl_cpp.argument_checks import did_you_mean, having_words, in_a_line, nearest

if TYPE_CHECKING:
    from .base import Section


@dataclass(frozen=True)
class Problem:
    """A mistake in a configuration: its place ("grpo.yaml:12", "override 'a.b=c'", or "" if unknown), its dotted key,
    and a message that says what to change."""

    where: str
    key: str
    message: str

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        name = self.key if self.key.isprintable() else self.key.encode("unicode_escape").decode()
        subject = f"{name} " if self.key else ""
        return f"{place}{subject}{self.message}"


class ConfigError(ValueError):
    """An invalid configuration. `problems` contains every mistake; `str()` lists them, one per line."""

    def __init__(self, problems: list[Problem]):

        def place(problem: Problem) -> tuple[str, int, tuple[str, str]]:
            file, _, line = problem.where.rpartition(":")
            return file, int(line) if line.isdigit() else 0, (problem.key, problem.message)

        self.problems = sorted(set(problems), key=place)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple:
        return type(self), (self.problems,)


class Report:
    """A collector of the mistakes in a configuration. `positions` is {dotted key: file and line, or override} for the
    keys that are set; another key has the place of its section, or else `file`."""

    def __init__(self, positions: dict[str, str], file: str = ""):
        self._positions = positions
        self._file = file
        self.problems: list[Problem] = []

    def where(self, dotted: str) -> str:
        """Return where the key `dotted` or the closest section above it is set, else the first line of the file."""
        while dotted:
            if dotted in self._positions:
                return self._positions[dotted]
            dotted = dotted.rpartition(".")[0]
        return f"{self._file}:1" if self._file else ""

    def nearness(self, dotted: str) -> int:
        """Return the precedence of the place that sets the key `dotted`: 3 for an override or an argument, 2 for the
        run's own file, 1 for a parent file; 0 if the key is not set."""
        if dotted not in self._positions:
            return 0
        file = self._positions[dotted].rpartition(":")[0]
        if not file or self._positions[dotted].startswith("override "):
            return 3
        return 2 if file == self._file else 1

    def has_problem(self, dotted: str) -> bool:
        """Return whether a mistake is reported for the key `dotted`, a section above it, or a key inside it."""
        keys = (f"{p.key}." for p in self.problems if p.key)
        return any(f"{dotted}.".startswith(key) or key.startswith(f"{dotted}.") for key in keys)

    def add(self, dotted: str, message: str, *related: str) -> None:
        """Report a mistake for the key `dotted`, unless one is reported for this key or a `related` one already. The
        message names the first override that sets one of these keys, or else the line of a file that does."""
        keys = (dotted, *related)
        if any(self.has_problem(key) for key in keys):
            return
        overridden = (key for key in keys if self._positions.get(key, "").startswith("override "))
        written = next(overridden, None) or next((key for key in keys if key in self._positions), dotted)
        self.problems.append(Problem(self.where(written), dotted, message))


# ---- unknown keys

_DEAD = {"zero_variance_prompt_filtering": "grpo.use_dynamic_sampling"}
"""Keys in NeMo RL's own recipes that neither NeMo RL nor this package reads -> the key that has the effect."""


_OF_VERL = {"actor_rollout_ref", "algorithm", "critic", "custom_reward_function", "reward_model", "trainer"}


class Kind(NamedTuple):
    """A kind of run. Its fields: the kind in words, the script that runs it, the configuration file that is loaded by
    default, and the script's description in its help text."""

    words: str
    script: str
    default_config: str
    description: str


KINDS = {
    "grpo": Kind("a GRPO run", "run_grpo_math", "grpo_math_1B.yaml", "Train a language model with GRPO, DAPO or ProRLv2."),
    "ppo": Kind("a PPO run", "run_ppo", "ppo_math_1B_megatron.yaml", "Train a language model with PPO."),
    "distillation": Kind(
        "a distillation run", "run_distillation", "distillation_arithmetic_smollm2.yaml",
        "Train a language model on what a teacher says of its answers.",
    ),
    "sft": Kind(
        "supervised fine-tuning", "run_sft", "sft_arithmetic_smollm2.yaml", "Train a language model on the answers of a file."
    ),
    "eval": Kind("an evaluation", "run_eval", "evals/eval.yaml", "Evaluate a language model: pass@k or cons@k."),
}  # fmt: skip
"""The kinds of configuration. The name of a kind is also the section that identifies its files."""


OF_TRL = {
    "beta": "loss_fn.reference_policy_kl_penalty", "bf16": "policy.precision", "delta": "loss_fn.ratio_clip_c",
    "epsilon": "loss_fn.ratio_clip_max", "epsilon_high": "loss_fn.ratio_clip_max", "eval_dataset": "data.validation",
    "eval_steps": "{}.val_period", "generation_batch_size": "{}.num_prompts_per_step",
    "gradient_accumulation_steps": "policy.train_global_batch_size", "hub_model_id": "checkpointing.push_to_hub",
    "gradient_checkpointing": "policy.dtensor_cfg.activation_checkpointing", "loss_type": "loss_fn.name",
    "logging_dir": "logger.log_dir", "lr": "policy.optimizer.kwargs.lr", "lr_scheduler_type": "policy.scheduler",
    "mask_truncated_completions": "{}.overlong_filtering", "max_completion_length": "policy.generation.max_new_tokens",
    "max_prompt_length": "data.max_input_seq_length", "max_steps": "{}.max_num_steps",
    "num_generations_eval": "{}.val_num_generations_per_prompt", "num_train_epochs": "{}.max_num_epochs",
    "optim": "policy.optimizer.name", "output_dir": "checkpointing.checkpoint_dir",
    "peft_config": "policy.dtensor_cfg.lora_cfg", "per_device_train_batch_size": "policy.train_micro_batch_size",
    "processing_class": "policy.tokenizer.name", "report_to": "logger.wandb_enabled",
    "save_only_model": "checkpointing.save_optimizer", "save_steps": "checkpointing.save_period",
    "save_total_limit": "checkpointing.keep_top_k", "scale_rewards": "{}.normalize_rewards",
    "train_dataset": "data.train.data_path", "use_vllm": "policy.generation.vllm_cfg.python", "warmup_ratio": "policy.scheduler", "warmup_steps": "policy.scheduler",
}  # fmt: skip
"""Names of TRL and others, to which another key may be more similar -> the key of the same meaning. {} is the section
of the algorithm."""
_LONG_LIST = 300
"""Characters of a list of keys above which an error message does not contain the list."""


def similar_keys(dotted: str, model: type[Section]) -> tuple[list[str], bool]:
    """Return (known keys of `model` that the unknown key `dotted` may mean, whether it is in the wrong section)."""
    parent, _, name = dotted.rpartition(".")
    prefix, section = f"{parent}." if parent else "", dotted.partition(".")[0]
    known, useful = model.known_keys(), model.useful_keys()
    kind = next((kind for kind in KINDS if kind in model.model_fields), "")
    if (ours := OF_TRL.get(name, "").format(kind)) in known:
        return [ours], not ours.startswith(prefix)
    names = (name, f"{name}_cfg") if name != "enabled" else ()  # every feature has that key
    # in the same section, else in the same part of the file, else nearest to its top
    distance = lambda key: (not key.startswith(prefix), not key.startswith(section), key.count("."), len(key), key)  # noqa: E731
    if (slip := nearest(dotted, known - useful, 0.95)) is not None:
        return [slip], False
    for keys in (useful, known):
        every = keys | {spelling for spelling, canonical in model.aliases() if canonical in keys}
        here = _names_below(prefix, every)
        others = [key for key in every if not dotted.startswith(f"{key}.")]
        same = min((key for key in keys if key.rpartition(".")[2] in names), key=distance, default="")
        elsewhere = [same] if same else having_words(name, others) if "_" in name else []
        close = [] if same.startswith(prefix) and same else having_words(name, here) or nearest(name, here, 0.7)
        if elsewhere and not close:
            return elsewhere, True
        if near := having_words(name, here) or list(filter(None, [nearest(name, here, 0.55)])):
            return [prefix + key for key in near], False
        if far := nearest(dotted, others, 0.8):
            return [far], False
    return [], False


def _names_below(prefix: str, keys: Iterable[str]) -> list[str]:
    inside = (key.removeprefix(prefix) for key in keys if key.startswith(prefix))
    return sorted(key for key in inside if "." not in key)


def unknown_key(dotted: str, model: type[Section]) -> str:
    """Return the error message for the unknown key `dotted`, which suggests a similar known key if there is one."""
    parent, _, name = dotted.rpartition(".")
    if (right := _DEAD.get(name)) is not None:
        return f"is read by nothing, in NeMo RL neither; the key that works is {right}; remove it"
    section = dotted.partition(".")[0]
    if section in _OF_VERL and "cluster" in model.model_fields:
        return "is a section of verl's: docs/coming-from-verl.md names the keys that mean the same"
    if section in KINDS and section not in model.model_fields:
        own = next((f"; did you mean {name}?" for name in KINDS if name in model.model_fields), "")
        return f"is unknown here{own} (configurations with a section {section} are run by examples/{KINDS[section].script}.py)"
    if name == "_override_":
        return "works in a section at the top of the file only, not deeper"
    prefix = f"{parent}." if parent else ""
    near, elsewhere = similar_keys(dotted, model)
    if near:
        shown = (key if elsewhere or "." in key.removeprefix(prefix) else key.removeprefix(prefix) for key in near)
        return f"is unknown{' here' if elsewhere else ''}; did you mean {' or '.join(shown)}?"
    known = model.known_keys()
    here = _names_below(prefix, known | {spelling for spelling, canonical in model.aliases() if canonical in known})
    place = parent or ("the file" if "cluster" in model.model_fields else "the section")
    if not here:
        return "is unknown" if model.takes_own_key(dotted) else f"is unknown; {place} takes no keys"
    listed = ", ".join(here)
    return f"is unknown; {place} knows " + (
        listed if len(listed) <= _LONG_LIST else f"{len(here)} keys, see docs/configuration.md"
    )


# ---- errors of pydantic

_UNION_TAGS = {"one", "many"}  # union tags of data.py, which appear in pydantic's locations


def dotted_key(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location if part not in _UNION_TAGS)


def shown(value: object) -> str:
    """Return a configuration value as YAML text, shortened to one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return in_a_line(value)


def sentence(error: ErrorDetails, dotted: str, model: type[Section], where: str = "") -> str:
    """Return the message for a pydantic error at the key `dotted` of `model`, set at `where` (a line or override)."""
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return unknown_key(dotted, model)
    if kind == "missing":
        return "is missing; set it in the file or on the command line"
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return _choice(context["expected"], value)
    bound = _BOUNDS.get(kind)
    if bound is not None:
        limit = next(iter(context.values()))
        return f"must be {bound} {limit}, not {shown(value)}"
    expected = _EXPECTED.get(kind)
    if expected is None:
        return f"{error['msg'][0].lower()}{error['msg'][1:]} (given: {shown(value)})"
    hint = ""
    if isinstance(value, bool) and expected.startswith("a section"):  # the switch of a feature
        switch = next((key for key in (f"{dotted}.enabled", f"{dotted}_enabled") if key in model.known_keys()), None)
        hint = f"; set {switch}={shown(value)}" if switch else ""
    if kind == "string_type" and isinstance(value, (int, float)):
        name, _, text = where.removeprefix("override '").removesuffix("'").partition("=")
        by_override = where.startswith("override ") and name.lstrip("+") == dotted  # the shell removes its outer quotes
        hint = f" (write \"{name}='{text}'\", with both pairs of quotes)" if by_override else " (write it in quotes)"
    return f"must be {expected}, not {shown(value)}{hint}"


def _choice(expected: str, value: object) -> str:
    allowed = [part.strip("' ") for part in expected.replace(" or ", ", ").split(",")]
    near = did_you_mean(str(value), allowed)
    what = f"one of {', '.join(allowed)}" if len(allowed) > 1 else f"{allowed[0]} (nothing else is supported)"
    return f"must be {what}, not {shown(value)}{near and f'; {near}'}"


_BOUNDS = {
    "greater_than_equal": "at least",
    "greater_than": "greater than",
    "less_than_equal": "at most",
    "less_than": "less than",
}
_EXPECTED = {
    kind: words
    for words, kinds in {
        "an integer": ("int_type", "int_parsing", "int_from_float"),
        "a smaller integer": ("int_parsing_size",),
        "a number": ("float_type", "float_parsing"),
        "a finite number": ("finite_number",),
        "true or false": ("bool_type", "bool_parsing"),
        "a text": ("string_type",),
        "a text that is not empty": ("string_too_short",),
        "a list": ("list_type",),
        "a longer list": ("too_short",),
        "a shorter list": ("too_long",),
        "a section (lines of key: value)": ("dict_type", "model_type", "model_attributes_type"),
    }.items()
    for kind in kinds
}


# ---- errors of the YAML reader


def explained(message: str) -> str:
    """Return the YAML reader's error `message`, which begins with file and line. If that line contains a tab, return a
    message about the tab instead."""
    place = re.match(r"(?P<file>[^\n]*?):(?P<line>\d+): ", message)
    if place is None or not Path(place["file"]).is_file():
        return message
    lines = Path(place["file"]).read_text(encoding="utf-8", errors="replace").splitlines()
    if "\t" not in "".join(lines[int(place["line"]) - 1 : int(place["line"])]):
        return message
    return f"{place[0]}there is a tab in this line, which YAML does not take for spaces: write spaces in its place"
