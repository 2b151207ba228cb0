"""One turn of a rollout: generate, append, let the environments answer, append their observations."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_cpp.environments.interfaces import Environment, EnvironmentReturn, WeightedParts, checked_return
from nemo_rl_cpp.environments.remote import answer_of, call_remote
from nemo_rl_cpp.experience.early_scoring import visible
from nemo_rl_cpp.models.generation.interfaces import Responses

if TYPE_CHECKING:
    from nemo_rl_cpp.data.interfaces import DatumSpec, LLMMessageLogType, TokenizerType
    from nemo_rl_cpp.models.generation.interfaces import GenerationDatumSpec, GenerationInterface, GenerationOutputSpec


def generate_responses(
    policy_generation: "GenerationInterface",
    generation_input_data: "BatchedDataDict[GenerationDatumSpec]",
    batch: "BatchedDataDict[DatumSpec]",
    tokenizer: "TokenizerType",
    input_lengths: torch.Tensor,
    include_logprobs: bool = True,
    greedy: bool = False,
) -> "tuple[BatchedDataDict[DatumSpec], list[torch.Tensor], dict[str, float | int]]":
    """Generates once for every row and appends the assistant's messages to `batch["message_log"]`, in place.

    A message holds the text without special tokens, `token_ids`, and with `include_logprobs` `generation_logprobs`.
    `batch["truncated"]` [B] says which responses ran out of room, where the engine reports it.

    Returns (batch, the generated ids of each row, {"mean_generation_length", "total_generated_tokens"}).
    """
    generation_input_data["stop_strings"] = batch.get("stop_strings", [None] * len(input_lengths))
    outputs = policy_generation.generate(generation_input_data, greedy=greedy)
    return attach_responses(outputs, batch, tokenizer, input_lengths, include_logprobs)


def attach_responses(
    outputs: "Responses | BatchedDataDict[GenerationOutputSpec]",
    batch: "BatchedDataDict[DatumSpec]",
    tokenizer: "TokenizerType",
    input_lengths: torch.Tensor,
    include_logprobs: bool = True,
) -> "tuple[BatchedDataDict[DatumSpec], list[torch.Tensor], dict[str, float | int]]":
    """Appends what an engine generated to the message logs; see `generate_responses`."""
    responses = Responses.of(outputs, input_lengths)
    generated = responses.rows(responses.token_ids)
    texts = tokenizer.batch_decode(generated, skip_special_tokens=True)
    for log, text, ids in zip(batch["message_log"], texts, generated, strict=True):
        log.append({"role": "assistant", "content": text, "token_ids": ids})
    if include_logprobs and responses.logprobs is not None:
        for log, logprobs in zip(batch["message_log"], responses.rows(responses.logprobs), strict=True):
            log[-1]["generation_logprobs"] = logprobs
    if responses.truncated is not None:
        batch["truncated"] = responses.truncated
    lengths = responses.lengths
    metrics = {
        "mean_generation_length": lengths.float().mean().item(),
        "total_generated_tokens": int(lengths.sum().item()),
    }
    return batch, generated, metrics


def calculate_rewards(
    batch: "BatchedDataDict[DatumSpec]",
    task_to_env: Mapping[str, Environment],
    begun: Sequence[tuple[list[int], object]] = (),
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
        raise _MixedRewards("some environments of this batch give one reward, others a dictionary of them")
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


class _MixedRewards(ValueError, AssertionError):
    """NeMo RL raises an AssertionError here."""


class TooLongError(ValueError, AssertionError):
    """A response ends beyond the limit of a conversation: two settings contradict each other. NeMo RL raises an AssertionError."""


class Observed(NamedTuple):
    """What appending an observation came to."""

    tokens: int
    overflowed: bool


def append_observation(
    message_log: "LLMMessageLogType",
    observation: dict[str, str],
    tokenizer: "TokenizerType",
    used_tokens: int,
    max_seq_len: int,
) -> Observed:
    """Appends the environment's message, tokenised as it is (no chat template), as far as `max_seq_len` allows.

    An observation that reaches `max_seq_len`, even one that just fits, overflows: the conversation cannot go on.

    Raises TooLongError where prompt and response alone are longer than `max_seq_len`.
    """
    ids = tokenizer(observation["content"], return_tensors="pt", add_special_tokens=False)["input_ids"][0]
    ids = ids.to(torch.int64)  # some tokenizers give floats for an empty text
    overflowed = used_tokens + len(ids) >= max_seq_len
    if overflowed:
        if used_tokens > max_seq_len:
            raise TooLongError(
                f"prompt and response have {used_tokens} tokens, more than max_seq_len {max_seq_len}: set "
                "policy.generation.vllm_cfg.max_model_len to at most policy.max_total_sequence_length"
            )
        ids = ids[: max_seq_len - used_tokens]
    message_log.append({"role": observation["role"], "content": observation["content"], "token_ids": ids})
    return Observed(len(ids), overflowed)
