"""The state of a batch of conversations, turn after turn."""

from typing import TYPE_CHECKING, NamedTuple

import torch

from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch, offsets_of
from nemo_rl_cpp.environments.interfaces import EnvironmentReturn, WeightedParts
from nemo_rl_cpp.experience.rollout_metrics import SampleStats
from nemo_rl_cpp.experience.turns import append_observation, attach_responses

if TYPE_CHECKING:
    from nemo_rl_cpp.data.interfaces import DatumSpec, TokenizerType
    from nemo_rl_cpp.models.generation.interfaces import GenerationOutputSpec, Responses

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

    def __init__(self, batch: "BatchedDataDict[DatumSpec]", tokenizer: "TokenizerType", max_seq_len: int) -> None:
        size = len(batch["message_log"])
        self.batch = batch
        self.tokenizer = tokenizer
        self.max_seq_len = max_seq_len
        self.active = list(range(size))
        self.stats = [SampleStats() for _ in range(size)]
        self.rewards: dict[str, torch.Tensor] = {}
        self.weights: dict[str, float] = {}
        self.stop_strings = list(batch.get("stop_strings") or [None] * size)
        self.extra_env_info = list(batch["extra_env_info"])

    def begin(self) -> Turn:
        """The conversations still going, and their tokens as the engine takes them."""
        keys = ["message_log", "task_name", *PASSED_TO_GENERATION]
        active = BatchedDataDict({key: self.batch[key] for key in keys if key in self.batch}).select_indices(
            self.active
        )
        active["stop_strings"] = [self.stop_strings[row] for row in self.active]
        active["extra_env_info"] = [self.extra_env_info[row] for row in self.active]
        logs = active["message_log"]
        lengths = torch.tensor([sum(len(message["token_ids"]) for message in log) for log in logs], dtype=torch.int64)
        ids = torch.cat([message["token_ids"] for log in logs for message in log])
        of_rows = {key: active[key] for key in ("stop_strings", *PASSED_TO_GENERATION) if key in active}
        inputs = RaggedBatch(
            offsets_of(lengths), {"input_ids": ids}, of_rows, pad_token_id=self.tokenizer.pad_token_id or 0
        )
        return Turn(active, inputs)

    def respond(self, turn: Turn, outputs: "Responses | BatchedDataDict[GenerationOutputSpec]") -> None:
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
        for i, row in enumerate(self.active):
            stats, log = self.stats[row], self.batch["message_log"][row]
            used = int(turn.inputs.lengths[i]) + len(log[-1]["token_ids"])
            observed = append_observation(log, answer.observations[i], self.tokenizer, used, self.max_seq_len)
            stats.env_tokens += observed.tokens
            stats.truncated |= observed.overflowed
            stats.done = terminated[i] or observed.overflowed
            if stats.done:
                continue
            going_on.append(row)
            self.stop_strings[row] = answer.next_stop_strings[i]
            if answer.metadata[i] is not None:
                self.extra_env_info[row] = answer.metadata[i]
        self.active = going_on

    def _add_rewards(self, rewards: "torch.Tensor | dict[str, torch.Tensor]") -> None:
        components = rewards if isinstance(rewards, dict) else {"": rewards}
        if isinstance(rewards, WeightedParts):
            self.weights |= {name.removeprefix("reward/"): weight for name, weight in rewards.weights.items()}
        for name, values in components.items():
            total = self.rewards.setdefault(name.removeprefix("reward/"), torch.zeros(len(self.stats)))
            total[self.active] += values

    def finish(self) -> "BatchedDataDict[DatumSpec]":
        """The batch with `total_reward`, `reward/<component>`, `truncated` and the last `stop_strings`; marks what ran out of turns."""
        for row in self.active:
            self.stats[row].max_turns_reached = True
        self.batch["extra_env_info"] = self.extra_env_info
        self.batch["stop_strings"] = self.stop_strings
        self.batch |= {f"reward/{name}": values for name, values in self.rewards.items() if name}
        weighted = (values * self.weights.get(name, 1.0) for name, values in self.rewards.items())
        self.batch["total_reward"] = sum(weighted, torch.zeros(len(self.stats)))
        self.batch["truncated"] = torch.tensor([stats.truncated for stats in self.stats], dtype=torch.bool)
        return self.batch
