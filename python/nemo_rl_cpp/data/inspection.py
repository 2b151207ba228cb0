"""A look at prompts and truths before a run: how many are cut, have no room to be answered, or can never be matched.

Needs no torch, so that `nemo-rl-cpp check` can ask it as well as the run itself.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Literal, NamedTuple

from nemo_rl_cpp.data.conversation import row_at
from nemo_rl_cpp.data.interfaces import Indexed, Row, TokenizerType
from nemo_rl_cpp.data.processors import PROMPT_MAKERS, Prompt, multichoice_qa_processor

if TYPE_CHECKING:
    from nemo_rl_cpp.data.datasets import RawDataset

_MOST_ROWS = 1000
_MOST_CHARACTERS = 2_000_000


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
        row = row_at(rows, number)
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
    if name in _COMPARING:
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


_COMPARING = ("math", "math_default", "math_multi_reward", "arithmetic", "reverse_digits", "code")
"""Environments of this package that compare responses with a row's truth."""
_Judge = Callable[[object], str | None]  # see `_judge`


def _about_truths(
    truths: list[tuple[int, object]], section: Mapping[str, object], name: str, where: str
) -> Iterator[Remark]:
    expected, judge = _judge(name, section)
    verdicts = [(number, truth, judge(truth)) for number, truth in truths]
    bad = [(number, truth, verdict) for number, truth, verdict in verdicts if verdict is not None]
    if not bad:
        return
    number, truth, _ = next((each for each in bad if each[2] == "wrong"), bad[0])
    hopeless = all(verdict == "never" for _, _, verdict in verdicts)
    shown = "null" if truth is None else repr(truth if len(str(truth)) <= 60 else "..." + str(truth)[-57:])
    advice = "give " + expected
    if "####" in str(truth):
        advice = "give what follows ####, the number alone (dataset_name: GSM8K takes it so)"
    yield Remark(
        "error" if hopeless or any(verdict == "wrong" for _, _, verdict in bad) else "warning",
        where,
        f"{len(bad):,} of {len(truths):,} truths cannot be parsed (env.{name}): the first is row {number}, {shown}; "
        f"right answers to them score 0: {advice}",
    )


def _judge(name: str, section: Mapping[str, object]) -> tuple[str, _Judge]:
    """(what the truths of an environment must be, what it says of one).

    It says None where the truth can be compared, "as text" where only the same text matches, "never" where no response does, and
    "wrong" for a value that the environment refuses or does not compare.
    """
    if name == "code":
        return "tests: inputs and outputs, or asserts", _of_code
    if name == "arithmetic":
        return "a number", _of_text(_of_number)
    if name == "reverse_digits":
        return "a text that is not empty", _of_text(lambda text: None if text else "wrong")
    if name == "math_multi_reward":
        return "a text", _of_text(lambda text: None if text else "never")
    if (section.get("verifier_type") or "math") != "math":
        return "the letter of an option", _of_text(_of_choice)
    dapo = section.get("math_verify_impl") == "dapo_math_verify"
    return "a number or an expression", _of_text(lambda text: _of_math(text, dapo))


def _of_text(judge: Callable[[str], str | None]) -> _Judge:
    def of_any(truth: object) -> str | None:
        if truth is not None and (isinstance(truth, bool) or not isinstance(truth, (str, int, float))):
            return "wrong"
        return judge("" if truth is None else str(truth))

    return of_any


def _of_code(truth: object) -> str | None:
    from nemo_rl_cpp.environments.code_verifier import parse_tests

    try:
        parse_tests(truth)
    except (ValueError, TypeError):
        return "wrong"
    return None


def _of_number(text: str) -> str | None:
    try:
        Decimal(text.strip().replace(",", ""))
    except InvalidOperation:
        return "wrong"
    return None


def _of_choice(text: str) -> str | None:
    from nemo_rl_cpp.environments.verifiers import normalize_response

    return None if len(normalize_response(text)) == 1 else "never"


def _of_math(text: str, dapo: bool) -> str | None:
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
