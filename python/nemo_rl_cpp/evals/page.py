"""The samples of an evaluation as a page: prompts with all their answers, what went wrong first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from nemo_rl_cpp.report.samples import clip
from nemo_rl_cpp.report.shell import PageSection, document

PAGE = "evaluation.html"
_MOST = 60
"""Prompts of a section that the page shows; all are in evaluation_data.json."""
Sample = Mapping[str, object]


@dataclass(frozen=True)
class Prompt:
    """A prompt with its answers: `rewards` and `responses` lie side by side; `truth` is None where there is none."""

    text: str
    truth: str | None
    rewards: Sequence[float]
    responses: Sequence[str]
    cut: Sequence[bool]

    @property
    def mean(self) -> float:
        """The mean reward."""
        return math.fsum(self.rewards) / len(self.rewards)


def prompts_of(samples: Sequence[Sample], n: int) -> list[Prompt]:
    """The samples of an evaluation, of which each `n` that lie side by side answer one prompt."""
    found = []
    for start in range(0, len(samples), n):
        own = samples[start : start + n]
        found.append(
            Prompt(
                str(own[0]["prompt"]), _truth(own[0].get("extra_env_info")), [float(str(sample["reward"])) for sample in own],
                [str(sample["response"]) for sample in own], [bool(sample.get("truncated")) for sample in own],
            )
        )  # fmt: skip
    return found


def _truth(info: object) -> str | None:
    names = ("ground_truth", "answer", "expected_answer")
    found = next((info[name] for name in names if name in info), None) if isinstance(info, Mapping) else None
    return None if found is None else str(found)


def evaluation_page(title: str, facts: Mapping[str, str], prompts: Sequence[Prompt], now: float | None = None) -> str:
    """The page. `facts`: the rows of the terminal's table; `now`: Unix time that it says it was written at."""
    parts = (
        ("wrong", "Wrong", [prompt for prompt in prompts if max(prompt.rewards) <= 0]),
        (
            "part",
            "Right in part",
            [prompt for prompt in prompts if max(prompt.rewards) > 0 and min(prompt.rewards) < 1],
        ),
        ("right", "Right", [prompt for prompt in prompts if min(prompt.rewards) >= 1]),
    )
    sections = [
        PageSection(key, f"{name}: {len(found)} of {len(prompts)} prompts", cards(map(card, found[:_MOST]), len(found)))
        for key, name, found in parts
        if found
    ]
    tiles = "".join(
        f'<div class="tile"><span>{escape(name)}</span><b>{escape(value.partition(" (")[0])}</b>'
        f"<small>{escape(value.partition(' (')[2].rstrip(')'))}</small></div>"
        for name, value in facts.items()
    )
    header = f'<div class="top"><h1>evaluation</h1></div><p class="verdict">{escape(title)}</p><div class="tiles">{tiles}</div>'
    return document(f"evaluation: {title}", header, sections, {}, now=now, scripts=())


def cards(shown: Iterable[str], count: int) -> str:
    """Cards one below the other, and how many there are beyond them."""
    more = f'<p class="muted">{count - _MOST} more are in evaluation_data.json.</p>' if count > _MOST else ""
    return "".join(shown) + more


def card(prompt: Prompt) -> str:
    """A prompt with the expected answer and each answer's reward."""
    answers = "".join(map(_answer, prompt.rewards, prompt.responses, prompt.cut))
    return f'<div class="sample">{heading(prompt)}<div class="answers">{answers}</div></div>'


def heading(prompt: Prompt) -> str:
    """The prompt and the expected answer."""
    truth = "" if prompt.truth is None else (
        f'<p class="truth"><span class="muted">expected </span><code>{escape(clip(prompt.truth))}</code></p>'
    )  # fmt: skip
    return f'<pre class="prompt">{escape(clip(prompt.text))}</pre>{truth}'


def _answer(reward: float, response: str, cut: bool) -> str:
    note = '<div class="meta">cut off</div>' if cut else ""
    text = escape(clip(response)) or "<em>(empty)</em>"
    return f'<div class="answer"><div class="score"><b>{reward:.3g}</b></div><div><pre>{text}</pre>{note}</div></div>'


def page_of(folder: Path | str) -> Path:
    """Where an evaluation's page lies in the folder of its samples."""
    return Path(folder) / PAGE
