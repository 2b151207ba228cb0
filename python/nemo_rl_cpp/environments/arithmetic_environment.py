"""Environments for two simple tasks, sums and reversing digits, which are meant for tests and first runs."""

import re
from decimal import Decimal, InvalidOperation

from nemo_rl_cpp.config.base import as_model
from nemo_rl_cpp.config.env import PlainEnvConfig
from nemo_rl_cpp.data.interfaces import LLMMessageLogType
from nemo_rl_cpp.environments.interfaces import EnvironmentReturn
from nemo_rl_cpp.environments.single_turn import GroundTruth, SingleTurnEnvironment, assistant_text, truth_text

_NUMBER = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?")
_BARE_INTEGER = re.compile(r"\s*-?[0-9]+\s*")
_LONGEST_ANSWER = 4096  # only these characters are parsed; a number on one line is never longer


def first_number(text: str) -> Decimal | None:
    """Return the first number in the text, which may have commas as thousands separators, or None if there is none."""
    found = _NUMBER.search(text[:_LONGEST_ANSWER])
    return Decimal(found.group().replace(",", "")) if found else None


def is_well_formed(text: str) -> bool:
    """Return whether the response is a complete line (it contains a line end, the stop string), or consists only of an
    integer.
    """
    return "\n" in text[:_LONGEST_ANSWER] or _BARE_INTEGER.fullmatch(text[:_LONGEST_ANSWER]) is not None


def _expected(info: GroundTruth) -> Decimal:
    try:
        return Decimal(str(info["ground_truth"]).strip().replace(",", ""))
    except InvalidOperation:
        raise ValueError(
            f"ground_truth is {info['ground_truth']!r}; the arithmetic environment needs a number"
        ) from None


class ArithmeticEnvironment(SingleTurnEnvironment[GroundTruth]):
    """An environment that gives reward 1 if the response is well-formed and its first number equals
    `metadata["ground_truth"]`, otherwise 0.

    Metrics: `well_formed`, the fraction of well-formed responses, and `accuracy_of_well_formed`.
    """

    can_be_asked_again = True

    def __init__(self, cfg: PlainEnvConfig | None = None) -> None:
        as_model(cfg or {}, PlainEnvConfig, "env.arithmetic")  # any key is an error
        self._responses = self._well_formed = self._right = 0

    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[GroundTruth]
    ) -> EnvironmentReturn[GroundTruth]:
        rewards, answers = [], []
        for message_log, info in zip(message_log_batch, metadata):
            text = assistant_text(message_log)
            number, formed = first_number(text), is_well_formed(text)
            right = formed and number is not None and number == _expected(info)
            self._responses += 1
            self._well_formed += formed
            self._right += right
            rewards.append(float(right))
            answers.append(None if number is None else str(number))
        return self._finish(rewards, metadata, answers=answers)

    def pop_metrics(self) -> dict[str, float]:
        metrics = {
            "well_formed": self._well_formed / max(self._responses, 1),
            "accuracy_of_well_formed": self._right / max(self._well_formed, 1),
        }
        if not self._responses:
            return {}
        self._responses = self._well_formed = self._right = 0
        return metrics


def fraction_right(text: str, expected: str) -> float:
    """Return the fraction of characters of `expected` that the stripped response has at the same position. Raise
    ValueError if `expected` is empty.
    """
    if not expected:
        raise ValueError("ground_truth is empty: reverse_digits needs the expected digits")
    return sum(a == b for a, b in zip(text.strip(), expected)) / len(expected)


class ReverseDigitsEnvironment(SingleTurnEnvironment[GroundTruth]):
    """An environment whose reward is the fraction of characters of `metadata["ground_truth"]` that the response has at
    the same position. Metric: `exactly_right`, the fraction of responses with reward 1.
    """

    can_be_asked_again = True

    def __init__(self, cfg: PlainEnvConfig | None = None) -> None:
        as_model(cfg or {}, PlainEnvConfig, "env.reverse_digits")  # any key is an error
        self._responses = self._exact = 0

    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[GroundTruth]
    ) -> EnvironmentReturn[GroundTruth]:
        texts = [assistant_text(message_log) for message_log in message_log_batch]
        rewards = [fraction_right(text, truth_text(info["ground_truth"])) for text, info in zip(texts, metadata)]
        self._responses += len(rewards)
        self._exact += sum(reward == 1.0 for reward in rewards)
        return self._finish(rewards, metadata, answers=[text.strip() for text in texts])

    def pop_metrics(self) -> dict[str, float]:
        if not self._responses:
            return {}
        share = self._exact / self._responses
        self._responses = self._exact = 0
        return {"exactly_right": share}
