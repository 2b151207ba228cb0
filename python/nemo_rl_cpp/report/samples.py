"""Picks telling prompts of a few steps from the rollout files, each with all its answers."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, TypeVar

from nemo_rl_cpp.config.access import as_number
from nemo_rl_cpp.files.durable import json_rows, write_atomic
from nemo_rl_cpp.files.yaml_text import Plain

MAX_FILE_BYTES = 64 << 20


class Token(NamedTuple):
    """A token of an answer: its id, its log-probability at generation, that of the trainer's own pass where there was one, and its
    advantage. `trained` is False for text of an environment."""

    id: int
    logprob: float | None
    trainer_logprob: float | None
    advantage: float | None
    trained: bool


@dataclass
class Answer:
    """One row of a rollout file, `row`. `parts`: the reward's parts by name."""

    idx: int
    prompt: str
    response: str
    reward: float | None
    length: int | None
    truncated: bool
    truth: str | None = None
    parts: dict[str, float] = field(default_factory=dict)
    row: Mapping[str, Plain] = field(default_factory=dict, repr=False)

    @cached_property
    def tokens(self) -> list[Token]:
        """From the first token that the policy wrote to its last; read when they are asked for, since few answers are shown."""
        return _tokens(self.row)

    @property
    def advantage(self) -> float | None:
        """The mean of its trained tokens' advantages."""
        values = [token.advantage for token in self.tokens if token.trained and token.advantage is not None]
        return sum(values) / len(values) if values else None


def read_groups(path: Path) -> list[list[Answer]]:
    """The answers of a file by their prompts; enormous files are passed over. Rows of one `group_id` are a group, and where a
    file has none, rows in turn with the same prompt."""
    if path.stat().st_size > MAX_FILE_BYTES:
        return []
    with open(path, encoding="utf-8") as file:
        rows = [(row, _answer(number, row)) for number, row in enumerate(json_rows(file))]
    if rows and all("group_id" in row for row, _ in rows):
        groups: dict[Plain, list[Answer]] = {}
        for row, answer in rows:
            groups.setdefault(str(row["group_id"]), []).append(answer)
        return list(groups.values())
    return [[answer for _, answer in some] for _, some in groupby(rows, key=lambda pair: pair[1].prompt)]


def _answer(number: int, row: Mapping[str, Plain]) -> Answer:
    prompt, response = _texts(row.get("content", ""))
    mask = row.get("token_loss_mask")
    length = _number(row.get("response_token_lengths", row.get("input_lengths")))
    if isinstance(mask, list):
        length = sum(value for value in _flat(mask) if value)
    idx, truth = _number(row.get("idx")), row.get("ground_truth")
    return Answer(
        idx=number if idx is None else int(idx),
        prompt=prompt,
        response=response,
        reward=_number(row.get("rewards", row.get("reward"))),
        length=None if length is None else int(length),
        truncated=bool(_number(row.get("truncated")) or 0),
        truth=None if truth is None else str(truth),
        parts={
            name.removeprefix("reward/"): number
            for name, value in row.items()
            if name.startswith("reward/") and (number := _number(value)) is not None
        },
        row=row,
    )


def _tokens(row: Mapping[str, Plain]) -> list[Token]:
    ids, mask = _flat(row.get("token_ids")), _flat(row.get("token_loss_mask"))
    if not ids or len(ids) != len(mask) or not any(mask):
        return []
    columns = [_column(row, name, len(ids)) for name in ("generation_logprobs", "prev_logprobs", "advantages")]
    first = next(place for place, value in enumerate(mask) if value)
    last = max(place for place, value in enumerate(mask) if value)
    return [
        Token(int(ids[i]), columns[0][i], columns[1][i], columns[2][i], bool(mask[i])) for i in range(first, last + 1)
    ]


def _column(row: Mapping[str, Plain], name: str, count: int) -> Sequence[float | None]:
    values = _flat(row.get(name))
    return values if len(values) == count else [None] * count


def _texts(content: Plain) -> tuple[str, str]:
    """(prompt, response) of the logged content: one text, a list of texts in turn, or a list of messages."""
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], list):
        content = content[0]
    if not isinstance(content, list):
        return "", str(content)
    messages = [item if isinstance(item, dict) else {"content": item} for item in content]
    if not messages:
        return "", ""
    answer = next((i for i, m in enumerate(messages) if m.get("role") == "assistant"), None)
    if answer is None:
        # texts without roles: the environment's verdict may follow the answer
        last = str(messages[-1].get("content", ""))
        answer = len(messages) - (2 if last.startswith("Environment:") and len(messages) > 2 else 1)
    before = "\n\n".join(str(m.get("content", "")) for m in messages[:answer])
    return before, "\n\n".join(text for m in messages[answer:] if (text := str(m.get("content", ""))))


def _number(value: object) -> float | None:
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    number = as_number(value)
    return None if number is None or number != number else number


def _flat(values: Plain) -> list[float]:
    if not isinstance(values, list):
        return []
    return [
        number
        for value in values
        for item in (value if isinstance(value, list) else [value])
        if (number := as_number(item)) is not None
    ]


_FILE = re.compile(r"(train|val)_data_step(\d+)\.jsonl")
TOKENS = "report_tokens.json"
MAX_STEPS = 24
MAX_CHARS = 2000
MAX_ANSWERS = 16
MAX_TOKENS = 256
BUDGET = 60_000
"""Tokens and, at a quarter, characters that a page shows in all; what lies beyond it are steps in the middle of the run."""

TokenBytes = Callable[[int], bytes]
Item = TypeVar("Item")


class Picked(NamedTuple):
    """A prompt that was picked: why, and its answers."""

    tags: list[str]
    answers: list[Answer]


class _Step(NamedTuple):
    """A step's prompts as JSON text, and how much of the page's room they take."""

    text: str
    cost: float


class SampleBook:
    """The picked prompts of a log folder; each rollout file is read once.

    `token_bytes`: the bytes of a token id. Those of the tokens that the page shows are kept in the folder, so that the page can
    be made again without the tokenizer.
    """

    def __init__(self, log_dir: Path, token_bytes: TokenBytes | None = None) -> None:
        self.log_dir = log_dir
        self._token_bytes = token_bytes
        self._steps: dict[tuple[str, int, int], _Step] = {}
        self._bytes: dict[int, bytes] = _read_bytes(log_dir / TOKENS)
        self._kept = len(self._bytes)

    def samples(self) -> list[Plain]:
        """Of at most `MAX_STEPS` training and as many validation steps, by step: {"kind", "step", "of", "groups"}.

        Which steps are shown depends only on how many there are, and changes rarely while a run goes on.
        """
        found: dict[str, list[tuple[int, Path]]] = {"train": [], "val": []}
        for path in self.log_dir.glob("*_data_step*.jsonl"):
            if match := _FILE.fullmatch(path.name):
                found[match[1]].append((int(match[2]), path))
        keep: dict[tuple[str, int, int], _Step] = {}
        for kind, files in found.items():
            for step, path in spread(sorted(files)):
                key = (kind, step, path.stat().st_mtime_ns)
                keep[key] = self._steps[key] if key in self._steps else self._read(kind, step, path)
        self._steps = keep
        self._keep_bytes()
        return [json.loads(keep[key].text) for key in sorted(_within_budget(keep), key=_by_step)]

    def _read(self, kind: str, step: int, path: Path) -> _Step:
        groups = read_groups(path)
        picked = pick(groups)
        page = {"kind": kind, "step": step, "of": len(groups), "groups": [self._group(group) for group in picked]}
        cost = sum(_cost(answer) for group in picked for answer in group.answers[:MAX_ANSWERS])
        return _Step(json.dumps(page, ensure_ascii=False), cost if picked else math.inf)

    def _group(self, group: Picked) -> Plain:
        first = group.answers[0]
        return {
            "tags": [*group.tags],
            "prompt": clip(first.prompt),
            "truth": None if first.truth is None else clip(first.truth),
            "of": len(group.answers),
            "answers": [self._answer(answer) for answer in _extremes(group.answers)],
        }

    def _answer(self, answer: Answer) -> Plain:
        shown: dict[str, Plain] = {
            "i": answer.idx,
            "r": _round(answer.reward),
            "n": answer.length,
            "a": _round(answer.advantage),
        }
        if answer.truncated:
            shown["cut"] = True
        if answer.parts:
            shown["parts"] = {name: _round(value) for name, value in answer.parts.items()}
        texts = self._texts(answer.tokens)
        if texts is None:
            return shown | {"text": clip(answer.response)}
        left_out = max(len(answer.tokens) - MAX_TOKENS, 0)
        kept = range(len(answer.tokens))
        if left_out:
            end = MAX_TOKENS // 4
            kept = [*kept[: MAX_TOKENS - end], *kept[-end:]]
            shown["gap"] = [MAX_TOKENS - end, left_out]
        tokens = [answer.tokens[i] for i in kept]
        return shown | {"tokens": [texts[i] for i in kept]} | _columns(tokens)

    def _texts(self, tokens: Sequence[Token]) -> list[str] | None:
        """The text of each token; of a character that several tokens make, the last has it all. None where they are not known."""
        if not tokens or any(token.id not in self._bytes for token in tokens) and self._token_bytes is None:
            return None
        texts, waiting = [], b""
        for token in tokens:
            if token.id not in self._bytes:
                self._bytes[token.id] = self._token_bytes(token.id) if self._token_bytes else b""
            waiting += self._bytes[token.id]
            try:
                texts.append(waiting.decode())
                waiting = b""
            except UnicodeDecodeError as error:
                whole = error.reason == "unexpected end of data" and len(waiting) - error.start < 4
                texts.append(waiting[: error.start].decode() if whole else waiting.decode(errors="replace"))
                waiting = waiting[error.start :] if whole else b""
        return texts

    def _keep_bytes(self) -> None:
        if self._token_bytes is not None and len(self._bytes) > self._kept:
            self._kept = len(self._bytes)
            table = {str(number): value.decode("latin-1") for number, value in sorted(self._bytes.items())}
            write_atomic(self.log_dir / TOKENS, json.dumps(table), durable=False)


def _by_step(key: tuple[str, int, int]) -> tuple[int, str]:
    return key[1], key[0]


def _within_budget(steps: Mapping[tuple[str, int, int], _Step]) -> list[tuple[str, int, int]]:
    """The steps that the page has room for: the last and the first before those between, halving the gaps."""
    shown, spent = [], 0.0
    for key in outside_in(sorted(steps, key=_by_step)):
        if math.isfinite(steps[key].cost) and (not shown or spent + steps[key].cost <= BUDGET):
            shown.append(key)
            spent += steps[key].cost
    return shown


def _extremes(answers: Sequence[Answer]) -> list[Answer]:
    """All answers, or those with the highest and the lowest rewards where there are too many."""
    ranked = sorted(answers, key=lambda answer: -math.inf if answer.reward is None else answer.reward, reverse=True)
    return ranked if len(ranked) <= MAX_ANSWERS else [*ranked[: MAX_ANSWERS // 2], *ranked[-MAX_ANSWERS // 2 :]]


def _columns(tokens: Sequence[Token]) -> dict[str, Plain]:
    """What is known of tokens, as whole numbers: log-probabilities and advantages by 100, logarithms of ratios by 10,000."""
    columns: dict[str, Plain] = {}
    if any(token.logprob is not None for token in tokens):
        columns["lp"] = [_scaled(token.logprob, 100) if token.trained else None for token in tokens]
    ratios = [
        None
        if None in (token.logprob, token.trainer_logprob) or not token.trained
        else _scaled(token.trainer_logprob - token.logprob, 1e4)
        for token in tokens
    ]
    if any(ratio is not None for ratio in ratios):
        columns["ratio"] = ratios if any(ratios) else 0
    advantages = [_scaled(token.advantage, 100) for token in tokens if token.trained]
    if len(set(advantages)) > 1:
        columns["adv"] = [_scaled(token.advantage, 100) if token.trained else None for token in tokens]
    if not all(token.trained for token in tokens):
        columns["env"] = [number for number, token in enumerate(tokens) if not token.trained]
    return columns


def _scaled(value: float | None, scale: float) -> int | None:
    return None if value is None or not math.isfinite(value) else round(value * scale)


def _round(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def _cost(answer: Answer) -> float:
    return min(len(answer.tokens), MAX_TOKENS) or min(len(answer.response), MAX_CHARS) / 4


def _read_bytes(path: Path) -> dict[int, bytes]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return {int(number): text.encode("latin-1") for number, text in table.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def spread(items: list[Item]) -> list[Item]:
    """Every 2^k-th item, and the last: at most `MAX_STEPS` + 1, and the same ones while the list grows a little."""
    stride = 1
    while len(items) / stride > MAX_STEPS:
        stride *= 2
    chosen = items[::stride]
    return chosen if not items or chosen[-1] == items[-1] else [*chosen, items[-1]]


def outside_in(items: Sequence[Item]) -> list[Item]:
    """The last, the first, the middle one, the middles of the halves, and so on."""
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


def pick(groups: Sequence[Sequence[Answer]]) -> list[Picked]:
    """At most four prompts, each with tags that say why it was picked."""
    tags: dict[int, list[str]] = {}

    def add(tag: str, scores: dict[int, float]) -> None:
        if scores:
            tags.setdefault(max(scores, key=scores.__getitem__), []).append(tag)

    rewards = {
        i: known for i, group in enumerate(groups) if (known := [a.reward for a in group if a.reward is not None])
    }
    means = {i: math.fsum(known) / len(known) for i, known in rewards.items()}
    add("highest reward", means)
    add("most different", {i: gap for i, known in rewards.items() if (gap := max(known) - min(known)) > 0})
    add("lowest reward", {i: -mean for i, mean in means.items()})
    add(
        "longest answer",
        {
            i: max(lengths)
            for i, group in enumerate(groups)
            if (lengths := [a.length for a in group if a.length is not None])
        },
    )
    if not tags and groups:
        tags[0] = ["first"]
    return [Picked(why, [*groups[i]]) for i, why in tags.items()]


def writable(text: str) -> str:
    """The text with `?` for half a character (a lone surrogate), which UTF-8 does not hold: for a file."""
    return text.encode("utf-8", "replace").decode()


def printable(text: str) -> str:
    """The text with escapes such as `\\x1b` for what a terminal obeys or cannot show, half a character (a lone surrogate) among
    it. Joiners, which emoji and some scripts need, stay."""
    return "".join(
        each if each.isprintable() or each in "\u200c\u200d" else each.encode("unicode_escape").decode()
        for each in text
    )


def clip(text: str) -> str:
    """The text, with the middle of a very long one left out."""
    if len(text) <= MAX_CHARS:
        return text
    end = MAX_CHARS // 4
    return f"{text[: MAX_CHARS - end]}\n[... {len(text) - MAX_CHARS} characters left out ...]\n{text[-end:]}"
