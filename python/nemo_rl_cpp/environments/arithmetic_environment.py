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


def _expected(info: GroundTruth) -> Decimal:
    try:
        return Decimal(str(info["ground_truth"]).strip().replace(",", ""))
    except InvalidOperation:
        raise ValueError(
            f"ground_truth is {info['ground_truth']!r}; the arithmetic environment needs a number"
        ) from None


class ArithmeticEnvironment(SingleTurnEnvironment[GroundTruth]):
    """An environment that gives reward 1 if the response is well-formed and its first number equals
    `metadata["ground_truth"]`, otherwise 0. Well-formed is a complete line (with the stop string, a line end) or an
    integer alone. Metrics: the fraction `well_formed`, and `accuracy_of_well_formed`."""

    can_be_asked_again = True

    def __init__(self, cfg: PlainEnvConfig | None = None) -> None:
        as_model(cfg or {}, PlainEnvConfig, "env.arithmetic")  # any key is an error

    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[GroundTruth]
    ) -> EnvironmentReturn[GroundTruth]:
        rewards, answers = [], []
        for message_log, info in zip(message_log_batch, metadata):
            text = assistant_text(message_log)[:_LONGEST_ANSWER]
            found = _NUMBER.search(text)
            number = Decimal(found.group().replace(",", "")) if found else None
            formed = "\n" in text or _BARE_INTEGER.fullmatch(text) is not None
            right = formed and number is not None and number == _expected(info)
            self._means.add("well_formed", formed)
            self._means.add("accuracy_of_well_formed", right, formed)
            rewards.append(float(right))
            answers.append(None if number is None else str(number))
        return self._finish(rewards, metadata, answers=answers)


class ReverseDigitsEnvironment(SingleTurnEnvironment[GroundTruth]):
    """An environment whose reward is the fraction of the ground truth's characters that the stripped response has at
    the same position. Metric: `exactly_right`, the fraction of responses with reward 1."""

    can_be_asked_again = True

    def __init__(self, cfg: PlainEnvConfig | None = None) -> None:
        as_model(cfg or {}, PlainEnvConfig, "env.reverse_digits")  # any key is an error

    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[GroundTruth]
    ) -> EnvironmentReturn[GroundTruth]:
        answers = [assistant_text(message_log).strip() for message_log in message_log_batch]
        truths = [truth_text(info["ground_truth"]) for info in metadata]
        if not all(truths):
            raise ValueError("ground_truth is empty: reverse_digits needs the expected digits")
        rewards = [sum(a == b for a, b in zip(text, truth)) / len(truth) for text, truth in zip(answers, truths)]
        self._means.add("exactly_right", rewards.count(1.0), len(rewards))
        return self._finish(rewards, metadata, answers=answers)
