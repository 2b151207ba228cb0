"""Mathematics and multiple choice: one response, right or wrong."""

from typing import TypedDict

from nemo_rl_cpp.config.base import as_model
from nemo_rl_cpp.config.env import MathEnvConfig
from nemo_rl_cpp.data.interfaces import LLMMessageLogType
from nemo_rl_cpp.environments.interfaces import EnvironmentReturn
from nemo_rl_cpp.environments.single_turn import assistant_text, correct_or_not, truth_text
from nemo_rl_cpp.environments.verifier_pool import PoolOptions
from nemo_rl_cpp.environments.verifiers import (
    EnglishMultichoiceVerifyWorker,
    HFVerifyWorker,
    MultilingualMultichoiceVerifyWorker,
)
from nemo_rl_cpp.environments.verifying_environment import VerifyingEnvironment

__all__ = [
    "BaseMathEnvironment",
    "EnglishMultichoiceVerifyWorker",
    "HFVerifyWorker",
    "MathEnvConfig",
    "MathEnvironment",
    "MathEnvironmentMetadata",
    "MultilingualMultichoiceVerifyWorker",
]


class MathEnvironmentMetadata(TypedDict):
    """What the environment knows of a sample."""

    ground_truth: str
    extracted_answer: str | None


class BaseMathEnvironment(VerifyingEnvironment[MathEnvironmentMetadata]):
    """Owns the verifiers of `cfg["verifier_type"]`. Raises ValueError for an unknown type or implementation."""

    WORKER_CLASS_DICT: dict[str, type] = {
        "math": HFVerifyWorker,
        "english_multichoice": EnglishMultichoiceVerifyWorker,
        "multilingual_multichoice": MultilingualMultichoiceVerifyWorker,
    }
    scores_rows_alone = True
    _IMPLEMENTATIONS = ("hf_math_verify", "dapo_math_verify")

    def __init__(self, cfg: MathEnvConfig) -> None:
        self.cfg = cfg = as_model(cfg, MathEnvConfig, "env.math")
        kind = cfg.verifier_type or "math"
        if kind not in self.WORKER_CLASS_DICT:
            raise ValueError(f"env.math.verifier_type is {kind!r}; it must be one of {sorted(self.WORKER_CLASS_DICT)}")
        implementation = cfg.math_verify_impl or "hf_math_verify"
        if implementation not in self._IMPLEMENTATIONS:
            raise ValueError(
                f"env.math.math_verify_impl is {implementation!r}; it must be one of {self._IMPLEMENTATIONS}"
            )
        self._verify_kwargs = {"math_verify_impl": implementation} if kind == "math" else {}
        super().__init__(self.WORKER_CLASS_DICT[kind], PoolOptions.from_config(cfg), warm_up=self._verify_kwargs)


class MathEnvironment(BaseMathEnvironment):
    """Scores the model's messages, joined, against `metadata["ground_truth"]`: 1 or 0, and the conversation ends."""

    def step(
        self,
        message_log_batch: list[LLMMessageLogType],
        metadata: list[MathEnvironmentMetadata],
        return_extracted_answer: bool = False,
    ) -> EnvironmentReturn[MathEnvironmentMetadata]:
        """Observations say "Environment: correct" or "Environment: incorrect"; `answers` only when asked for."""
        responses = [assistant_text(message_log) for message_log in message_log_batch]
        truths = [truth_text(info["ground_truth"]) for info in metadata]
        verdicts = self._verify(responses, truths, **self._verify_kwargs)
        answers = verdicts.answers if return_extracted_answer else None
        result = self._finish(verdicts.scores, metadata, correct_or_not(verdicts.scores), answers)
        return result._replace(next_stop_strings=[self.cfg.stop_strings] * len(metadata))
