"""Write the digits backwards: the smallest task that a model of a few thousand parameters learns from scratch."""

from nemo_rl_cpp.config.base import as_model
from nemo_rl_cpp.config.env import PlainEnvConfig
from nemo_rl_cpp.data.interfaces import LLMMessageLogType
from nemo_rl_cpp.environments.interfaces import EnvironmentReturn
from nemo_rl_cpp.environments.single_turn import GroundTruth, SingleTurnEnvironment, assistant_text, truth_text


def fraction_right(text: str, expected: str) -> float:
    """Share of the expected characters that stand at their place in the response (spaces around it aside)."""
    if not expected:
        raise ValueError("ground_truth is empty: reverse_digits needs the expected digits")
    return sum(a == b for a, b in zip(text.strip(), expected)) / len(expected)


class ReverseDigitsEnvironment(SingleTurnEnvironment[GroundTruth]):
    """Reward: the fraction of `metadata["ground_truth"]` that the response has right. Metric: `exactly_right`."""

    can_be_asked_again = True

    def __init__(self, cfg: PlainEnvConfig | None = None) -> None:
        as_model(cfg or {}, PlainEnvConfig, "env.reverse_digits")  # which has no keys
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
