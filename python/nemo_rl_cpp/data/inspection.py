"""A look at prompts and truths before a run: how many are cut, have no room to be answered, or can never be matched.

Needs no torch, so that `nemo-rl-cpp check` can ask it as well as the run itself.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from nemo_rl_cpp.data.interfaces import Indexed, Row, TokenizerType
from nemo_rl_cpp.data.processors import PROMPT_MAKERS, Prompt, multichoice_qa_processor

if TYPE_CHECKING:
    from nemo_rl_cpp.data.datasets import RawDataset

_MOST_ROWS = 1000
_MOST_CHARACTERS = 2_000_000
_MATH_ENVIRONMENTS = ("math", "math_default")


class Remark(NamedTuple):
    """What was found: an "error" stops the run, a "warning" is said. `key` is the one to change."""

    level: Literal["error", "warning"]
    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.key} {self.message}" if self.key else self.message


@dataclass(frozen=True)
class Limits:
    """Lengths that a prompt must stay below: `cut` (max_input_seq_length) and `context`, each with its key; None: no limit."""

    cut: int | None = None
    cut_key: str = "data.max_input_seq_length"
    context: int | None = None
    context_key: str = "policy.max_total_sequence_length"


@dataclass
class _Lengths:
    """Prompts that reach a limit."""

    seen: int = 0
    over: dict[str, int] = field(default_factory=dict)
    longest: tuple[int, int] = (0, 0)  # tokens, row

    def add(self, length: int, row: int, limits: Limits) -> None:
        self.seen += 1
        self.longest = max(self.longest, (length, -row))
        for key, limit in ((limits.cut_key, limits.cut), (limits.context_key, limits.context)):
            if limit is not None and length >= limit:
                self.over[key] = self.over.get(key, 0) + 1


def inspect_rows(
    raw: RawDataset, rows: Indexed[Row], tokenizer: TokenizerType, limits: Limits, where: str,
    environment: tuple[str | None, Mapping[str, object] | None] = (None, None),
) -> Iterator[Remark]:  # fmt: skip
    """Remarks about the rows of one data set: its prompts against the limits, its truths against the environment.

    `raw` holds processor, task_spec and perhaps preprocessor; `environment` is (name, its section of the configuration). Of
    many rows 1,000 are looked at, evenly spread. Rows of processors that are not of this package are not looked at, since
    nobody knows what they do besides.
    """
    make = PROMPT_MAKERS.get(raw.processor)
    if make is None or not len(rows):
        return
    prompts: list[tuple[int, Prompt]] = []
    lengths, characters = _Lengths(), 0
    step = -(-len(rows) // _MOST_ROWS)
    for number in range(0, len(rows), step):
        row = rows[number]
        if row.get("task_name") not in (None, raw.task_name):
            yield Remark(
                "error", where, f"row {number + 1}: its task_name {row['task_name']!r} has no processor: this data set's is {raw.task_name!r}; "
                "take the column task_name out of the data"
            )  # fmt: skip
            return
        preprocess = getattr(raw, "preprocessor", None)
        try:
            prompt = make(row if preprocess is None else preprocess(row), raw.task_spec, tokenizer)
        except ValueError as error:
            yield Remark("error", where, f"row {number + 1}: {error}")
            return
        prompts.append((number + 1, prompt))
        lengths.add(prompt.length, number + 1, limits)
        characters += sum(len(entry.content) for entry in prompt.entries)
        if characters > _MOST_CHARACTERS:
            break
    if raw.processor is multichoice_qa_processor and not raw.task_spec.prompt and rows[0].get("options"):
        yield Remark(
            "warning", where, "has options, but no prompt_file, so prompts show the questions alone: set prompt_file (prompts/multichoice.txt)",
        )  # fmt: skip
    if unread := getattr(raw, "unread_columns", ()):
        yield Remark(
            "warning", where, f"has the columns {', '.join(unread)}, which are not part of the prompts: join them into the question's column "
            "if the model is to see them",
        )  # fmt: skip
    yield from _about_lengths(lengths, limits, where, len(rows))
    name, section = environment
    if name in _MATH_ENVIRONMENTS:
        truths = [(number, prompt.extra_env_info.get("ground_truth")) for number, prompt in prompts]
        yield from _about_truths(truths, section or {}, name, where)


def _about_lengths(lengths: _Lengths, limits: Limits, where: str, rows: int) -> Iterator[Remark]:
    longest, row = lengths.longest[0], -lengths.longest[1]
    looked_at = "" if lengths.seen == rows else f" looked at (of {rows:,})"
    for key, limit, effect in (
        (limits.context_key, limits.context, "they leave no room for a response"),
        (limits.cut_key, limits.cut, "they are cut to a few tokens, so the model never sees their question, and get no gradient"),
    ):  # fmt: skip
        count = lengths.over.get(key, 0)
        if not count or (key == limits.cut_key and limits.cut == limits.context):
            continue
        yield Remark(
            "error" if count == lengths.seen else "warning",
            where,
            f"{count:,} of {lengths.seen:,} prompts{looked_at} reach {limit} tokens ({key}): {effect}; the longest is row {row} with "
            f"{longest:,} tokens; raise {key}, or take shorter prompts",
        )


# -- truths -----------------------------------------------------------------------------------------------------------

_CERTAIN = re.compile(
    r"[-+\w\s.,/^*()\\{}=$%<>|!:;'\[\]]*[\w)}%]", re.ASCII
)  # math-verify reads something out of these
_WORD = re.compile(
    r"(?<![\\A-Za-z])(?!(?:and|or)\b)[A-Za-z]{2,}"
)  # of three it makes a product of letters, which only the same text equals


def _about_truths(
    truths: list[tuple[int, object]], section: Mapping[str, object], name: str, where: str
) -> Iterator[Remark]:
    kind = section.get("verifier_type") or "math"
    judge = _of_math if kind == "math" else _of_choice
    dapo = section.get("math_verify_impl") == "dapo_math_verify"
    verdicts = [(number, truth, judge(truth, dapo)) for number, truth in truths]
    bad = [(number, truth) for number, truth, verdict in verdicts if verdict is not None]
    if not bad:
        return
    number, truth = bad[0]
    hopeless = all(verdict == "never" for _, _, verdict in verdicts)
    shown = "null" if truth is None else repr(truth if len(str(truth)) <= 60 else "..." + str(truth)[-57:])
    expected = "the letter of an option" if kind != "math" else "a number or an expression"
    advice = "give " + expected
    if "####" in str(truth):
        advice = "give what follows ####, the number alone (dataset_name: GSM8K takes it so)"
    yield Remark(
        "error" if hopeless else "warning",
        where,
        f"{len(bad):,} of {len(truths):,} truths cannot be parsed (env.{name}): the first is row {number}, {shown}; "
        f"right answers to them score 0: {advice}",
    )


def _of_choice(truth: object, _: bool) -> str | None:
    from nemo_rl_cpp.environments.verifiers import normalize_response

    return None if truth is not None and len(normalize_response(str(truth))) == 1 else "never"


def _of_math(truth: object, dapo: bool) -> str | None:
    """None for a truth that can be read, "never" where no response can match, "as text" where only the same text does."""
    text = "" if truth is None else str(truth)
    if not text.strip() or "####" in text:
        return "never"
    if not dapo and "\\boxed" not in text and len(_WORD.findall(text)) >= 3:
        return "as text"
    if dapo or (
        "\\boxed" not in text and _CERTAIN.fullmatch(text) and text.count("{") == text.count("}") and "\n" not in text
    ):
        return None
    return _read_by_math_verify(text)


def _read_by_math_verify(text: str) -> str | None:
    import logging

    try:
        from math_verify import parse
        from math_verify.parser import LatexExtractionConfig
    except ImportError:  # the environment itself says that it is missing
        return None
    logger = logging.getLogger("math_verify")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        # Its own time limit needs the main thread; a truth is short.
        found = parse("\\boxed{" + text[:2000] + "}", (LatexExtractionConfig(),), parsing_timeout=None)
    except Exception:  # noqa: BLE001 - whatever it raises, it reads nothing
        found = []
    finally:
        logger.setLevel(level)
    if not found:
        return "never"
    return "as text" if all(isinstance(item, str) for item in found) else None


# -- saying it once ---------------------------------------------------------------------------------------------------

_SAID: set[str] = set()


def note_as_said(remark: Remark) -> Remark:
    """Remembers a remark that goes to the user by another way, so that the run does not repeat it."""
    _SAID.add(str(remark))
    return remark


def say(remarks: Iterator[Remark]) -> None:
    """Prints warnings to stderr, each once in a process; ValueError for the first error."""
    for remark in remarks:
        if remark.level == "error":
            raise ValueError(str(remark))
        if str(remark) not in _SAID:
            _SAID.add(str(remark))
            print(f"warning: {remark}", file=sys.stderr, flush=True)
