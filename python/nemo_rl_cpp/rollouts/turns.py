"""One turn of a rollout: generate, append, let the environments answer, also beside generation, append their observations."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from nemo_rl_cpp.data.interfaces import LLMMessageLogType, TokenizerType
from nemo_rl_cpp.data.texts import text_of
from nemo_rl_cpp.distributed.futures import Future, is_done
from nemo_rl_cpp.environments.interfaces import Environment, EnvironmentReturn, WeightedParts, checked_return
from nemo_rl_cpp.environments.remote import answer_of, call_remote
from nemo_rl_cpp.models.generation.interfaces import Answer, GenerationInterface, PaddedPrompts, Responses
from nemo_rl_cpp.rollouts.batches import DatumBatch

_ENOUGH_IDS = 64  # behind a token with a text, and one of so many has one


def generate_responses(
    policy_generation: GenerationInterface, generation_input_data: PaddedPrompts, batch: DatumBatch, tokenizer: TokenizerType,
    input_lengths: torch.Tensor, include_logprobs: bool = True, greedy: bool = False,
) -> tuple[DatumBatch, list[torch.Tensor], dict[str, float | int]]:  # fmt: skip
    """Generates once for every row and appends the assistant's messages to `batch["message_log"]`, in place.

    A message holds the text without special tokens, `token_ids`, and with `include_logprobs` `generation_logprobs`.
    `batch["truncated"]` [B] says which responses ran out of room, where the engine reports it.

    Returns (batch, the generated ids of each row, {"mean_generation_length", "total_generated_tokens"}).
    """
    generation_input_data["stop_strings"] = batch.get("stop_strings", [None] * len(input_lengths))
    outputs = policy_generation.generate(generation_input_data, greedy=greedy)
    return attach_responses(outputs, batch, tokenizer, input_lengths, include_logprobs)


def attach_responses(
    outputs: Answer, batch: DatumBatch, tokenizer: TokenizerType, input_lengths: torch.Tensor, include_logprobs: bool = True
) -> tuple[DatumBatch, list[torch.Tensor], dict[str, float | int]]:  # fmt: skip
    """Appends what an engine generated to the message logs; see `generate_responses`."""
    responses = Responses.of(outputs, input_lengths)
    generated = responses.rows(responses.token_ids)
    for log, ids in zip(batch["message_log"], generated, strict=True):
        text = text_of(tokenizer, ids.tolist(), last_ids(log))
        log.append({"role": "assistant", "content": text, "token_ids": ids})
    if include_logprobs and responses.logprobs is not None:
        for log, logprobs in zip(batch["message_log"], responses.rows(responses.logprobs), strict=True):
            log[-1]["generation_logprobs"] = logprobs
    if responses.truncated is not None:
        batch["truncated"] = responses.truncated
    mean, total = responses.lengths.float().mean().item(), int(responses.lengths.sum())
    return batch, generated, {"mean_generation_length": mean, "total_generated_tokens": total}


def calculate_rewards(
    batch: DatumBatch, task_to_env: Mapping[str, Environment], begun: Sequence[tuple[list[int], object]] = ()
) -> EnvironmentReturn:
    """Lets every row's environment (by `task_name`) answer, all environments at the same time; rows keep their order.

    Environments see only `role` and `content` of the messages, and `extra_env_info`. Rewards are float32 [B], or a
    dictionary of them when the environments give components. `begun`: rows whose answers are on their way already, with
    those answers (`EarlyScoring`).

    Raises ValueError for a task without an environment, or when some environments give components and others do not.
    """
    rows_of: dict[str, list[int]] = {}
    asked = {row for rows, _ in begun for row in rows}
    for row, task in enumerate(batch["task_name"]):
        if task not in task_to_env:
            raise ValueError(
                f"No environment found for task type: {task}; there are environments for {sorted(map(str, task_to_env))}"
            )
        if row not in asked:
            rows_of.setdefault(task, []).append(row)
    started = list(begun)
    for task, rows in rows_of.items():
        logs = [visible(batch["message_log"][row]) for row in rows]
        infos = [batch["extra_env_info"][row] for row in rows]
        started.append((rows, call_remote(task_to_env[task], "step", logs, infos)))
    # an environment may answer with a plain tuple of the same six things
    answers = []
    for rows, result in started:
        task = batch["task_name"][rows[0]] if rows else ""
        answers.append((rows, checked_return(answer_of(task_to_env.get(task), result, task), len(rows), task)))
    return _merge(answers, len(batch["message_log"]))


def _merge(parts: list[tuple[list[int], EnvironmentReturn]], size: int) -> EnvironmentReturn:
    """The environments' answers as one, in the rows' own order."""
    if len({isinstance(part.rewards, dict) for _, part in parts}) > 1:
        raise ValueError("some environments of this batch give one reward, others a dictionary of them")
    order = [row for rows, _ in parts for row in rows]

    def listed(name: str) -> list[Any]:
        result = [None] * size
        values = [v for rows, part in parts for v in (getattr(part, name) or [None] * len(rows))]
        for row, value in zip(order, values):
            result[row] = value
        return result

    def tensor(pieces: list[torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
        if not pieces:
            return torch.empty(0, dtype=dtype)
        joined = torch.cat([torch.as_tensor(piece, dtype=dtype).cpu() for piece in pieces])
        return torch.empty_like(joined).index_copy_(0, torch.tensor(order, dtype=torch.long), joined)

    rewards: torch.Tensor | dict[str, torch.Tensor]
    if parts and isinstance(parts[0][1].rewards, dict):
        names = {name: None for _, part in parts for name in part.rewards}
        rewards = {
            name: tensor([part.rewards.get(name, torch.zeros(len(rows))) for rows, part in parts], torch.float32)
            for name in names
        }
        if weighted := [part.rewards for _, part in parts if isinstance(part.rewards, WeightedParts)]:
            rewards = WeightedParts(
                rewards, {name: weight for each in weighted for name, weight in each.weights.items()}
            )
    else:
        rewards = tensor([part.rewards for _, part in parts], torch.float32)
    return EnvironmentReturn(
        observations=listed("observations"),
        metadata=listed("metadata"),
        next_stop_strings=listed("next_stop_strings"),
        rewards=rewards,
        terminateds=tensor([part.terminateds for _, part in parts]),
        answers=listed("answers"),
    )


class Observed(NamedTuple):
    """What appending an observation came to."""

    tokens: int
    overflowed: bool


def tokenize_observations(observations: Sequence[Mapping[str, str]], tokenizer: TokenizerType) -> list[torch.Tensor]:
    """The int64 token ids of each environment's message, tokenised as it is (no chat template)."""
    texts = [observation["content"] for observation in observations]
    rows = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [*torch.tensor([*chain.from_iterable(rows)], dtype=torch.int64).split([*map(len, rows)])]


def append_observation(
    message_log: LLMMessageLogType,
    observation: Mapping[str, str],
    ids: torch.Tensor,
    used_tokens: int,
    max_seq_len: int,
) -> Observed:
    """Appends the environment's message, whose token ids are `ids`, as far as `max_seq_len` allows.

    An observation that reaches `max_seq_len`, even one that just fits, overflows: the conversation cannot go on.

    Raises ValueError where prompt and response alone are longer than `max_seq_len`.
    """
    overflowed = used_tokens + len(ids) >= max_seq_len
    if overflowed:
        if used_tokens > max_seq_len:
            raise ValueError(
                f"prompt and response have {used_tokens} tokens, more than max_seq_len {max_seq_len}: set "
                "policy.generation.vllm_cfg.max_model_len to at most policy.max_total_sequence_length"
            )
        ids = ids[: max_seq_len - used_tokens]
    message_log.append({"role": observation["role"], "content": observation["content"], "token_ids": ids})
    return Observed(len(ids), overflowed)


class EarlyScoring:
    """Starts the environments' answers to single rows of one turn; `calculate_rewards` asks for the rest.

    Only environments that say so (`scores_rows_alone`) and whose calls run beside the caller (`.remote`) take part, so
    results are those of one call at the end. An environment that is at work gets what has ended meanwhile as its next call.
    """

    def __init__(self, active: DatumBatch, tokenizer: TokenizerType, task_to_env: Mapping[str, Environment]) -> None:
        self._active, self._tokenizer = active, tokenizer
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
        logs = []
        for row, own in zip(rows, ids, strict=True):
            log = self._active["message_log"][row]
            text = text_of(self._tokenizer, own, last_ids(log))
            logs.append([*visible(log), {"role": "assistant", "content": text}])
        infos = [self._active["extra_env_info"][row] for row in rows]
        self._latest[task] = call_remote(self._environments[task], "step", logs, infos)
        self.begun.append((list(rows), self._latest[task]))


def visible(message_log: LLMMessageLogType) -> LLMMessageLogType:
    """What environments see of a conversation: roles and texts."""
    return [{"role": message["role"], "content": message["content"]} for message in message_log]


def last_ids(message_log: LLMMessageLogType) -> list[int]:
    """The last token ids of a conversation, on which the text of what follows depends."""
    return torch.cat([message["token_ids"] for message in message_log])[-_ENOUGH_IDS:].tolist()
