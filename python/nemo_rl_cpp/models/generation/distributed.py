"""Generation in several processes, each with an engine for a part of the prompts. An engine reads the weights of the
trainer in its process. In a worker that only generates, it reads a copy of the weights, which refits update.

A response does not depend on which engine generates it: its sampling is seeded by the number of its prompt (`draw_ids`)
and its index among the samples of the prompt (`sample_index`), never by the other rows of a batch."""

from collections import Counter
from collections.abc import Callable
from functools import cached_property, partial
from typing import Self

import torch

from nemo_rl_cpp._native import C
from nemo_rl_cpp.config.distillation import absolute_folder
from nemo_rl_cpp.config.generation import GenerationConfig
from nemo_rl_cpp.config.policy import PolicyConfig
from nemo_rl_cpp.data.interfaces import TokenizerType
from nemo_rl_cpp.distributed.cluster import Cluster, WorkerGroup, device_for
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch, offsets_of
from nemo_rl_cpp.distributed.ranks import Ranks, connect, deal, generated_by
from nemo_rl_cpp.models.generation.base_engine import ResponseBuffer
from nemo_rl_cpp.models.generation.interfaces import (
    Answer,
    GenerationDatumSpec,
    GenerationInterface,
    OnFinished,
    Pause,
    Prompts,
    RefitRendezvous,
    RefitResult,
    Responses,
    WeightChange,
)
from nemo_rl_cpp.models.generation.native import NativeGeneration, generation_on
from nemo_rl_cpp.models.model_folder import open_model_folder
from nemo_rl_cpp.models.trained_model import DTYPES
from nemo_rl_cpp.models.weights import buffers, named_views


class EngineHost:
    """The methods by which a worker process holds generation engines. A subclass defines `create_generation`, which
    creates an engine."""

    @cached_property
    def _engines(self) -> dict[int, NativeGeneration]:
        return {}

    def create_engine(self, config: GenerationConfig | None, options: dict[str, object]) -> int:
        """Create an engine by `create_generation(config, **options)`, and return its number, by which other methods
        refer to it."""
        number = max(self._engines, default=-1) + 1
        self._engines[number] = self.create_generation(config, **options)
        return number

    def serve_engine(self, number: int, serve: Callable[[Self, NativeGeneration], NativeGeneration]) -> None:
        """Serve engine `number` over HTTP: replace it by the engine that `serve(self, engine)` returns."""
        self._engines[number] = serve(self, self._engines[number])

    def drop_engine(self, number: int) -> None:
        """Drop engine `number` and release its memory. Do nothing if it is already dropped."""
        if number in self._engines:
            self._engines.pop(number).shutdown()

    def generate_with(
        self, number: int, prompts: RaggedBatch | None, greedy: bool = False, pause: Pause | None = None,
        on_finished: OnFinished | None = None,
    ) -> Responses | None:  # fmt: skip
        """Return the responses of engine `number` to `prompts`. If any responses reach the point `pause`, they
        stop there, and the result is None once all others have ended (`NativeGeneration.generate_until`). With
        `prompts` None, continue a paused generation and return all its responses, or None if nothing is paused. `on_finished` receives the responses that end meanwhile."""
        engine = self._engines[number]
        if prompts is None:
            return engine.resume(on_finished)
        if prompts.size == 0:
            return ResponseBuffer(0, None).responses()
        if pause is None:
            return engine.generate(prompts, greedy=greedy, on_finished=on_finished)
        return engine.generate_until(prompts, pause, greedy, on_finished)

    def ask_engine(self, number: int, method: str, *args: object) -> object:
        return getattr(self._engines[number], method)(*args)


class DistributedGeneration(GenerationInterface):
    """Generation in a policy's worker processes, with the interface of `NativeGeneration`. `config` is the engines'
    section (None: `policy.generation`), `options` are arguments of `Policy.create_generation`. Each rank generates the
    samples on which it will train. `blocks` are the settings by which `ranks.generated_by` assigns samples to ranks:
    (gradient_blocks, train_global_batch_size, whether blocks are assigned round-robin); None: no training follows."""

    def __init__(
        self,
        group: WorkerGroup,
        config: GenerationConfig | None,
        options: dict[str, object],
        tokenizer: TokenizerType | None,
        blocks: tuple[int | None, int, bool] | None = None,
    ) -> None:
        self.group, self.config, self.tokenizer, self.blocks = group, config, tokenizer, blocks
        self._number = group.call_all("create_engine", config, options)[0]
        self._next_draw_id = 0
        self.reports_finished = group.cluster.workers.tells_events

    def generate(self, data: Prompts, greedy: bool = False, on_finished: OnFinished | None = None) -> Answer:
        """Generate like `NativeGeneration.generate`. Each engine gets about the same number of prompt tokens, and equal
        prompts go to the same engine. A model's tensor-parallel ranks generate for the same prompts in lockstep."""
        batch = RaggedBatch.of(data)
        if "draw_ids" not in batch.samples:  # numbered as a single engine would number them
            batch = batch.copy()
            batch.samples["draw_ids"] = torch.arange(self._next_draw_id, self._next_draw_id + batch.size)
            self._next_draw_id += batch.size
        shares = self._shares(batch)
        told = [None if on_finished is None else partial(_told, on_finished, rows) for rows in shares]
        responses = self._joined(shares, self._parts([select(batch, rows) for rows in shares], greedy, told))
        if isinstance(data, RaggedBatch):
            return responses
        return responses.padded(batch, getattr(self.tokenizer, "pad_token_id", None))

    def _parts(self, prompts: list[RaggedBatch], greedy: bool, told: list[OnFinished | None]) -> list[Responses]:
        """Return the responses of each engine i to `prompts[i]`; `told[i]` receives them as they end."""
        return self._of_engines("generate_with", [(self._number, share, greedy) for share in prompts], told)

    def _of_engines(self, method: str, each: list[tuple], told: list[OnFinished | None]) -> list:
        """Call `method` with the arguments `each[i]` on all ranks of each engine i, and return each engine's result,
        that of its first rank. `told[i]` receives the responses of engine i as they end."""
        size = self.group.tensor_size
        calls = [call for call in each for _ in range(size)]
        by_worker = [listener for first in told for listener in (first, *[None] * (size - 1))]
        return self.group.first_of_groups(self.group.call_each(method, calls, "on_finished", by_worker))

    def _shares(self, batch: RaggedBatch) -> list[list[int]]:
        return generated_by(batch, self.group.dp_size, *(self.blocks or (None, batch.size)))

    def _joined(self, shares: list[list[int]], parts: list[Responses]) -> Responses:
        """Return the responses `parts[r]` to the rows `shares[r]` of the batch as one object, in the batch's order."""
        place = torch.tensor([row for rows in shares for row in rows], dtype=torch.int64).argsort()

        def of_tokens(name: str) -> torch.Tensor:
            rows = [row for part in parts for row in part.rows(getattr(part, name))]
            return torch.cat([rows[i] for i in place.tolist()])

        versions = of_tokens("token_versions") if all(part.token_versions is not None for part in parts) else None
        offsets = offsets_of(torch.cat([part.lengths for part in parts])[place])
        truncated = torch.cat([part.truncated for part in parts])[place]
        return Responses(of_tokens("token_ids"), offsets, of_tokens("logprobs"), truncated, token_versions=versions)

    def _ask(self, method: str, *args: object) -> list:
        return self.group.call_all("ask_engine", self._number, method, *args)

    def prepare_for_generation(self) -> bool:
        return all(self._ask("prepare_for_generation"))

    def finish_generation(self) -> bool:
        return all(self._ask("finish_generation"))

    def invalidate_kv_cache(self) -> bool:
        return any(self._ask("invalidate_kv_cache"))

    def weight_digest(self) -> str:
        """Return the digest of the weights. Raise RuntimeError if engines have different digests."""
        return self.group.call_for_one_value("ask_engine", self._number, "weight_digest")

    def shutdown(self) -> bool:
        """Release the memory of all engines. Further calls do nothing."""
        self.group.call_all("drop_engine", self._number)
        return True


def _told(on_finished: OnFinished, share: list[int], rows: list[int], ids: list[list[int]]) -> None:
    on_finished([share[row] for row in rows], ids)


def select(batch: RaggedBatch, rows: list[int]) -> RaggedBatch:
    """Return the rows `rows` of a batch of prompts, with their generation settings and tensors."""
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


# ---- in workers that only generate


class EngineWorker(EngineHost):
    """A worker that only generates. It holds engines, and a model without optimizer and master weights. The weights
    come from refits (transfers from the trainers). From the model folder only the shapes and the end tokens are
    read."""

    def __init__(self, config: PolicyConfig, tokenizer: TokenizerType | None, seed: int, ranks: Ranks) -> None:
        self.config, self.tokenizer, self.ranks = config, tokenizer, ranks
        self.folder = open_model_folder(
            config.model_name, config.hf_config_overrides, seed=seed, max_length=config.max_total_sequence_length
        )
        device = device_for(ranks.device, config.precision)
        self.model = C.DecoderModel(self.folder.native(), DTYPES[config.precision], False, device)
        self.weight_version: int | None = None
        self._receiver: C.RefitReceiver | None = None

    def weight_digest(self) -> str:
        return f"{self.model.digest():016x}"

    def create_generation(self, config: GenerationConfig | None = None, **options: object) -> NativeGeneration:
        """Return an engine that reads this worker's weights in place (see `generation_on`)."""
        options.setdefault("memory_share", 1 / self.ranks.sharers)
        return generation_on(
            self.model, self.folder, self.config, self.tokenizer, self.weight_digest, config, **options
        )

    def generate_with(self, *request: object, on_finished: OnFinished | None = None) -> Responses | None:
        """Add the weight version to `EngineHost.generate_with`'s result. Raise RuntimeError before the first refit."""
        if self.weight_version is None:
            raise RuntimeError("an engine of its own has no weights before the first sync_weights")
        responses = super().generate_with(*request, on_finished=on_finished)
        if responses is not None:
            responses.weight_version = self.weight_version
        return responses

    def init_collective(self, meeting: RefitRendezvous) -> None:
        """Connect to trainer rank 0 and to the other engines, to receive new weights."""
        rank = self.ranks.rank + 1
        ranks = connect(rank, meeting.size, meeting.host, meeting.port, meeting.deadline, self.ranks.address)
        self._weights = named_views(self.model.specs, self.model.compute) | buffers(self.model)
        self._received = {name: tensor.cpu() for name, tensor in self._weights.items()}  # on a CPU the same tensors
        self._receiver = C.RefitReceiver(ranks.communicator, list(self._received.items()))

    def update_weights_from_collective(self, version: int) -> RefitResult:
        """Receive the weights from trainer rank 0. If a tensor is missing, unknown, damaged, or of another shape or
        dtype, or if the version is not `version`, keep the old weights and raise C.RefitRefused."""
        done = self._receiver.receive(version)
        if not self.model.compute.is_cpu:
            for name, tensor in self._weights.items():
                tensor.copy_(self._received[name])
        self.model.masters_changed()  # discard data derived from the old weights
        self.weight_version = version
        return RefitResult(done.bytes, done.seconds, self.weight_digest(), done.sent)


class DedicatedGeneration(DistributedGeneration):
    """Generation on a cluster whose workers only generate, with the interface of `NativeGeneration`. It never waits for
    the trainers: `generate` can run in one thread while the policy trains in another. A worker executes its calls in
    order, so a refit happens between two calls of `generate`.

    Prompts are distributed so that each engine expects about the same number of tokens: those of a prompt, counted once
    for all of its responses, plus for each response the mean response length of the last call.

    Attributes:
        weight_version: version of the engines' weights; None before the first refit.
        change: the next change of the weights within responses; None: none is planned."""

    def __init__(self, cluster: Cluster, config: PolicyConfig, tokenizer: TokenizerType | None, seed: int) -> None:
        config = config.model_copy(update={"model_name": absolute_folder(config.model_name)})
        self.cluster = cluster
        self.change: WeightChange | None = None
        self.weight_version: int | None = None
        self._mean_response = float(config.generation.max_new_tokens or 0) / 2
        group = WorkerGroup(cluster, partial(EngineWorker, config, tokenizer, seed))
        super().__init__(group, config.generation, {"seed": seed}, tokenizer)

    def _shares(self, batch: RaggedBatch) -> list[list[int]]:
        groups = batch.samples["draw_ids"].tolist()
        size = Counter(groups)
        tokens = [length / size[group] + self._mean_response for length, group in zip(batch.lengths.tolist(), groups)]
        return deal(batch, 0, batch.size, self.group.dp_size, tokens)

    def _parts(self, prompts: list[RaggedBatch], greedy: bool, told: list[OnFinished | None]) -> list[Responses]:
        """Return the responses of each engine. Responses that reach the planned pause wait for the new weights."""
        change, before = self.change, self.weight_version
        pause = None if change is None or change.done else change.pause
        parts = self._of_engines("generate_with", [(self._number, share, greedy, pause) for share in prompts], told)
        if any(part is None for part in parts):
            change.wait()
            change.done = True
            later = self._of_engines("generate_with", [(self._number, None)] * len(parts), told)
            parts = [part or rest for part, rest in zip(parts, later, strict=True)]
        for part in parts if change is not None else ():
            positions = torch.arange(len(part.token_ids)) - part.offsets[:-1].repeat_interleave(part.lengths)
            earlier = positions < change.pause.after_tokens  # sampled before the change
            part.token_versions = torch.where(earlier, before, part.weight_version)
        return parts

    def _joined(self, shares: list[list[int]], parts: list[Responses]) -> Responses:
        responses = super()._joined(shares, parts)
        versions = {part.weight_version for part in parts}
        if versions - {self.weight_version} and self.change is None:
            raise RuntimeError(f"engines answered one batch with weights of versions {sorted(versions)}")
        responses.weight_version = self.weight_version
        self._mean_response = float(responses.lengths.float().mean())
        return responses

    def shutdown(self) -> bool:
        return self.cluster.shutdown()
