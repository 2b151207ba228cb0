"""Picks telling prompts of a few steps from the rollout files, each with all its answers."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from nemo_rl_cpp.config.access import as_number
from nemo_rl_cpp.files.durable import json_rows, write_atomic
from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.report.history import read_json

_FILE = re.compile(r"(train|val)_data_step(\d+)\.jsonl")
_MOST_BYTES = 64 << 20  # of a file that is read
TOKENS = "report_tokens.json"
MAX_STEPS = 24
MAX_CHARS = 2000
MAX_ANSWERS = 16
MAX_TOKENS = 256
BUDGET = 60_000
"""Tokens and, at a quarter, characters that a page shows in all; beyond it steps in the middle of the run are left out."""

TokenBytes = Callable[[int], bytes]
Item = TypeVar("Item")
Step = tuple[str, int, int]
"""Kind ("train" or "val"), step, and the time at which the file was written."""


class Answer:
    """A row of a rollout file: one prompt with one answer."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        messages = row["content"]
        roles = [message["role"] for message in messages]
        first = roles.index("assistant") if "assistant" in roles else len(messages)
        texts = [message["content"] for message in messages]
        self.prompt, self.response = "\n\n".join(texts[:first]), "\n\n".join(filter(None, texts[first:]))
        self.row = row
        reward = as_number(row["rewards"])
        self.reward = None if reward is None or math.isnan(reward) else reward
        self.length: int | None = None
        self._span = slice(0, 0)  # from the first token that the policy wrote to its last
        mask = row.get("token_loss_mask") or []
        if mask:
            trained = [place for place, value in enumerate(mask) if value]
            self.length = len(trained)
            self._span = slice(trained[0], trained[-1] + 1) if trained else self._span

    def column(self, name: str) -> list[Any]:
        """Return the values of a column for the answer's tokens; an empty list without the column."""
        return (self.row.get(name) or [])[self._span]

    @cached_property
    def advantage(self) -> float | None:
        """The mean advantage of the trained tokens."""
        pairs = zip(self.column("advantages"), self.column("token_loss_mask"))
        values = [number for value, trained in pairs if trained and (number := as_number(value)) is not None]
        return sum(values) / len(values) if values else None


def read_groups(path: Path) -> list[list[Answer]]:
    """Return the answers of a file by their prompts: rows of one `group_id`, or without one rows in turn with the same
    prompt. A file of more than 64 MiB counts as empty."""
    if path.stat().st_size > _MOST_BYTES:
        return []
    with open(path, encoding="utf-8") as file:
        answers = [Answer(row) for row in json_rows(file)]
    if answers and "group_id" in answers[0].row:
        groups: dict[object, list[Answer]] = {}
        for answer in answers:
            groups.setdefault(answer.row["group_id"], []).append(answer)
        return list(groups.values())
    return [list(group) for _, group in groupby(answers, key=lambda answer: answer.prompt)]


class Picked(NamedTuple):
    """A prompt that was picked, the reasons for it, and its answers."""

    tags: list[str]
    answers: list[Answer]


def pick(groups: Sequence[Sequence[Answer]]) -> list[Picked]:
    """Return at most four prompts, each with tags that say why it was picked."""
    tags: dict[int, list[str]] = {}

    def add(tag: str, scores: dict[int, float]) -> None:
        if scores:
            tags.setdefault(max(scores, key=scores.__getitem__), []).append(tag)

    rewards = {i: [a.reward for a in group if a.reward is not None] for i, group in enumerate(groups)}
    means = {i: math.fsum(known) / len(known) for i, known in rewards.items() if known}
    lengths = {i: max((a.length for a in group if a.length is not None), default=0) for i, group in enumerate(groups)}
    add("highest reward", means)
    add("most different", {i: gap for i in means if (gap := max(rewards[i]) - min(rewards[i])) > 0})
    add("lowest reward", {i: -mean for i, mean in means.items()})
    add("longest answer", {i: length for i, length in lengths.items() if length})
    if not tags and groups:
        tags[0] = ["first"]
    return [Picked(why, [*groups[i]]) for i, why in tags.items()]


class _Page(NamedTuple):
    """A step's prompts as JSON text, and how much of the page's room they take."""

    text: str
    cost: float


class SampleBook:
    """The picked prompts of a log folder; each rollout file is read once.

    `token_bytes` returns the bytes of a token id. The folder keeps those of the tokens that the page shows, so that the page
    can be made again without the tokenizer.
    """

    def __init__(self, log_dir: Path, token_bytes: TokenBytes | None = None) -> None:
        self.log_dir = log_dir
        self._token_bytes = token_bytes
        self._pages: dict[Step, _Page] = {}
        stored = read_json(log_dir / TOKENS)
        self._bytes = {int(number): str(text).encode("latin-1") for number, text in stored.items()}
        self._kept = len(self._bytes)

    def samples(self) -> list[Plain]:
        """Return {"kind", "step", "of", "groups"} of at most `MAX_STEPS` training and as many validation steps.

        The choice of steps depends on their number alone, and changes rarely during a run.
        """
        found: dict[str, list[tuple[int, Path]]] = {"train": [], "val": []}
        for path in self.log_dir.glob("*_data_step*.jsonl"):
            if match := _FILE.fullmatch(path.name):
                found[match[1]].append((int(match[2]), path))
        pages: dict[Step, _Page] = {}
        for kind, files in found.items():
            for step, path in spread(sorted(files)):
                key = (kind, step, path.stat().st_mtime_ns)
                pages[key] = self._pages[key] if key in self._pages else self._read(kind, step, path)
        self._pages = pages
        if self._token_bytes is not None and len(self._bytes) > self._kept:
            self._kept = len(self._bytes)
            table = {str(number): value.decode("latin-1") for number, value in sorted(self._bytes.items())}
            write_atomic(self.log_dir / TOKENS, json.dumps(table), durable=False)
        return [json.loads(pages[key].text) for key in sorted(_within_budget(pages), key=_by_step)]

    def _read(self, kind: str, step: int, path: Path) -> _Page:
        groups = read_groups(path)
        picked = pick(groups)
        page = {"kind": kind, "step": step, "of": len(groups), "groups": [self._group(group) for group in picked]}
        cost = sum(_cost(answer) for group in picked for answer in group.answers[:MAX_ANSWERS])
        return _Page(json.dumps(page, ensure_ascii=False), cost if picked else math.inf)

    def _group(self, group: Picked) -> Plain:
        first = group.answers[0]
        truth = first.row.get("ground_truth")
        return {
            "tags": [*group.tags],
            "prompt": clip(first.prompt),
            "truth": None if truth is None else clip(str(truth)),
            "of": len(group.answers),
            "answers": [self._answer(answer) for answer in _extremes(group.answers)],
        }

    def _answer(self, answer: Answer) -> Plain:
        row = answer.row
        shown: dict[str, Plain] = {
            "i": row.get("idx", 0), "r": _round(answer.reward), "n": answer.length, "a": _round(answer.advantage)
        }  # fmt: skip
        if row.get("truncated"):
            shown["cut"] = True
        parts = {name.removeprefix("reward/"): row[name] for name in row if name.startswith("reward/")}
        if parts:
            shown["parts"] = {name: _round(as_number(value)) for name, value in parts.items()}
        texts = self._texts(answer.column("token_ids"))
        if texts is None:
            return shown | {"text": clip(answer.response)}
        kept = list(range(len(texts)))
        if len(texts) > MAX_TOKENS:
            end = MAX_TOKENS // 4
            kept = [*kept[: MAX_TOKENS - end], *kept[-end:]]
            shown["gap"] = [MAX_TOKENS - end, len(texts) - MAX_TOKENS]
        return shown | {"tokens": [texts[i] for i in kept]} | _columns(answer, kept)

    def _texts(self, tokens: Sequence[int]) -> list[str] | None:
        """Return the text of each token; of a character that several tokens make, the last has it all. None where a token is
        not known."""
        for token in tokens:
            if token not in self._bytes and self._token_bytes is not None:
                self._bytes[token] = self._token_bytes(token)
        if not tokens or any(token not in self._bytes for token in tokens):
            return None
        texts, waiting = [], b""
        for token in tokens:
            waiting += self._bytes[token]
            try:
                texts.append(waiting.decode())
                waiting = b""
            except UnicodeDecodeError as error:
                is_part = error.reason == "unexpected end of data" and len(waiting) - error.start < 4
                texts.append(waiting[: error.start].decode() if is_part else waiting.decode(errors="replace"))
                waiting = waiting[error.start :] if is_part else b""
        return texts


def _columns(answer: Answer, kept: Sequence[int]) -> dict[str, Plain]:
    """Return the numbers of tokens as whole numbers: log-probabilities and advantages by 100, logarithms of ratios by 10,000.
    Tokens of an environment, which are not trained, have None."""
    mask = answer.column("token_loss_mask")

    def numbers(name: str) -> list[float | None]:
        values = answer.column(name)
        return [as_number(values[i]) if mask[i] and i < len(values) else None for i in kept]

    def scaled(values: Sequence[float | None], by: float) -> list[Plain]:
        return [None if value is None or not math.isfinite(value) else round(value * by) for value in values]

    columns: dict[str, Plain] = {}
    logprobs, trainer = numbers("generation_logprobs"), numbers("prev_logprobs")
    ratios = scaled([None if None in pair else pair[0] - pair[1] for pair in zip(trainer, logprobs)], 1e4)
    advantages = scaled(numbers("advantages"), 100)
    if any(value is not None for value in logprobs):
        columns["lp"] = scaled(logprobs, 100)
    if any(ratio is not None for ratio in ratios):
        columns["ratio"] = ratios if any(ratios) else 0
    if len({value for value, i in zip(advantages, kept) if mask[i]}) > 1:
        columns["adv"] = advantages
    if not all(mask[i] for i in kept):
        columns["env"] = [place for place, i in enumerate(kept) if not mask[i]]
    return columns


def _round(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


# ---- what a page has room for


def _by_step(key: Step) -> tuple[int, str]:
    return key[1], key[0]


def _within_budget(pages: Mapping[Step, _Page]) -> list[Step]:
    """Return the steps that the page has room for: the last and the first before those between, halving the gaps."""
    shown, spent = [], 0.0
    for key in outside_in(sorted(pages, key=_by_step)):
        if math.isfinite(pages[key].cost) and (not shown or spent + pages[key].cost <= BUDGET):
            shown.append(key)
            spent += pages[key].cost
    return shown


def _cost(answer: Answer) -> float:
    return min(len(answer.column("token_ids")), MAX_TOKENS) or min(len(answer.response), MAX_CHARS) / 4


def _extremes(answers: Sequence[Answer]) -> list[Answer]:
    """Return all answers, or those with the highest and the lowest rewards where there are too many."""
    ranked = sorted(answers, key=lambda answer: -math.inf if answer.reward is None else answer.reward, reverse=True)
    return ranked if len(ranked) <= MAX_ANSWERS else [*ranked[: MAX_ANSWERS // 2], *ranked[-MAX_ANSWERS // 2 :]]


def spread(items: list[Item]) -> list[Item]:
    """Return every 2^k-th item and the last: at most `MAX_STEPS` + 1, and the same ones while the list grows a little."""
    stride = 1
    while len(items) / stride > MAX_STEPS:
        stride *= 2
    chosen = items[::stride]
    return chosen if not items or chosen[-1] == items[-1] else [*chosen, items[-1]]


def outside_in(items: Sequence[Item]) -> list[Item]:
    """Return the last, the first, the middle one, the middles of the halves, and so on."""
    if len(items) < 3:
        return [*items[::-1]]
    order, gaps = [items[-1], items[0]], [(0, len(items) - 1)]
    while gaps:
        low, high = gaps.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(items[middle])
            gaps += [(low, middle), (middle, high)]
    return order


def clip(text: str) -> str:
    """Return the text, with the middle of a very long one left out."""
    if len(text) <= MAX_CHARS:
        return text
    end = MAX_CHARS // 4
    return f"{text[: MAX_CHARS - end]}\n[... {len(text) - MAX_CHARS} characters left out ...]\n{text[-end:]}"


def writable(text: str) -> str:
    """Return the text for a file, with `?` for a lone surrogate, which UTF-8 does not hold."""
    return text.encode("utf-8", "replace").decode()


def printable(text: str) -> str:
    """Return the text for a terminal, with escapes such as `\\x1b` for control characters and lone surrogates. Joiners, which
    emoji and some scripts need, stay."""
    return "".join(
        each if each.isprintable() or each in "\u200c\u200d" else each.encode("unicode_escape").decode()
        for each in text
    )
