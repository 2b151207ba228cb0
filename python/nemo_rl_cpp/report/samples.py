"""Picks telling samples of a few steps from the rollout files: best, worst, longest, cut off, and a middling one."""

import re
from pathlib import Path
from typing import TypedDict, TypeVar

from nemo_rl_cpp.config.access import as_number
from nemo_rl_cpp.files.durable import json_rows
from nemo_rl_cpp.files.yaml_text import Plain

_FILE = re.compile(r"(train|val)_data_step(\d+)\.jsonl")
MAX_STEPS = 24
MAX_CHARS = 4000
MAX_FILE_BYTES = 64 << 20


class Sample(TypedDict, total=False):
    """A row of a rollout file as the report shows it; a picked one has the step's `kind` (train or val) and `tags`, too."""

    idx: Plain
    prompt: str
    response: str
    reward: float | None
    length: int | None
    truncated: bool
    kind: str
    step: int
    tags: list[str]


Item = TypeVar("Item")


class SampleBook:
    """The picked samples of a log folder; each rollout file is read once."""

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self._picked: dict[tuple[str, int, int], list[Sample]] = {}

    def samples(self) -> list[Sample]:
        """The samples of at most `MAX_STEPS` training and as many validation steps, by step.

        Which steps are shown depends only on how many there are, and changes rarely while a run goes on.
        """
        found: dict[str, list[tuple[int, Path]]] = {"train": [], "val": []}
        for path in self.log_dir.glob("*_data_step*.jsonl"):
            if match := _FILE.fullmatch(path.name):
                found[match[1]].append((int(match[2]), path))
        keep = {}
        for kind, files in found.items():
            for step, path in spread(sorted(files)):
                key = (kind, step, path.stat().st_mtime_ns)
                if key not in self._picked:
                    self._picked[key] = [{"kind": kind, "step": step} | sample for sample in pick(read_rollouts(path))]
                keep[key] = self._picked[key]
        self._picked = keep
        return [sample for key in sorted(keep, key=lambda k: (k[1], k[0])) for sample in keep[key]]


def spread(items: list[Item]) -> list[Item]:
    """Every 2^k-th item, and the last: at most `MAX_STEPS` + 1, and the same ones while the list grows a little."""
    stride = 1
    while len(items) / stride > MAX_STEPS:
        stride *= 2
    chosen = items[::stride]
    return chosen if not items or chosen[-1] == items[-1] else [*chosen, items[-1]]


def read_rollouts(path: Path) -> list[Sample]:
    """The rows of a rollout file as {prompt, response, reward, length, truncated}; enormous files are passed over."""
    if path.stat().st_size > MAX_FILE_BYTES:
        return []
    with open(path, encoding="utf-8") as file:
        return [_sample(row) for row in json_rows(file)]


def _sample(row: dict[str, Plain]) -> Sample:
    prompt, response = _texts(row.get("content", ""))
    mask = row.get("token_loss_mask")
    length = _number(row.get("response_token_lengths", row.get("input_lengths")))
    if isinstance(mask, list):
        length = sum(value for value in _flat(mask) if value)
    reward = _number(row.get("rewards", row.get("reward")))
    return {
        "idx": row.get("idx", 0),
        "prompt": clip(prompt),
        "response": clip(response),
        "reward": reward,
        "length": None if length is None else int(length),
        "truncated": bool(_number(row.get("truncated")) or 0),
    }


def _texts(content: Plain) -> tuple[str, str]:
    """(prompt, response) of the logged content: one text, a list of texts in turn, or a list of messages."""
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], list):
        content = content[0]
    if not isinstance(content, list):
        return "", str(content)
    messages = [item if isinstance(item, dict) else {"content": item} for item in content]
    if not messages:
        return "", ""
    answer = next((i for i, m in reversed(list(enumerate(messages))) if m.get("role") == "assistant"), None)
    if answer is None:
        # texts without roles: the environment's verdict may follow the answer
        last = str(messages[-1].get("content", ""))
        answer = len(messages) - (2 if last.startswith("Environment:") and len(messages) > 2 else 1)
    before = "\n\n".join(str(m.get("content", "")) for m in messages[:answer])
    return before, "\n\n".join(str(m.get("content", "")) for m in messages[answer:])


def pick(rows: list[Sample]) -> list[Sample]:
    """At most five rows, each with `tags` that say why it was picked."""
    if not rows:
        return []
    tags: dict[int, list[str]] = {}

    def add(tag: str, index: int) -> None:
        tags.setdefault(index, []).append(tag)

    rewards = {i: reward for i, row in enumerate(rows) if (reward := row["reward"]) is not None}
    rewarded = sorted(rewards, key=rewards.__getitem__)
    if rewarded:
        add("best", max(rewards, key=rewards.__getitem__))
        add("worst", rewarded[0])
    lengths = {i: length for i, row in enumerate(rows) if (length := row["length"]) is not None}
    if lengths:
        add("longest", max(lengths, key=lengths.__getitem__))
    cut = next((i for i, row in enumerate(rows) if row["truncated"]), None)
    if cut is not None:
        add("truncated", cut)
    if len(rewarded) > 2:
        add("middle", rewarded[len(rewarded) // 2])
    return [rows[i] | {"tags": tags[i]} for i in sorted(tags)] or [rows[0] | {"tags": ["first"]}]


def clip(text: str) -> str:
    """The text, with the middle of a very long one left out."""
    if len(text) <= MAX_CHARS:
        return text
    end = MAX_CHARS // 4
    return f"{text[: MAX_CHARS - end]}\n[... {len(text) - MAX_CHARS} characters left out ...]\n{text[-end:]}"


def _number(value: object) -> float | None:
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    number = as_number(value)
    return None if number is None or number != number else number


def _flat(values: list[float | list[float]]) -> list[float]:
    return [item for value in values for item in (value if isinstance(value, list) else [value])]
