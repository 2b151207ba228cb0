"""Generation in several processes: each engine answers its share of the prompts from its own trainer's weights.

A response does not depend on which engine gives it: its draws follow from its prompt's number and its own (`draw_ids`,
`sample_index`), never from the rest of a batch.
"""

from collections.abc import Callable
from functools import cached_property, partial

import torch

from nemo_rl_cpp.config.generation import EvalGenerationConfig
from nemo_rl_cpp.data.interfaces import TokenizerType
from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_cpp.distributed.cluster import WorkerGroup
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch, offsets_of
from nemo_rl_cpp.distributed.ranks import generated_by
from nemo_rl_cpp.models.generation.interfaces import (
    GenerationDatumSpec,
    GenerationInterface,
    GenerationOutputSpec,
    Responses,
)
from nemo_rl_cpp.models.generation.native import NativeGeneration


class EngineHost:
    """What a worker with engines answers; its class says by `create_generation` how one is made."""

    @cached_property
    def _engines(self) -> dict[int, NativeGeneration]:
        return {}

    def create_generation(self, config: EvalGenerationConfig | None = None, **options: object) -> NativeGeneration:
        """An engine on this worker's weights."""
        raise NotImplementedError

    def create_engine(self, config: EvalGenerationConfig | None, options: dict[str, object]) -> int:
        """Makes an engine; its number."""
        number = max(self._engines, default=-1) + 1
        self._engines[number] = self.create_generation(config, **options)
        return number

    def drop_engine(self, number: int) -> None:
        """Gives the engine's memory back."""
        if number in self._engines:
            self._engines.pop(number).shutdown()

    def generate_with(
        self, number: int, prompts: RaggedBatch, greedy: bool, on_finished: Callable[..., None] | None = None
    ) -> Responses:
        """What the engine answers; no prompts, no answers."""
        if prompts.size == 0:
            nothing = torch.zeros(0, dtype=torch.int64)
            return Responses(
                nothing, torch.zeros(1, dtype=torch.int64), torch.zeros(0), torch.zeros(0, dtype=torch.bool)
            )
        return self._engines[number].generate(prompts, greedy=greedy, on_finished=on_finished)

    def ask_engine(self, number: int, method: str, *args: object) -> object:
        """Calls another method of the engine."""
        return getattr(self._engines[number], method)(*args)


class DistributedGeneration(GenerationInterface):
    """`NativeGeneration` in the processes of a policy.

    Args:
        group: the policies whose weights the engines read.
        config: the section `policy.generation`; None: the policy's own.
        options: for `Policy.create_generation`.
        tokenizer: whose pad token stands in padded results.
        blocks: (gradient_blocks, train_global_batch_size, whether ranks take the blocks in turns) of the policy, so that its ranks train on what they generated; None: no
            training follows.
    """

    def __init__(
        self,
        group: WorkerGroup,
        config: EvalGenerationConfig | None,
        options: dict[str, object],
        tokenizer: TokenizerType | None,
        blocks: tuple[int | None, int, bool] | None = None,
    ) -> None:
        self.group, self.config, self.tokenizer, self.blocks = group, config, tokenizer, blocks
        self._number = group.call_all("create_engine", config, options)[0]
        self._next_draw_id = 0
        self.reports_finished = group.cluster.workers.tells_events

    def generate(
        self, data: RaggedBatch | BatchedDataDict[GenerationDatumSpec], greedy: bool = False,
        on_finished: Callable[[list[int], list[list[int]]], None] | None = None,
    ) -> Responses | BatchedDataDict[GenerationOutputSpec]:  # fmt: skip
        """As `NativeGeneration.generate`. Prompts go to the engines in about equal numbers of tokens, equal ones to one engine. The
        processes that have slices of one model answer the same prompts, step by step together."""
        batch = data if isinstance(data, RaggedBatch) else RaggedBatch.of(data)
        batch = self._with_draws(batch)
        shares = self._shares(batch)
        told = [None if on_finished is None else partial(_told, on_finished, rows) for rows in shares]
        size = self.group.tensor_size
        calls = [call for rows in shares for call in [(self._number, select(batch, rows), greedy)] * size]
        by_worker = [listener for first in told for listener in (first, *[None] * (size - 1))]
        answers = self.group.call_each("generate_with", calls, "on_finished", by_worker)
        responses = self._joined(shares, self.group.first_of_groups(answers))
        return (
            responses
            if isinstance(data, RaggedBatch)
            else responses.padded(batch, getattr(self.tokenizer, "pad_token_id", None))
        )

    def _shares(self, batch: RaggedBatch) -> list[list[int]]:
        """The rows of each engine."""
        return generated_by(batch, self.group.dp_size, *(self.blocks or (None, batch.size)))

    def _joined(self, shares: list[list[int]], parts: list[Responses]) -> Responses:
        return joined(shares, parts)

    def _with_draws(self, batch: RaggedBatch) -> RaggedBatch:
        """Rows without numbers of their own get them here, as one engine would give them."""
        if "draw_ids" in batch.samples:
            return batch
        batch, first = batch.copy(), self._next_draw_id
        self._next_draw_id += batch.size
        batch.samples["draw_ids"] = torch.arange(first, first + batch.size)
        return batch

    def _ask(self, method: str, *args: object) -> list:
        return self.group.call_all("ask_engine", self._number, method, *args)

    def prepare_for_generation(self) -> bool:
        """As `NativeGeneration`'s."""
        return all(self._ask("prepare_for_generation"))

    def finish_generation(self) -> bool:
        """As `NativeGeneration`'s."""
        return all(self._ask("finish_generation"))

    def invalidate_kv_cache(self) -> bool:
        """Forgets cached keys and values in all engines."""
        return any(self._ask("invalidate_kv_cache"))

    def weight_digest(self) -> str:
        """That of the weights that every engine reads."""
        return self.group.call_for_one_value("ask_engine", self._number, "weight_digest")

    def get_logger_metrics(self) -> dict[str, float]:
        """Sums over all engines; the peak of blocks is the largest, the mean batch size the sum of means."""
        each = self.group.first_of_groups(self._ask("get_logger_metrics"))
        return {name: (max if name == "peak_blocks" else sum)(m[name] for m in each) for name in each[0]}

    def shutdown(self) -> bool:
        """Gives the memory of all engines back. Safe to call twice."""
        self.group.call_all("drop_engine", self._number)
        return True

    def clear_logger_metrics(self) -> None:
        """Begins the sums again."""
        self._ask("clear_logger_metrics")


def _told(
    on_finished: Callable[[list[int], list[list[int]]], None], share: list[int], rows: list[int], ids: list[list[int]]
) -> None:
    on_finished([share[row] for row in rows], ids)


def select(batch: RaggedBatch, rows: list[int]) -> RaggedBatch:
    """These samples of a batch of prompts, with all that the batch says of each."""
    index = torch.tensor(rows, dtype=torch.int64)
    taken = torch.zeros(batch.size, dtype=torch.bool)
    taken[index] = True
    tokens = {name: value[batch.by_token(taken)] for name, value in batch.tokens.items()}
    samples = {
        name: batch.of_samples(value, rows)
        for name, value in batch.samples.items()
        if name in GenerationDatumSpec.__annotations__ or isinstance(value, torch.Tensor)
    }
    return RaggedBatch(offsets_of(batch.lengths[index]), tokens, samples, pad_token_id=batch.pad_token_id)


def joined(shares: list[list[int]], parts: list[Responses]) -> Responses:
    """The responses of all engines in the order of the batch; `shares[r]` are the rows that parts[r] answers."""
    place = torch.empty(sum(map(len, shares)), dtype=torch.int64)
    place[torch.tensor([row for rows in shares for row in rows], dtype=torch.int64)] = torch.arange(len(place))
    order = place.tolist()
    ids = [row for part in parts for row in part.rows(part.token_ids)]
    logprobs = [row for part in parts for row in part.rows(part.logprobs)]
    truncated = torch.cat([part.truncated for part in parts])
    lengths = torch.cat([part.lengths for part in parts])
    return Responses(
        torch.cat([ids[i] for i in order]), offsets_of(lengths[place]), torch.cat([logprobs[i] for i in order]), truncated[place]
    )  # fmt: skip
