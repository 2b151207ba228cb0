"""Inspection of prompts and ground truths before a run: prompts that will be truncated or leave no room for a response,
and ground truths that no response can match.

It needs no torch, so both `nemo-rl-cpp check` and the run call it.
"""

import logging
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING

from nemo_rl_cpp.data.conversation import row_at
from nemo_rl_cpp.data.interfaces import Indexed, Row, TokenizerType
from nemo_rl_cpp.data.processors import PROMPT_MAKERS, Prompt, multichoice_qa_processor
from nemo_rl_cpp.environments.code_verifier import parse_tests
from nemo_rl_cpp.environments.verifiers import normalize_response
from nemo_rl_cpp.errors import Finding

if TYPE_CHECKING:
    from nemo_rl_cpp.data.datasets import RawDataset

_MOST_ROWS = 1000
_MOST_CHARACTERS = 2_000_000


@dataclass(frozen=True)
class Limits:
    """The limits on a prompt's number of tokens. A prompt must stay below `cut` (data.max_input_seq_length), at which
    it is truncated, and below `context`, the maximum sequence length. None means no limit.
    """

    cut: int | None = None
    context: int | None = None
    context_key: str = "policy.max_total_sequence_length"


def inspect_rows(
    raw: "RawDataset", rows: Indexed[Row], tokenizer: TokenizerType, limits: Limits, where: str,
    environment: tuple[str | None, Mapping[str, object] | None] = (None, None),
) -> Iterator[Finding]:  # fmt: skip
    """Yield the problems of one data set: prompts that reach a limit, and ground truths that do not fit the
    environment.

    `raw` has processor, task_spec and possibly preprocessor. `environment` is the environment's name and its section.
    At most 1,000 evenly spaced rows are inspected. Rows of custom processors are skipped, because these may have side
    effects.
    """
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
    """Yield the problems of prompts that reach a limit. Prompts are given as (number of tokens, row number)."""
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
_EXPECTED = {
    "math": "a number or an expression",
    "math_default": "a number or an expression",
    "math_multi_reward": "a text",
    "arithmetic": "a number",
    "reverse_digits": "a text that is not empty",
    "code": "tests: inputs and outputs, or asserts",
}
"""The environments of this package that compare responses with a row's ground truth -> the ground truth they need."""


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
    """Return None if the environment `name` can compare responses with the ground truth, "as text" if only the same
    text matches, "never" if no response matches, and "wrong" for a value that it rejects or does not compare.
    """
    try:
        if name == "code":
            parse_tests(truth)
            return None
        if truth is not None and (isinstance(truth, bool) or not isinstance(truth, (str, int, float))):
            return "wrong"
        text = "" if truth is None else str(truth)
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
    if not dapo and "\\boxed" not in text and len(_WORD.findall(text)) >= 3:
        return "as text"
    if dapo or (
        "\\boxed" not in text and _CERTAIN.fullmatch(text) and text.count("{") == text.count("}") and "\n" not in text
    ):
        return None
    return _read_by_math_verify(text)


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


# -- warnings are printed once ----------------------------------------------------------------------------------------

_SAID: set[str] = set()


def note_as_said(finding: Finding) -> Finding:
    """Record that a finding was already reported to the user, so that the run does not report it again. Return the
    finding.
    """
    _SAID.add(str(finding))
    return finding


def say(findings: Iterable[Finding]) -> None:
    """Report the findings of an inspection: print each warning to stderr, once per process, and raise ValueError for
    the first error."""
    for finding in findings:
        if finding.level == "error":
            raise ValueError(str(finding))
        if str(finding) not in _SAID:
            print(f"warning: {note_as_said(finding)}", file=sys.stderr, flush=True)
