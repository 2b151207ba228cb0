"""Environments for mathematics: one gives reward 1 or 0, the other gives three reward components for GDPO."""

import re
from collections.abc import Mapping

import torch

from nemo_rl_cpp.config.base import as_model
from nemo_rl_cpp.config.env import MathEnvConfig, MultiRewardEnvConfig
from nemo_rl_cpp.data.interfaces import LLMMessageLogType
from nemo_rl_cpp.environments import single_turn
from nemo_rl_cpp.environments.interfaces import EnvironmentReturn
from nemo_rl_cpp.environments.verifiers import (
    EnglishMultichoiceVerifyWorker,
    HFVerifyWorker,
    MultilingualMultichoiceVerifyWorker,
)

_VERIFIERS: dict[str, type] = {
    "math": HFVerifyWorker,
    "english_multichoice": EnglishMultichoiceVerifyWorker,
    "multilingual_multichoice": MultilingualMultichoiceVerifyWorker,
}


class MathEnvironment(single_turn.VerifyingEnvironment[single_turn.GroundTruth]):
    """An environment that gives reward 1 if the text of the model's messages matches the ground truth, else 0."""

    scores_rows_alone = True

    def __init__(self, cfg: MathEnvConfig) -> None:
        self.cfg = cfg = as_model(cfg, MathEnvConfig, "env.math")
        kind = cfg.verifier_type or "math"
        implementation = {"math_verify_impl": cfg.math_verify_impl or "hf_math_verify"}
        self._verify_kwargs = implementation if kind == "math" else {}
        super().__init__(_VERIFIERS[kind], cfg, warm_up=self._verify_kwargs)

    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[single_turn.GroundTruth], return_extracted_answer: bool = False
    ) -> EnvironmentReturn[single_turn.GroundTruth]:  # fmt: skip
        """Score the responses and end the conversations. Return extracted answers if `return_extracted_answer`."""
        responses = [single_turn.assistant_text(message_log) for message_log in message_log_batch]
        truths = [single_turn.truth_text(info["ground_truth"]) for info in metadata]
        verdicts = self._verify(responses, truths, **self._verify_kwargs)
        answers = verdicts.answers if return_extracted_answer else None
        result = self._finish(verdicts.scores, metadata, single_turn.correct_or_not(verdicts.scores), answers)
        return result._replace(next_stop_strings=[self.cfg.stop_strings] * len(metadata))


REWARD_NAMES = ("reward/correctness", "reward/integer", "reward/format")
_FORMAT = re.compile(r"\A<think>.*?</think>\n<answer>.*?</answer>\Z", re.DOTALL)


class MathMultiRewardEnvironment(single_turn.SingleTurnEnvironment[single_turn.GroundTruth]):
    """An environment for responses of the form `<think>...</think>`, a newline, `<answer>...</answer>`. It gives three
    reward components, each 1 or 0:

    - `reward/correctness`: the text between the answer tags equals the ground truth exactly. - `reward/integer`: the
    text between the answer tags consists only of digits. - `reward/format`: the whole response has this form, with
    exactly one pair of answer tags.

    The answer follows the last `<answer>`; a response without tags is the answer."""

    scores_rows_alone = can_be_asked_again = True

    def __init__(self, cfg: MultiRewardEnvConfig | Mapping[str, object] | None = None) -> None:
        self._longest = as_model(cfg or {}, MultiRewardEnvConfig, "env.math_multi_reward").max_answer_chars

    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[single_turn.GroundTruth], return_extracted_answer: bool = False
    ) -> EnvironmentReturn[single_turn.GroundTruth]:  # fmt: skip
        responses = [single_turn.assistant_text(message_log) for message_log in message_log_batch]
        answers = [response.rpartition("<answer>")[2].partition("</answer>")[0].strip() for response in responses]
        scores = [
            self._scores(response, answer, single_turn.truth_text(info["ground_truth"]))
            for response, answer, info in zip(responses, answers, metadata)
        ]
        observations = single_turn.correct_or_not(correct for correct, _, _ in scores)
        parts = torch.tensor(scores, dtype=torch.float32).reshape(len(scores), 3)
        result = self._finish(parts[:, 0], metadata, observations, answers if return_extracted_answer else None)
        return result._replace(rewards={name: parts[:, i].clone() for i, name in enumerate(REWARD_NAMES)})

    def _scores(self, response: str, answer: str, truth: str) -> tuple[float, float, float]:
        if len(response) > self._longest:
            return 0.0, 0.0, 0.0
        one_pair = response.count("<answer>") == response.count("</answer>") == 1
        return float(answer == truth), float(answer.isdigit()), float(one_pair and _FORMAT.search(response) is not None)
