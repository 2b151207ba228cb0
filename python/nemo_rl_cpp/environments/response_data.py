"""A run's data sets and the environments that score them. The inspection of rows does not import torch."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from nemo_rl_cpp.config.data import DataConfig, plain_sections
from nemo_rl_cpp.data.conversation import row_at, text_of
from nemo_rl_cpp.data.datasets import AllTaskProcessedDataset, RawDataset, load_response_dataset, merge_datasets
from nemo_rl_cpp.data.interfaces import Indexed, Row, TaskDataSpec, TokenizerType
from nemo_rl_cpp.data.interfaces import TaskDataPreProcessFnCallable as Preprocessor
from nemo_rl_cpp.data.interfaces import TaskDataProcessFnCallable as Processor
from nemo_rl_cpp.data.processors import PROMPT_MAKERS, Prompt, multichoice_qa_processor
from nemo_rl_cpp.environments.code_verifier import parse_tests
from nemo_rl_cpp.environments.interfaces import Environment
from nemo_rl_cpp.environments.loading import Environments, create_env
from nemo_rl_cpp.environments.remote import ActorSettings, shut_down
from nemo_rl_cpp.environments.verifiers import normalize_response
from nemo_rl_cpp.errors import Finding, say_once

_MOST_ROWS = 1000
_MOST_CHARACTERS = 2_000_000


@dataclass(frozen=True)
class Limits:
    """The limits on a prompt's number of tokens; None: no limit. A prompt of `cut` (data.max_input_seq_length) or more
    tokens is truncated. A prompt of `context` or more, set by the key `context_key`, leaves no room for a response."""

    cut: int | None = None
    context: int | None = None
    context_key: str = "policy.max_total_sequence_length"


def inspect_rows(
    raw: RawDataset, rows: Indexed[Row], tokenizer: TokenizerType, limits: Limits, where: str,
    environment: tuple[str | None, Mapping[str, object] | None] = (None, None),
) -> Iterator[Finding]:  # fmt: skip
    """Yield the problems of a data set, such as prompts that reach one of the `limits`, and ground truths that do not
    fit the `environment`, (name, section of the configuration). `where` names the data set. At most 1,000 evenly spaced
    rows are inspected, and no rows if the data set has a custom processor, which may have side effects."""
    make = PROMPT_MAKERS.get(raw.processor)
    if make is None or not len(rows):
        return
    prompts: list[tuple[int, Prompt]] = []
    characters = 0
    preprocess = getattr(raw, "preprocessor", None)
    for index in range(0, len(rows), -(-len(rows) // _MOST_ROWS)):
        row = row_at(rows, index)
        if row.get("task_name") not in (None, raw.task_name):
            yield Finding(
                "error", where, f"row {index + 1}: its task_name {row['task_name']!r} has no processor: this data set's is {raw.task_name!r}; "
                "take the column task_name out of the data"
            )  # fmt: skip
            return
        try:
            prompt = make(row if preprocess is None else preprocess(row), raw.task_spec, tokenizer)
        except ValueError as error:
            yield Finding("error", where, f"row {index + 1}: {error}")
            return
        prompts.append((index + 1, prompt))
        characters += sum(len(entry.content) for entry in prompt.entries)
        if characters > _MOST_CHARACTERS:
            break
    if raw.processor is multichoice_qa_processor and not raw.task_spec.prompt and rows[0].get("options"):
        text = "has options, but no prompt_file, so prompts show the questions alone: set prompt_file (prompts/multichoice.txt)"
        yield Finding("warning", where, text)
    if unread := getattr(raw, "unread_columns", ()):
        yield Finding(
            "warning", where, f"has the columns {', '.join(unread)}, which are not part of the prompts: join them into the question's column "
            "if the model is to see them",
        )  # fmt: skip
    yield from _about_lengths([(prompt.length, number) for number, prompt in prompts], limits, where, len(rows))
    name, section = environment
    if name in _EXPECTED:
        truths = [(number, prompt.extra_env_info.get("ground_truth")) for number, prompt in prompts]
        yield from _about_truths(truths, section or {}, name, where)


def _about_lengths(lengths: list[tuple[int, int]], limits: Limits, where: str, rows: int) -> Iterator[Finding]:
    """Yield a problem for each of the `limits` that a prompt reaches. `lengths` has (number of tokens, row number)."""
    longest, row = max(lengths, key=lambda each: each[0])
    looked_at = "" if len(lengths) == rows else f" looked at (of {rows:,})"
    cut = None if limits.cut == limits.context else limits.cut
    for key, limit, effect in (
        (limits.context_key, limits.context, "they leave no room for a response"),
        ("data.max_input_seq_length", cut, "they are cut to a few tokens, so the model never sees their question, and get no gradient"),
    ):  # fmt: skip
        count = 0 if limit is None else sum(length >= limit for length, _ in lengths)
        if count:
            yield Finding(
                "error" if count == len(lengths) else "warning", where,
                f"{count:,} of {len(lengths):,} prompts{looked_at} reach {limit} tokens ({key}): {effect}; the longest is row {row} with "
                f"{longest:,} tokens; raise {key}, or take shorter prompts",
            )  # fmt: skip


# -- truths -----------------------------------------------------------------------------------------------------------

# ground truths that math-verify parses as values
_CERTAIN = re.compile(r"[-+\w\s.,/^*()\\{}=$%<>|!:;'\[\]]*[\w)}%]", re.ASCII)
# math-verify parses three or more words as a product of letters, which equals only the same text
_WORD = re.compile(r"(?<![\\A-Za-z])(?!(?:and|or)\b)[A-Za-z]{2,}")
# math-verify parses 1.5e6 as 1.5 times Euler's number times 6
_EXPONENT = re.compile(r"\d[eE][-+]?\d")
_EXPECTED = {
    "math": "a number or an expression",
    "math_default": "a number or an expression",
    "math_multi_reward": "a text",
    "arithmetic": "a number",
    "reverse_digits": "a text that is not empty",
    "code": "tests: inputs and outputs, or asserts",
}
"""Environment of this package that compares responses with a ground truth -> the ground truth that it needs."""


def _about_truths(
    truths: list[tuple[int, object]], section: Mapping[str, object], name: str, where: str
) -> Iterator[Finding]:
    verdicts = [(number, truth, _verdict(truth, name, section)) for number, truth in truths]
    bad = [(number, truth, verdict) for number, truth, verdict in verdicts if verdict is not None]
    if not bad:
        return
    number, truth, _ = next((each for each in bad if each[2] == "wrong"), bad[0])
    hopeless = all(verdict == "never" for _, _, verdict in verdicts)
    shown = "null" if truth is None else repr(truth if len(str(truth)) <= 60 else "..." + str(truth)[-57:])
    multichoice = (section.get("verifier_type") or "math") != "math"
    advice = "give " + ("the letter of an option" if multichoice else _EXPECTED[name])
    if "####" in str(truth):
        advice = "give what follows ####, the number alone (dataset_name: GSM8K takes it so)"
    yield Finding(
        "error" if hopeless or any(verdict == "wrong" for _, _, verdict in bad) else "warning",
        where,
        f"{len(bad):,} of {len(truths):,} truths cannot be parsed (env.{name}): the first is row {number}, {shown}; "
        f"right answers to them score 0: {advice}",
    )


def _verdict(truth: object, name: str, section: Mapping[str, object]) -> str | None:
    """Return whether the environment `name` can compare responses with `truth`: None if it can, "as text" if only the
    same text is correct, "never" if no response is, and "wrong" if the environment rejects `truth` with an error."""
    try:
        if name == "code":
            parse_tests(truth)
            return None
        if truth is not None and (isinstance(truth, bool) or not isinstance(truth, (str, int, float))):
            return "wrong"
        text = "" if truth is None else str(text_of(truth))
        if name == "arithmetic":
            Decimal(text.strip().replace(",", ""))
            return None
    except (ValueError, TypeError, InvalidOperation):
        return "wrong"
    if name in ("reverse_digits", "math_multi_reward"):
        return None if text else "wrong" if name == "reverse_digits" else "never"
    if (section.get("verifier_type") or "math") != "math":
        return None if len(normalize_response(text)) == 1 else "never"
    return _of_math(text, section.get("math_verify_impl") == "dapo_math_verify")


def _of_math(text: str, dapo: bool) -> str | None:
    if not text.strip() or "####" in text:
        return "never"
    if not dapo and "\\boxed" not in text and (len(_WORD.findall(text)) >= 3 or _EXPONENT.search(text)):
        return "as text"
    is_plain = "\\boxed" not in text and "\n" not in text and text.count("{") == text.count("}")
    return None if dapo or (is_plain and _CERTAIN.fullmatch(text)) else _read_by_math_verify(text)


def _read_by_math_verify(text: str) -> str | None:
    try:
        from math_verify import LatexExtractionConfig, parse
    except ImportError:  # the environment reports the missing package
        return None
    logger = logging.getLogger("math_verify")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        # the library's time limit needs the main thread; a short text needs no limit
        found = parse("\\boxed{" + text[:2000] + "}", (LatexExtractionConfig(),), parsing_timeout=None)
    except Exception:  # noqa: BLE001 - any exception means that it cannot parse the text
        found = []
    finally:
        logger.setLevel(level)
    if not found:
        return "never"
    return "as text" if all(isinstance(item, str) for item in found) else None


def say(findings: Iterable[Finding]) -> None:
    """Print each warning to stderr, once per process, and raise ValueError for the first error."""
    for finding in findings:
        if finding.level == "error":
            raise ValueError(str(finding))
        say_once("warning", str(finding))


Settings = dict[str, object]  # a section of a configuration as plain data
Datasets = AllTaskProcessedDataset | dict[str, AllTaskProcessedDataset]


class _Tasks:
    """The rows, processors and environments of training or of validation, by task name."""

    def __init__(self) -> None:
        self.datasets: dict[str, list[Indexed[Row]]] = {}
        self.processors: dict[str, tuple[TaskDataSpec, Processor]] = {}
        self.preprocessors: dict[str, Preprocessor] = {}
        self.environments: dict[str, Environment] = {}

    def add(self, raw: RawDataset, rows: Indexed[Row], environment: Environment | None) -> None:
        name = raw.task_name
        spec, processor = self.processors.get(name, (raw.task_spec, raw.processor))
        own = raw.task_spec
        known = (spec.prompt, spec.system_prompt, processor, self.environments.get(name, environment))
        if known != (own.prompt, own.system_prompt, raw.processor, environment):
            raise ValueError(
                f"data: two sections have the task name {name!r} but different prompts, processors or environments: give "
                "their files different names, since a row finds these by its task name"
            )
        self.datasets.setdefault(name, []).append(rows)
        self.processors[name] = (raw.task_spec, raw.processor)
        if getattr(raw, "preprocessor", None) is not None:
            self.preprocessors[name] = raw.preprocessor
        if environment is not None:
            self.environments[name] = environment

    def processed(
        self, rows: list[Indexed[Row]], tokenizer: TokenizerType, longest: int | None
    ) -> AllTaskProcessedDataset:
        merged = merge_datasets(rows)
        return AllTaskProcessedDataset(merged, tokenizer, None, self.processors, self.preprocessors, longest)


@dataclass
class RunData:
    """The data sets and environments of a run."""

    train: Datasets  # one data set, or with `data.use_multiple_dataloader` one per task name
    validation: AllTaskProcessedDataset | None  # held-out rows (split_validation_size) and those of `data.validation`
    environments: Environments  # by task name; empty without `env_configs`


def load_response_data(
    tokenizer: TokenizerType, data_config: DataConfig, env_configs: Settings | None = None,
    max_total_sequence_length: int | None = None, actors: ActorSettings | None = None,
) -> RunData:  # fmt: skip
    """Load the data sets of a run and, if `env_configs` (the section `env`) is given, make its environments, in Ray
    actors if `actors` is given. Warn of prompts that are too long and of ground truths that no response can match;
    raise ValueError if this is so in all rows."""
    sections = plain_sections(data_config)
    max_length = data_config.max_input_seq_length or max_total_sequence_length
    limits = Limits(max_length, max_total_sequence_length)
    environments: dict[str, Environment] = {}
    try:
        # environments start processes, which is safe only before threads exist
        for where, section in sections if env_configs is not None else ():
            if (name := section.get("env_name")) is None:
                raise ValueError(f"{where}.env_name is missing: name the section of env that scores the responses")
            if name not in environments:
                environments[name] = create_env(name, env_configs[name], actors)
        tasks = {"train": _Tasks(), "validation": _Tasks()}
        for where, section in sections:
            raw, env_name, side = load_response_dataset(section), section.get("env_name"), where.split(".")[1]
            scored = (env_name, (env_configs or {}).get(env_name))
            parts = [(side, where, raw.dataset)]
            if side == "train" and raw.val_dataset is not None:
                parts.append(("validation", f"{where} (held out)", raw.val_dataset))
            for part_of, place, rows in parts:
                tasks[part_of].add(raw, rows, environments.get(env_name))
                say(inspect_rows(raw, rows, tokenizer, limits, place, scored))
    except BaseException:
        for environment in environments.values():
            shut_down(environment)
        raise
    train, val = tasks["train"], tasks["validation"]
    train_rows, val_rows = ([rows for each in side.datasets.values() for rows in each] for side in (train, val))
    dataset: Datasets = (
        {name: train.processed(rows, tokenizer, max_length) for name, rows in train.datasets.items()}
        if data_config.use_multiple_dataloader
        else train.processed(train_rows, tokenizer, max_length)
    )
    val_dataset = val.processed(val_rows, tokenizer, max_length) if val_rows else None
    return RunData(dataset, val_dataset, Environments(train.environments, val.environments))
