"""An evaluation as a page, prompts with all their answers, what went wrong first; and evaluations of the same prompts side by side."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_cpp.evals.metrics import normal_interval
from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.report.compare import Block, Comparison, Row, different_folders, differing_keys
from nemo_rl_cpp.report.page import PageSection, document, parts
from nemo_rl_cpp.report.samples import clip, printable

PAGE = "evaluation.html"
_MOST = 60
"""Prompts of a section that the page shows; all are in evaluation_data.json."""
Sample = Mapping[str, object]
Answer = tuple[float, str, str]
"""(reward, a note above the response, the response)."""


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
    wrong = [prompt for prompt in prompts if max(prompt.rewards) <= 0]
    right = [prompt for prompt in prompts if min(prompt.rewards) >= 1]
    part = [prompt for prompt in prompts if max(prompt.rewards) > 0 and min(prompt.rewards) < 1]
    sections = [
        PageSection(
            key, f"{name}: {len(found)} of {len(prompts)} prompts", _cards([(each, _answers(each)) for each in found])
        )
        for key, name, found in (("wrong", "Wrong", wrong), ("part", "Right in part", part), ("right", "Right", right))
        if found
    ]
    tiles = [(name, value.partition(" (")[0], value.partition(" (")[2].rstrip(")")) for name, value in facts.items()]
    header = parts().header({"title": "evaluation", "status": "", "total_steps": 0}, 0, title, tiles)
    return document(f"evaluation: {title}", header, sections, {}, now=now, scripts=())


def _answers(prompt: Prompt) -> Sequence[Answer]:
    return [
        (reward, "cut off" if cut else "", response)
        for reward, response, cut in zip(prompt.rewards, prompt.responses, prompt.cut, strict=True)
    ]


def _cards(found: Sequence[tuple[Prompt, Sequence[Answer]]]) -> str:
    """Return prompts with answers as HTML, one below the other, and how many there are beyond them."""
    cards = [
        (clip(prompt.text), clip(prompt.truth or ""), [(reward, note, clip(text)) for reward, note, text in answers])
        for prompt, answers in found[:_MOST]
    ]
    return str(parts().answers(cards, len(found) - _MOST))


def page_of(folder: Path | str) -> Path:
    """Where an evaluation's page lies in the folder of its samples."""
    return Path(folder) / PAGE


DATA = "evaluation_data.json"
_EXAMPLES = 3


def is_evaluation(folder: Path | str) -> bool:
    """Whether a folder is one that `eval.save_path` has named."""
    return (Path(folder) / DATA).is_file()


def compare_evaluations(folders: Sequence[Path | str]) -> Comparison:
    """Compare evaluations of the same prompts, each with the first one: rewards, keys that differ, prompts that changed.

    ValueError for a folder that cannot be read, is given twice, or has other prompts.
    """
    names = different_folders(folders)
    configs, prompts = zip(*(_read(Path(folder)) for folder in folders))
    for folder, other in zip(folders, prompts):
        if [prompt.text for prompt in other] != [prompt.text for prompt in prompts[0]]:
            raise ValueError(
                f"{folders[0]} and {folder} have other prompts ({len(prompts[0])} and {len(other)}): compare evaluations of the same data, "
                "with the same seed and prompt template"
            )
    models = [str(config["model_name"]) for config in configs]
    better, worse = (_changed(list(zip(*prompts)), sign) for sign in (1, -1))
    equal = len(prompts[0]) - len(better) - len(worse)
    verdict = [
        *(f"{name}: {difference(prompts[0], other)}" for name, other in zip(names[1:], prompts[1:])),
        f"of {len(prompts[0])} prompts {len(better)} are better, {len(worse)} worse, {equal} equal in {names[-1]} against {names[0]}",
    ]
    blocks = [
        Block(
            "results",
            "Side by side",
            [Row("model", models), Row("mean reward", [f"{_mean(each):.4f}" for each in prompts])],
        ),
        Block("keys", "Keys that differ", differing_keys(configs, ("model_name",))),
    ]
    examples = []
    for word, found in (("worse", worse), ("better", better)):
        title = f"{word.capitalize()}: {len(found)} prompt{'' if len(found) == 1 else 's'}"
        cards = _cards([(each[0], [(a.mean, name, a.responses[0]) for name, a in zip(names, each)]) for each in found])
        if found:
            blocks.append(Block(word, title, html=lambda cards=cards: cards))
        for answers in found[:_EXAMPLES]:
            examples.append(f"\n{word}, {answers[0].mean:.3g} -> {answers[-1].mean:.3g}: {_short(answers[0].text)}")
            examples += [f"  {name}: {_short(answer.responses[0])}" for name, answer in zip(names, answers)]
    return Comparison("evaluations", names, models, "\n".join(verdict), blocks, examples=examples)


def difference(first: Sequence[Prompt], second: Sequence[Prompt]) -> str:
    """Say how the mean reward changed, with the 95 % interval mean +- 1.96 s / sqrt(P) of the P prompts' differences."""
    gaps = [b.mean - a.mean for a, b in zip(first, second, strict=True)]
    text = f"mean reward {_mean(first):.4f} -> {_mean(second):.4f}, difference {statistics.fmean(gaps):+.4f}"
    if len(gaps) < 2:
        return text
    low, high = normal_interval(gaps)
    return f"{text}, 95 % interval {low:+.4f} to {high:+.4f}{' (may be chance)' if low <= 0 <= high else ''}"


def _mean(prompts: Sequence[Prompt]) -> float:
    return statistics.fmean(prompt.mean for prompt in prompts)


def _changed(answers: Sequence[Sequence[Prompt]], sign: int) -> list[Sequence[Prompt]]:
    """Return the prompts whose mean reward rose (sign 1) or fell (-1) from the first to the last evaluation, the largest change first."""
    found = [each for each in answers if sign * (each[-1].mean - each[0].mean) > 0]
    return sorted(found, key=lambda each: -abs(each[-1].mean - each[0].mean))


def _read(folder: Path) -> tuple[dict[str, Plain], list[Prompt]]:
    """Return config.json and the prompts of an evaluation."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        samples = json.loads((folder / DATA).read_text(encoding="utf-8"))["evaluation_data"]
        return {"model_name": "", **config}, prompts_of(samples, int(config["num_tests_per_prompt"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder} is no folder of an evaluation ({type(error).__name__}: {error}): give folders that eval.save_path has named"
        ) from None


def _short(text: str) -> str:
    line = printable(" ".join(text.split()))
    return line if len(line) <= 110 else f"{line[:70]} ... {line[-30:]}"
