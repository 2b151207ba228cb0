"""Environments of one turn, also those whose verifiers work in processes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict

import torch

from nemo_rl_cpp.data.interfaces import LLMMessageLogType
from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_cpp.environments.interfaces import EnvironmentInterface, EnvironmentReturn, MetadataT
from nemo_rl_cpp.environments.verifier_pool import PoolOptions, Verdicts, VerifierPool

NO_OBSERVATION = {"role": "environment", "content": ""}


class GroundTruth(TypedDict):
    """What an environment knows of a sample: the right answer."""

    ground_truth: str


def truth_text(truth: object) -> str:
    """The text of a right answer, "" where it is none: lists, mappings and truth values are no texts, and null is none."""
    return str(truth) if isinstance(truth, (str, int, float)) and not isinstance(truth, bool) else ""


def assistant_text(message_log: LLMMessageLogType) -> str:
    """All of the model's messages of a conversation, joined."""
    return "".join(str(message["content"]) for message in message_log if message["role"] == "assistant")


def prompt_text(message_log: LLMMessageLogType) -> str:
    """What stands before the model's first message."""
    texts = []
    for message in message_log:
        if message["role"] == "assistant":
            break
        texts.append(str(message["content"]))
    return "".join(texts)


def correct_or_not(scores: Iterable[float]) -> list[dict[str, str]]:
    """The observations "Environment: correct" or, for a score of 0, "Environment: incorrect"."""
    return [{"role": "environment", "content": f"Environment: {'' if score else 'in'}correct"} for score in scores]


def calculate_pass_rate_per_prompt(prompts: torch.Tensor, is_correct: torch.Tensor) -> float:
    """Share of the distinct prompts [B, S] that have at least one correct sample (is_correct [B] > 0)."""
    unique, group = torch.unique(prompts, dim=0, return_inverse=True)
    passed = torch.zeros(len(unique)).index_add_(0, group.flatten(), (is_correct > 0).float())
    return (passed > 0).float().mean().item()


class SingleTurnEnvironment(EnvironmentInterface[MetadataT]):
    """Scores one response a conversation, which ends with it."""

    def _finish(
        self,
        rewards: "list[float] | torch.Tensor",
        metadata: list[MetadataT],
        observations: list[dict[str, str]] | None = None,
        answers: list[str | None] | None = None,
    ) -> EnvironmentReturn[MetadataT]:
        scores = torch.as_tensor(rewards, dtype=torch.float32)
        return EnvironmentReturn(
            observations=observations or [dict(NO_OBSERVATION) for _ in metadata],
            metadata=metadata,
            next_stop_strings=[None] * len(metadata),
            rewards=scores,
            terminateds=torch.ones_like(scores),
            answers=answers,
        )

    def global_post_process_and_metrics(self, batch: BatchedDataDict) -> tuple[BatchedDataDict, dict[str, float | int]]:
        """Sets the reward of samples that did not end properly to 0 and gives the batch's metrics.

        Reads rewards, is_end, generation_lengths, prompt_lengths [B] and text [B, S] (the prompts' tokens).
        """
        batch["rewards"] = batch["rewards"] * batch["is_end"]
        rewards, is_end = batch["rewards"], batch["is_end"].float()
        correct = rewards == 1
        lengths = (batch["generation_lengths"] - batch["prompt_lengths"])[correct].float()
        return batch, {
            "accuracy": rewards.float().mean().item(),
            "pass@samples_per_prompt": calculate_pass_rate_per_prompt(batch["text"], rewards),
            "fraction_of_samples_properly_ended": is_end.mean().item(),
            "num_problems_in_batch": is_end.shape[0],
            "generation_lengths": batch["generation_lengths"].float().mean().item(),
            "prompt_lengths": batch["prompt_lengths"].float().mean().item(),
            "correct_solution_generation_lengths": lengths.mean().item() if len(lengths) else 0,
        }


class VerifyingEnvironment(SingleTurnEnvironment[MetadataT]):
    """Owns a `VerifierPool` and counts what its verifiers gave up on.

    Metrics: `verifier_timeouts`, responses scored 0 because the verifier gave up on them (deadline missed, worker
    ended, or longer than `max_answer_chars`); of these `verifier_crashes` and `verifier_oversized`, when there are any.
    `verifier_unmatchable_truths`, when there are any: responses scored 0 because no response could match their truth.
    """

    can_be_asked_again = True

    def __init__(self, verifier: type, options: PoolOptions, warm_up: Mapping[str, object] | None = None) -> None:
        self._pool = VerifierPool(verifier, options, warm_up)
        self._reset_counts()

    def _verify(self, responses: list[str], ground_truths: Sequence[object], **kwargs: object) -> Verdicts:
        verdicts = self._pool.verify(responses, ground_truths, **kwargs)
        self._steps += 1
        self._timed_out += verdicts.timed_out
        self._crashed += verdicts.crashed
        self._oversized += verdicts.oversized
        self._unmatchable += verdicts.unmatchable
        return verdicts

    def pop_metrics(self) -> dict[str, float]:
        if not self._steps:
            return {}
        metrics: dict[str, float] = {"verifier_timeouts": self._timed_out + self._crashed + self._oversized}
        if self._crashed:
            metrics["verifier_crashes"] = self._crashed
        if self._oversized:
            metrics["verifier_oversized"] = self._oversized
        if self._unmatchable:
            metrics["verifier_unmatchable_truths"] = self._unmatchable
        self._reset_counts()
        return metrics

    def shutdown(self) -> None:
        self._pool.shutdown()

    def _reset_counts(self) -> None:
        self._steps = self._timed_out = self._crashed = self._oversized = self._unmatchable = 0
