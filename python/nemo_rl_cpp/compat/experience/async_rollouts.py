"""Rollouts in which every sample goes its own way: coroutines over the same turns.

A sample that is through with a turn does not wait for the others: what is asked for while the engine (or the
environments) are at work forms the next call.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_cpp.environments.interfaces import EnvironmentReturn, WeightedParts
from nemo_rl_cpp.experience.rollout_metrics import SampleStats, environment_metrics, rollout_metrics
from nemo_rl_cpp.experience.rollouts import Conversations
from nemo_rl_cpp.experience.turns import attach_responses, calculate_rewards

if TYPE_CHECKING:
    from nemo_rl_cpp.data.interfaces import DatumSpec, TokenizerType
    from nemo_rl_cpp.environments.interfaces import EnvironmentInterface
    from nemo_rl_cpp.models.generation.interfaces import GenerationDatumSpec, GenerationInterface, GenerationOutputSpec

T = TypeVar("T")


async def _generate(
    engine: "GenerationInterface", data: "BatchedDataDict[GenerationDatumSpec]", greedy: bool
) -> "BatchedDataDict[GenerationOutputSpec]":
    """From `generate_async` (yields (row, output) in any order) where the engine has it, else on a thread."""
    if not hasattr(engine, "generate_async"):
        return await asyncio.to_thread(engine.generate, data, greedy=greedy)
    rows = [item async for item in engine.generate_async(data, greedy=greedy)]
    return BatchedDataDict.from_batches([output for _, output in sorted(rows, key=lambda item: item[0])])


async def generate_responses_async(
    policy_generation: "GenerationInterface",
    generation_input_data: "BatchedDataDict[GenerationDatumSpec]",
    batch: "BatchedDataDict[DatumSpec]",
    tokenizer: "TokenizerType",
    input_lengths: torch.Tensor,
    include_logprobs: bool = True,
    greedy: bool = False,
) -> "tuple[BatchedDataDict[DatumSpec], list[torch.Tensor], dict[str, float | int]]":
    """As `generate_responses`; the engine's `generate_async` is used where it has one."""
    generation_input_data["stop_strings"] = batch.get("stop_strings", [None] * len(input_lengths))
    outputs = await _generate(policy_generation, generation_input_data, greedy)
    return attach_responses(outputs, batch, tokenizer, input_lengths, include_logprobs)


async def async_generate_response_for_sample_turn(
    policy_generation: "GenerationInterface",
    sample_message_log: list[dict],
    sample_stop_strings: list[str] | None,
    tokenizer: "TokenizerType",
    max_seq_len: int,
    greedy: bool = False,
    *,
    sample_multimodal_data: dict[str, Any] | None = None,
    deduplicate_multimodal_data: bool = False,
) -> tuple[list[dict], torch.Tensor, torch.Tensor, dict[str, float]]:
    """One generation for one conversation.

    Returns (the message log with the response, generated ids [S], input_lengths [1], generation metrics).
    """
    if sample_multimodal_data:
        raise ValueError("multimodal samples are not supported: sample_multimodal_data must be empty")
    sample = BatchedDataDict(
        message_log=[sample_message_log], stop_strings=[sample_stop_strings], extra_env_info=[None]
    )
    turn = Conversations(sample, tokenizer, max_seq_len).begin()
    lengths = turn.inputs["input_lengths"]
    batch, generated, metrics = await generate_responses_async(
        policy_generation, turn.inputs, turn.active, tokenizer, lengths, greedy=greedy
    )
    return batch["message_log"][0], generated[0], lengths, metrics


class _Coalescer:
    """Answers single requests together: those that come while a call runs form the next one."""

    def __init__(self, call: Callable[[list[Any]], list[Any]]) -> None:
        self._call = call
        self._waiting: list[tuple[Any, asyncio.Future]] = []
        self._worker: asyncio.Task | None = None

    async def __call__(self, request: Any) -> Any:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        await asyncio.sleep(0)  # let the others of this moment ask as well
        while self._waiting:
            taken, self._waiting = self._waiting, []
            try:
                results = await asyncio.to_thread(self._call, [request for request, _ in taken])
            except Exception as error:
                for _, future in taken:
                    if not future.done():
                        future.set_exception(error)
            else:
                for (_, future), result in zip(taken, results):
                    if not future.done():
                        future.set_result(result)
        self._worker = None


class _Services:
    """Engine and environments as the samples of one run share them."""

    def __init__(
        self,
        engine: "GenerationInterface",
        task_to_env: "dict[str, EnvironmentInterface]",
        tokenizer: "TokenizerType",
        greedy: bool,
    ) -> None:
        self._engine = engine
        self._greedy = greedy
        self._pad = {"input_ids": tokenizer.pad_token_id}
        self._task_to_env = task_to_env
        self._generations = _Coalescer(self._generate_together)
        self.rewards = _Coalescer(self._answer_together)

    async def generate(self, inputs: BatchedDataDict) -> BatchedDataDict:
        """The response to one row."""
        if hasattr(self._engine, "generate_async"):
            return await _generate(self._engine, inputs, self._greedy)
        return await self._generations(inputs)

    def _generate_together(self, requests: list[BatchedDataDict]) -> list[BatchedDataDict]:
        outputs = self._engine.generate(BatchedDataDict.from_batches(requests, self._pad), greedy=self._greedy)
        return [outputs.slice(i, i + 1) for i in range(len(requests))]

    def _answer_together(self, requests: list[BatchedDataDict]) -> list[EnvironmentReturn]:
        # only what environments read: other keys need not agree between samples
        keys = ("message_log", "task_name", "extra_env_info")
        answer = calculate_rewards(
            BatchedDataDict.from_batches([{key: request[key] for key in keys} for request in requests]),
            self._task_to_env,
        )
        return [_row(answer, i) for i in range(len(requests))]


def _row(answer: EnvironmentReturn, i: int) -> EnvironmentReturn:
    one = slice(i, i + 1)
    rewards = answer.rewards
    return EnvironmentReturn(
        answer.observations[one],
        answer.metadata[one],
        answer.next_stop_strings[one],
        WeightedParts.like(rewards, {name: values[one] for name, values in rewards.items()})
        if isinstance(rewards, dict)
        else rewards[one],
        answer.terminateds[one],
        None if answer.answers is None else answer.answers[one],
    )


async def _roll_out(sample: Conversations, services: _Services, max_rollout_turns: int) -> BatchedDataDict:
    for _ in range(max_rollout_turns):
        if not sample.active:
            break
        turn = sample.begin()
        sample.respond(turn, await services.generate(turn.inputs))
        sample.observe(turn, await services.rewards(turn.active))
    return sample.finish()


async def run_sample_multi_turn_rollout(
    sample_idx: int,
    initial_sample_state: dict,
    policy_generation: "GenerationInterface",
    tokenizer: "TokenizerType",
    task_to_env: "dict[str, EnvironmentInterface]",
    max_seq_len: int,
    max_rollout_turns: int = 999999,
    greedy: bool = False,
    deduplicate_multimodal_data: bool = False,
) -> tuple[dict, dict[str, Any]]:
    """Rolls one sample out: (its final state with `total_reward`, its counts).

    `initial_sample_state` holds message_log, extra_env_info, task_name, and optionally stop_strings, idx, draw_ids,
    sample_index and stream.
    """
    batch = BatchedDataDict({key: _as_row(value) for key, value in initial_sample_state.items()})
    sample = Conversations(batch, tokenizer, max_seq_len)
    final = await _roll_out(sample, _Services(policy_generation, task_to_env, tokenizer, greedy), max_rollout_turns)
    return {key: value[0] for key, value in final.items()}, _sample_metrics(sample.stats[0], final)


def _as_row(value: Any) -> Any:
    return value.reshape(1, *value.shape) if torch.is_tensor(value) else [value]


def _sample_metrics(stats: SampleStats, final: BatchedDataDict) -> dict[str, Any]:
    return {
        "turn_count": stats.turns,
        "total_tokens": stats.total_tokens,
        "assistant_tokens": stats.assistant_tokens,
        "env_tokens": stats.env_tokens,
        "terminated": stats.done,
        "truncated": stats.truncated,
        "max_turns_reached": stats.max_turns_reached,
        "total_reward": float(final["total_reward"][0]),
    }


def run_async_multi_turn_rollout(
    policy_generation: "GenerationInterface",
    input_batch: "BatchedDataDict[DatumSpec]",
    tokenizer: "TokenizerType",
    task_to_env: "dict[str, EnvironmentInterface]",
    max_seq_len: int,
    max_rollout_turns: int = 999999,
    greedy: bool = False,
    deduplicate_multimodal_data: bool = False,
) -> "tuple[BatchedDataDict[DatumSpec], dict[str, Any]]":
    """As `run_multi_turn_rollout`, every sample at its own pace; the same result, since draws do not depend on the batch."""
    samples = [
        Conversations(input_batch.select_indices([i]), tokenizer, max_seq_len)
        for i in range(len(input_batch["message_log"]))
    ]

    async def all_of_them() -> list[BatchedDataDict]:
        services = _Services(policy_generation, task_to_env, tokenizer, greedy)
        return await asyncio.gather(*(_roll_out(sample, services, max_rollout_turns) for sample in samples))

    finished = _run(all_of_them)
    batch = input_batch.copy()
    # components that an environment never gave a sample count 0
    names = {key: None for one in finished for key in one if key.startswith("reward/")}
    rows = [{**{name: torch.zeros(1) for name in names}, **one} for one in finished]
    for key in ("extra_env_info", *names, "total_reward", "truncated"):
        values = [row[key] for row in rows]
        batch[key] = torch.cat(values) if torch.is_tensor(values[0]) else [item for value in values for item in value]
    stats = [sample.stats[0] for sample in samples]
    return batch, rollout_metrics(stats) | environment_metrics(task_to_env)


def _run(main: Callable[[], Any]) -> Any:
    """Runs a coroutine to its end, also from within a running event loop (a notebook), then on a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main())
    result: list[Any] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            result.append(asyncio.run(main()))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]
