"""Scoring beside generation: responses go to their environments as they end, while others are still generated."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_cpp.distributed.futures import is_done
from nemo_rl_cpp.environments.remote import call_remote

if TYPE_CHECKING:
    from nemo_rl_cpp.data.interfaces import LLMMessageLogType, TokenizerType
    from nemo_rl_cpp.distributed.futures import Future
    from nemo_rl_cpp.environments.interfaces import Environment


class EarlyScoring:
    """Starts the environments' answers to single rows of one turn; `calculate_rewards` asks for the rest.

    Only environments that say so (`scores_rows_alone`) and whose calls run beside the caller (`.remote`) take part, so
    results are those of one call at the end. An environment that is at work gets what has ended meanwhile as its next call.
    """

    def __init__(
        self, active: BatchedDataDict, tokenizer: "TokenizerType", task_to_env: "Mapping[str, Environment]"
    ) -> None:
        self._active = active
        self._tokenizer = tokenizer
        self._environments = {
            task: environment
            for task, environment in task_to_env.items()
            if getattr(environment, "scores_rows_alone", False) is True and hasattr(environment.step, "remote")
        }
        self._waiting: dict[str, list[tuple[int, list[int]]]] = {}
        self.begun: list[tuple[list[int], Future]] = []
        """(rows of the turn, what `step` will have given), in the order of the calls."""
        self._latest: dict[str, Future] = {}

    @property
    def useful(self) -> bool:
        """Whether any row of this turn can be scored early."""
        return any(task in self._environments for task in self._active["task_name"])

    def finished(self, rows: list[int], token_ids: list[list[int]]) -> None:
        """Takes responses that have ended; called by the engine between two of its steps."""
        for row, ids in zip(rows, token_ids, strict=True):
            task = self._active["task_name"][row]
            if task in self._environments:
                self._waiting.setdefault(task, []).append((row, ids))
        for task, waiting in self._waiting.items():
            if waiting and (task not in self._latest or is_done(self._latest[task])):
                self._begin(task)

    def _begin(self, task: str) -> None:
        rows, ids = zip(*self._waiting[task], strict=True)
        self._waiting[task] = []
        texts = self._tokenizer.batch_decode(list(ids), skip_special_tokens=True)
        logs = [
            [*visible(self._active["message_log"][row]), {"role": "assistant", "content": text}]
            for row, text in zip(rows, texts, strict=True)
        ]
        infos = [self._active["extra_env_info"][row] for row in rows]
        self._latest[task] = call_remote(self._environments[task], "step", logs, infos)
        self.begun.append((list(rows), self._latest[task]))


def visible(message_log: "LLMMessageLogType") -> "LLMMessageLogType":
    """What environments see of a conversation: roles and texts."""
    return [{"role": message["role"], "content": message["content"]} for message in message_log]
