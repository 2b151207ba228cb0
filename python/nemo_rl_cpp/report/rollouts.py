"""The rows of a rollout file, in groups: a prompt with all its answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from nemo_rl_cpp.config.access import as_number
from nemo_rl_cpp.files.durable import json_rows
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
