"""Rollouts: draw prompts, generate, let the environment answer, and again until the conversation ends.

Tokens in, tokens out: the ids that a sample is trained on are the ids that were sampled; text is only what
environments and people read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from nemo_rl_cpp.data.interfaces import TokenizerType, tokens_of
from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch, offsets_of
from nemo_rl_cpp.environments.interfaces import Environment, EnvironmentReturn, WeightedParts
from nemo_rl_cpp.models.generation.interfaces import Answer, GenerationInterface
from nemo_rl_cpp.rollouts.agent_rollouts import are_made_by_agents, run_agent_rollouts
from nemo_rl_cpp.rollouts.batches import DatumBatch
from nemo_rl_cpp.rollouts.rollout_metrics import SampleStats, environment_metrics, rollout_metrics
from nemo_rl_cpp.rollouts.turns import (
    EarlyScoring,
    append_observation,
    attach_responses,
    calculate_rewards,
    tokenize_observations,
)

if TYPE_CHECKING:
    from nemo_rl_cpp.algorithms.train_state import TrainState


PASSED_TO_GENERATION = ("draw_ids", "sample_index", "stream")
"""Keys of a batch that go to the engine with the prompts: they decide its random draws."""


class Turn(NamedTuple):
    """The conversations that take part in a turn.

    active: their rows, with stop strings and environment state as of now.
    inputs: what the engine takes.
    """

    active: BatchedDataDict
    inputs: RaggedBatch


class Conversations:
    """Conversations between turns. A turn is `begin`, generation, `respond`, the environments' answer, `observe`."""

    def __init__(self, batch: DatumBatch, tokenizer: TokenizerType, max_seq_len: int) -> None:
        size = len(batch["message_log"])
        self.batch, self.tokenizer, self.max_seq_len = batch, tokenizer, max_seq_len
        self.active = list(range(size))
        self.stats = [SampleStats() for _ in range(size)]
        self.rewards: dict[str, torch.Tensor] = {}
        self.weights: dict[str, float] = {}
        self.stop_strings = list(batch.get("stop_strings") or [None] * size)
        self.extra_env_info = list(batch["extra_env_info"])
        self.masked: dict[int, bool] = {}

    def begin(self) -> Turn:
        """The conversations still going, and their tokens as the engine takes them."""
        keys = ["message_log", "task_name", *PASSED_TO_GENERATION]
        known = BatchedDataDict({key: self.batch[key] for key in keys if key in self.batch})
        active = known.select_indices(self.active)
        active["stop_strings"] = [self.stop_strings[row] for row in self.active]
        active["extra_env_info"] = [self.extra_env_info[row] for row in self.active]
        logs = active["message_log"]
        lengths = torch.tensor([tokens_of(log) for log in logs], dtype=torch.int64)
        ids = torch.cat([message["token_ids"] for log in logs for message in log])
        of_rows = {key: active[key] for key in ("stop_strings", *PASSED_TO_GENERATION) if key in active}
        inputs = RaggedBatch(
            offsets_of(lengths), {"input_ids": ids}, of_rows, pad_token_id=self.tokenizer.pad_token_id or 0
        )
        return Turn(active, inputs)

    def respond(self, turn: Turn, outputs: Answer) -> None:
        """Appends the responses."""
        _, generated, _ = attach_responses(outputs, turn.active, self.tokenizer, turn.inputs.lengths)
        cut = turn.active["truncated"].tolist() if "truncated" in turn.active else [False] * len(generated)
        for row, ids, truncated in zip(self.active, generated, cut):
            self.stats[row].turns += 1
            self.stats[row].assistant_tokens += len(ids)
            self.stats[row].truncated |= truncated

    def observe(self, turn: Turn, answer: EnvironmentReturn) -> None:
        """Adds rewards and observations, and keeps those that go on."""
        self._add_rewards(answer.rewards)
        terminated = answer.terminateds.bool().tolist()
        going_on = []
        ids = tokenize_observations(answer.observations, self.tokenizer)
        prompts = turn.inputs.lengths.tolist()
        for i, row in enumerate(self.active):
            stats, log = self.stats[row], self.batch["message_log"][row]
            used = prompts[i] + log[-1]["token_ids"].numel()
            observed = append_observation(log, answer.observations[i], ids[i], used, self.max_seq_len)
            stats.env_tokens += observed.tokens
            stats.truncated |= observed.overflowed
            stats.done = terminated[i] or observed.overflowed
            self._mask(row, answer.metadata[i])
            if stats.done:
                continue
            going_on.append(row)
            self.stop_strings[row] = answer.next_stop_strings[i]
            if answer.metadata[i] is not None:
                self.extra_env_info[row] = answer.metadata[i]
        self.active = going_on

    def _mask(self, row: int, metadata: object) -> None:
        """Takes down what the environment says of leaving the conversation out; its last word counts."""
        if not isinstance(metadata, Mapping) or "mask_sample" not in metadata:
            return
        if metadata["mask_sample"] not in (True, False):
            raise ValueError(
                f"the environment returned mask_sample {metadata['mask_sample']!r} in its metadata; it must be True or False"
            )
        self.masked[row] = bool(metadata["mask_sample"])

    def _add_rewards(self, rewards: torch.Tensor | dict[str, torch.Tensor]) -> None:
        components = rewards if isinstance(rewards, dict) else {"": rewards}
        if isinstance(rewards, WeightedParts):
            self.weights |= {name.removeprefix("reward/"): weight for name, weight in rewards.weights.items()}
        for name, values in components.items():
            total = self.rewards.setdefault(
                name.removeprefix("reward/"), torch.zeros(len(self.stats), dtype=torch.float32)
            )
            total[self.active] += values

    def finish(self) -> DatumBatch:
        """The batch with `total_reward`, `reward/<component>`, `truncated`, the last `stop_strings`, and `mask_sample`
        bool [B] where an environment speaks of it; marks what ran out of turns."""
        for row in self.active:
            self.stats[row].max_turns_reached = True
        self.batch["extra_env_info"] = self.extra_env_info
        self.batch["stop_strings"] = self.stop_strings
        self.batch |= {f"reward/{name}": values for name, values in self.rewards.items() if name}
        weighted = (values * self.weights.get(name, 1.0) for name, values in self.rewards.items())
        self.batch["total_reward"] = sum(weighted, torch.zeros(len(self.stats), dtype=torch.float32))
        self.batch["truncated"] = torch.tensor([stats.truncated for stats in self.stats], dtype=torch.bool)
        if self.masked:
            self.batch["mask_sample"] = torch.tensor([self.masked.get(row, False) for row in range(len(self.stats))])
        return self.batch


def repeat_prompts(
    batch: DatumBatch, num_generations: int, first_draw_id: int = 0, stream: str = "train"
) -> DatumBatch:
    """Every prompt `num_generations` times, side by side, with what tells the copies apart.

    Adds int64 [B * num_generations]: `group_id` (which prompt of this batch), `draw_ids` (`first_draw_id` + group_id:
    it counts prompts over the whole run) and `sample_index` (which of the copies); and `stream`, a list.
    """
    if num_generations < 1:
        raise ValueError(f"num_generations_per_prompt is {num_generations}; it must be at least 1")
    logs = batch["message_log"]
    repeated = type(batch)({key: value for key, value in batch.items() if key != "message_log"}).repeat_interleave(
        num_generations
    )
    # each copy has messages of its own; their token ids, which nothing writes into, are shared
    repeated["message_log"] = [[dict(message) for message in log] for log in logs for _ in range(num_generations)]
    repeated["group_id"] = torch.arange(batch.size).repeat_interleave(num_generations)
    repeated["draw_ids"] = repeated["group_id"] + first_draw_id
    repeated["sample_index"] = torch.arange(num_generations).repeat(batch.size)
    repeated["stream"] = [stream] * repeated.size
    return repeated


def run_multi_turn_rollout(
    policy_generation: GenerationInterface, input_batch: DatumBatch, tokenizer: TokenizerType, task_to_env: Mapping[str, Environment],
    max_seq_len: int, max_rollout_turns: int = 999999, greedy: bool = False,
) -> tuple[DatumBatch, dict[str, float]]:  # fmt: skip
    """Rolls every conversation of the batch out to its end, or for `max_rollout_turns` turns.

    Messages are appended to the rows' message logs in place. The result has, besides the input's keys,
    `total_reward` float32 [B] (summed over turns; components under `reward/<name>`) and `truncated` bool [B]: a
    response ran out of room, or an observation did not fit. `draw_ids`, `sample_index` and `stream` of the batch go
    to the engine. Environments that score rows alone do so while other rows are still generated, where the engine says
    which have ended. Environments whose agents make the rollouts (`runs_rollouts`) are let do so.

    Returns (batch, rollout metrics with those of the environments).
    """
    if are_made_by_agents(input_batch, task_to_env):
        return run_agent_rollouts(policy_generation, input_batch, tokenizer, task_to_env, greedy)
    conversations = Conversations(input_batch.copy(), tokenizer, max_seq_len)
    for _ in range(max_rollout_turns):
        if not conversations.active:
            break
        turn = conversations.begin()
        early = EarlyScoring(turn.active, tokenizer, task_to_env)
        tells = getattr(policy_generation, "reports_finished", False) and early.useful
        beside = {"on_finished": early.finished} if tells else {}
        conversations.respond(turn, policy_generation.generate(turn.inputs, greedy=greedy, **beside))
        conversations.observe(turn, calculate_rewards(turn.active, task_to_env, early.begun))
    batch = conversations.finish()
    return batch, rollout_metrics(conversations.stats) | environment_metrics(task_to_env)


class PromptSource:
    """Draws batches from a data loader and repeats every prompt G times.

    The loader begins again when it ends, so a step that needs more prompts than an epoch has left goes on with the next
    one. Every prompt drawn gets the next draw id of the run (`state` counts them and is saved), which keys the random
    numbers of its generations and serves as its `group_id`.
    """

    def __init__(
        self, loader: Iterable[BatchedDataDict], num_generations: int, state: TrainState, section: str = "grpo"
    ) -> None:
        """`section` is the training loop's, which messages name."""
        self.loader, self.section = loader, section
        self.num_generations = num_generations
        self._state = state
        self._batches: Iterator[BatchedDataDict] | None = None
        self._drawn = 0
        self._finished_epochs = 0

    def next(self) -> BatchedDataDict:
        """The next prompts, each G times. Keys beyond the loader's: see `repeat_prompts`; `group_id` is the draw id."""
        batch = self._draw()
        repeated = repeat_prompts(batch, self.num_generations, self._state.draw(batch.size), stream="train")
        repeated["group_id"] = repeated["draw_ids"].clone()  # unique over the run, also when groups outlive their step
        return repeated

    def pop_finished_epochs(self) -> int:
        """Epochs that ended since the last call."""
        epochs, self._finished_epochs = self._finished_epochs, 0
        return epochs

    def _draw(self) -> BatchedDataDict:
        for _ in range(2):
            if self._batches is None:
                self._batches, self._drawn = iter(self.loader), 0
            epoch = getattr(self.loader, "epoch", None)
            batch = next(self._batches, None)
            if batch is None:
                self._end_epoch()
                continue
            self._drawn += 1
            if self._was_last(epoch):
                self._end_epoch()
            return batch
        raise ValueError(
            f"the data loader gives no batches: there are fewer prompts than {self.section}.num_prompts_per_step"
        )

    def _was_last(self, epoch_before: int | None) -> bool:
        """Whether the batch just drawn ended its epoch. Our loader says so; of another one only the length is known; one
        without a length is found to have ended at the next draw."""
        if epoch_before is not None:
            return self.loader.epoch != epoch_before
        return hasattr(self.loader, "__len__") and self._drawn >= len(self.loader)

    def _end_epoch(self) -> None:
        self._batches = None
        self._finished_epochs += 1
