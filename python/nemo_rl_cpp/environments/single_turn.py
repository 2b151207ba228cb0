"""Base classes of environments with a single turn, among them those that score responses in separate processes."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import TypedDict

import torch

from nemo_rl_cpp.config.env import VerifierPoolConfig
from nemo_rl_cpp.data.conversation import text_of
from nemo_rl_cpp.data.interfaces import LLMMessageLogType
from nemo_rl_cpp.environments.interfaces import EnvironmentInterface, EnvironmentReturn, MetadataT
from nemo_rl_cpp.environments.verifier_pool import Verdicts, VerifierPool


class GroundTruth(TypedDict):
    """The entry of a sample's metadata that an environment reads: the ground truth."""

    ground_truth: str


def truth_text(truth: object) -> str:
    """Return a ground truth as text; "" for null, lists, mappings and booleans, which have no text."""
    text = text_of(truth)
    return text if isinstance(text, str) else ""


def assistant_text(message_log: LLMMessageLogType) -> str:
    """Return the joined contents of the model's messages in a conversation."""
    return "".join(str(message["content"]) for message in message_log if message["role"] == "assistant")


def prompt_text(message_log: LLMMessageLogType) -> str:
    """Return the joined contents of the messages before the model's first message."""
    before = takewhile(lambda message: message["role"] != "assistant", message_log)
    return "".join(str(message["content"]) for message in before)


def correct_or_not(scores: Iterable[float]) -> list[dict[str, str]]:
    """Return an observation for each score: "Environment: incorrect" for 0, otherwise "Environment: correct"."""
    return [{"role": "environment", "content": f"Environment: {'' if score else 'in'}correct"} for score in scores]


class SingleTurnEnvironment(EnvironmentInterface[MetadataT]):
    """The base class of environments that score one response per conversation and then end the conversation."""

    def _finish(
        self, rewards: "list[float] | torch.Tensor", metadata: list[MetadataT],
        observations: list[dict[str, str]] | None = None, answers: list[str | None] | None = None,
    ) -> EnvironmentReturn[MetadataT]:  # fmt: skip
        scores = torch.as_tensor(rewards, dtype=torch.float32)
        return EnvironmentReturn(
            observations=observations or [{"role": "environment", "content": ""} for _ in metadata],
            metadata=metadata,
            next_stop_strings=[None] * len(metadata),
            rewards=scores,
            terminateds=torch.ones_like(scores),
            answers=answers,
        )


class VerifyingEnvironment(SingleTurnEnvironment[MetadataT]):
    """The base class of environments that score responses with a `VerifierPool`. Metrics count the responses that got
    score 0 because the verifier failed (`verifier_timeouts`), among them those whose worker ended (`verifier_crashes`)
    and those longer than `max_answer_chars` (`verifier_oversized`), and those whose ground truth nothing can match
    (`verifier_unmatchable_truths`). Of these metrics, only `verifier_timeouts` is logged if it is 0."""

    can_be_asked_again = True

    def __init__(self, verifier: type, cfg: VerifierPoolConfig, warm_up: Mapping[str, object] | None = None) -> None:
        self._pool = VerifierPool(verifier, cfg, warm_up)
        self._counts: Counter[str] = Counter()

    def _verify(self, responses: list[str], ground_truths: Sequence[object], **kwargs: object) -> Verdicts:
        verdicts = self._pool.verify(responses, ground_truths, **kwargs)
        failed = verdicts.timed_out + verdicts.crashed + verdicts.oversized
        self._counts.update(
            verifier_timeouts=failed, verifier_crashes=verdicts.crashed, verifier_oversized=verdicts.oversized,
            verifier_unmatchable_truths=verdicts.unmatchable,
        )  # fmt: skip
        return verdicts

    def pop_metrics(self) -> dict[str, float]:
        counts, self._counts = self._counts, Counter()
        return {name: count for name, count in counts.items() if count or name == "verifier_timeouts"}

    def shutdown(self) -> None:
        self._pool.shutdown()
