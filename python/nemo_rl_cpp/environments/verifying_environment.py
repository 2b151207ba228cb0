"""Single-turn environments that score with a verifier in worker processes."""

from collections.abc import Mapping, Sequence

from nemo_rl_cpp.environments.interfaces import MetadataT
from nemo_rl_cpp.environments.single_turn import SingleTurnEnvironment
from nemo_rl_cpp.environments.verifier_pool import PoolOptions, Verdicts, VerifierPool


class VerifyingEnvironment(SingleTurnEnvironment[MetadataT]):
    """Owns a `VerifierPool` and counts what its verifiers gave up on.

    Metrics: `verifier_timeouts`, responses scored 0 because the verifier gave up on them (deadline missed, worker
    ended, or longer than `max_answer_chars`); of these `verifier_crashes` and `verifier_oversized`, when there are any.
    `verifier_unmatchable_truths`, when there are any: responses scored 0 because no response could match their truth.
    """

    can_be_asked_again = metrics_add_up = True

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
