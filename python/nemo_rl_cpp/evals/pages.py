"""An evaluation as a page, prompts with all their answers, what went wrong first; and two evaluations of the same prompts side by side."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from nemo_rl_cpp.evals.metrics import Interval, normal_interval
from nemo_rl_cpp.report.samples import clip, printable
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


DATA = "evaluation_data.json"
_EXAMPLES = 3


def is_evaluation(folder: Path | str) -> bool:
    """Whether a folder is one that `eval.save_path` has named."""
    return (Path(folder) / DATA).is_file()


@dataclass(frozen=True)
class Comparison:
    """Two evaluations, `names`, with the prompts of each; the prompts are the same, in the same order."""

    names: tuple[str, str]
    models: tuple[str, str]
    first: Sequence[Prompt]
    second: Sequence[Prompt]

    @staticmethod
    def of(folders: Sequence[Path | str]) -> Comparison:
        """Reads two folders. ValueError where they are not two, cannot be read, or have other prompts."""
        if len(folders) != 2:
            raise ValueError(f"evaluations are compared two at a time, but {len(folders)} folders are given")
        read = [_read(Path(folder)) for folder in folders]
        (_, first), (_, second) = read
        if [prompt.text for prompt in first] != [prompt.text for prompt in second]:
            raise ValueError(
                f"{folders[0]} and {folders[1]} have other prompts ({len(first)} and {len(second)}): compare evaluations of the same data, "
                "with the same seed and prompt template"
            )
        return Comparison((str(folders[0]), str(folders[1])), (read[0][0], read[1][0]), first, second)

    @property
    def means(self) -> tuple[float, float]:
        """The mean rewards."""
        return statistics.fmean(p.mean for p in self.first), statistics.fmean(p.mean for p in self.second)

    @property
    def difference(self) -> tuple[float, Interval | None]:
        """Second less first, and its 95 % interval: mean +- 1.96 s / sqrt(P) of the P prompts' differences. None for one prompt."""
        gaps = [b.mean - a.mean for a, b in zip(self.first, self.second)]
        return statistics.fmean(gaps), normal_interval(gaps) if len(gaps) > 1 else None

    def changed(self, sign: int) -> list[tuple[Prompt, Prompt]]:
        """The prompts whose mean reward rose (sign 1) or fell (-1), the largest change first."""
        both = [(a, b) for a, b in zip(self.first, self.second) if sign * (b.mean - a.mean) > 0]
        return sorted(both, key=lambda pair: -abs(pair[1].mean - pair[0].mean))

    def verdict(self) -> str:
        """In a sentence."""
        (before, after), (gap, interval) = self.means, self.difference
        text = f"mean reward {before:.4f} -> {after:.4f}, difference {gap:+.4f}"
        if interval is None:
            return text
        chance = " (may be chance)" if interval.low <= 0 <= interval.high else ""
        return f"{text}, 95 % interval {interval.low:+.4f} to {interval.high:+.4f}{chance}"


def _read(folder: Path) -> tuple[str, list[Prompt]]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        samples = json.loads((folder / DATA).read_text(encoding="utf-8"))["evaluation_data"]
        return str(config["model_name"]), prompts_of(samples, int(config["num_tests_per_prompt"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder} is no folder of an evaluation ({type(error).__name__}: {error}): give two that eval.save_path has named"
        ) from None


def text_of(comparison: Comparison) -> str:
    """The comparison for a terminal, with some prompts that changed."""
    better, worse = comparison.changed(1), comparison.changed(-1)
    lines = [
        *(printable(f"{name}: {model}") for name, model in zip(comparison.names, comparison.models)), comparison.verdict(),
        f"of {len(comparison.first)} prompts {len(better)} are better, {len(worse)} worse, "
        f"{len(comparison.first) - len(better) - len(worse)} equal",
    ]  # fmt: skip
    for word, pairs in (("worse", worse), ("better", better)):
        for a, b in pairs[:_EXAMPLES]:
            lines += [f"\n{word}, {a.mean:.3g} -> {b.mean:.3g}: {_short(a.text)}"]
            lines += [f"  before: {_short(a.responses[0])}", f"  after:  {_short(b.responses[0])}"]
    return "\n".join(lines)


def _short(text: str) -> str:
    line = printable(" ".join(text.split()))
    return line if len(line) <= 110 else f"{line[:70]} ... {line[-30:]}"


def page(comparison: Comparison, now: float | None = None) -> str:
    """The comparison as a page: what got worse, then what got better."""
    better, worse = comparison.changed(1), comparison.changed(-1)
    sections = [
        PageSection(
            key,
            f"{title}: {len(pairs)} prompt{'' if len(pairs) == 1 else 's'}",
            cards((_card(a, b) for a, b in pairs[:60]), len(pairs)),
        )
        for key, title, pairs in (("worse", "Worse", worse), ("better", "Better", better))
        if pairs
    ]
    names = "".join(
        f"<p>{escape(name)}: <b>{escape(model)}</b></p>" for name, model in zip(comparison.names, comparison.models)
    )
    header = (
        f'<div class="top"><h1>two evaluations</h1></div><p class="verdict">{escape(comparison.verdict())}</p>{names}'
    )
    return document("two evaluations compared", header, sections, {}, now=now, scripts=())


def _card(before: Prompt, after: Prompt) -> str:
    answers = "".join(
        f'<div class="answer"><div class="score"><b>{prompt.mean:.3g}</b></div><div><div class="meta">{word}</div>'
        f"<pre>{escape(clip(prompt.responses[0])) or '<em>(empty)</em>'}</pre></div></div>"
        for word, prompt in (("before", before), ("after", after))
    )
    return f'<div class="sample">{heading(before)}<div class="answers">{answers}</div></div>'
