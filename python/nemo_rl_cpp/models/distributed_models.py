"""Policy and critic that several processes train together, as the run sees them: the interfaces of one model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch
from nemo_rl_cpp.distributed.ranks import Ranks
from nemo_rl_cpp.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_cpp.distributed.worker_groups import RayWorkerGroup
from nemo_rl_cpp.models.generation.interfaces import Responses
from nemo_rl_cpp.models.policy.interfaces import PolicyInterface
from nemo_rl_cpp.models.policy.lm_policy import Policy, PolicyUpdates
from nemo_rl_cpp.models.trained_model import Updates, in_layout_of
from nemo_rl_cpp.models.value.interfaces import ValueInterface
from nemo_rl_cpp.models.value.lm_value import Value

if TYPE_CHECKING:
    from nemo_rl_cpp.config.generation import EvalGenerationConfig
    from nemo_rl_cpp.models.generation.distributed import DistributedGeneration
    from nemo_rl_cpp.models.generation.native import NativeGeneration
    from nemo_rl_cpp.models.policy.interfaces import TrainingResult
    from nemo_rl_cpp.models.policy.train_step import Loss
    from nemo_rl_cpp.telemetry.timer import Timer


class PolicyWorker(Policy):
    """In a worker: its policy with the engines that read these weights."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self._engines: list[NativeGeneration] = []

    def create_engine(self, config: EvalGenerationConfig | None, options: dict[str, object]) -> int:
        """Makes an engine; its number."""
        self._engines.append(self.create_generation(config, **options))
        return len(self._engines) - 1

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


def _built(model: type[Policy] | type[Value], options: dict[str, object], ranks: Ranks) -> Policy | Value:
    """In a worker: its model."""
    return model(None, **options, ranks=ranks)


class DistributedModel:
    """One model in as many processes as the cluster has workers. Every call goes to all of them with the same batch; each works
    on its samples (`Ranks`), and their results are put together here.

    Args:
        model: the class of the worker's own object.
        options: its arguments but for cluster and ranks.
    """

    def __init__(self, model: type[Policy] | type[Value], cluster: RayVirtualCluster, **options: object) -> None:
        self.cluster, self.config = cluster, options["config"]
        self.group = RayWorkerGroup(cluster, partial(_built, model, options))

    @property
    def data_parallel_size(self) -> int:
        return self.group.dp_size

    @property
    def learning_rate(self) -> float:
        return self.group.call_all("learning_rate")[0]

    def weight_digest(self) -> str:
        """That of every rank. RuntimeError where one has other weights."""
        return self.group.call_for_one_value("weight_digest")

    def _gather(
        self, method: str, name: str, data: Mapping[str, object] | RaggedBatch, options: dict[str, object]
    ) -> BatchedDataDict:
        """{name: [T] or [B, S]}, of which each rank gives its part of the batch."""
        batch = plain_batch(data)
        options = {key: value for key, value in options.items() if key != "timer"}
        parts = [part[name] for part in self.group.call_all(method, batch, **options)]
        whole = torch.zeros_like(parts[0])
        for rank, part in enumerate(parts):
            own = tokens_of(batch, Ranks(rank, len(parts)).part(batch, 0, batch.size))
            whole[own] = part[own]
        return BatchedDataDict({name: in_layout_of(data, batch, whole)})

    def save_checkpoint(self, *args: object, **kwargs: object) -> None:
        """As one process would: rank 0 writes, and gathers the optimizer's shards."""
        self.group.call_all("save_checkpoint", *args, **kwargs)

    def checkpoint_bytes(self, optimizer: bool) -> int:
        """Bytes of the tensors that `save_checkpoint` writes."""
        return self.group.call_all("checkpoint_bytes", optimizer)[0]

    def non_finite_parameters(self) -> list[str]:
        """Names of the parameters that hold an infinity or NaN on any rank."""
        return list(dict.fromkeys(name for names in self.group.call_all("non_finite_parameters") for name in names))

    def keep_bad_batches(self, folder: Path) -> None:
        """A batch that makes a loss or gradient non-finite is written into `folder` before the error is raised."""
        self.group.call_all("keep_bad_batches", folder)

    def prepare_for_training(self, *args: object, **kwargs: object) -> None:
        """Nothing to do: weights, gradients and optimizer state stay where they are."""

    def finish_training(self, *args: object, **kwargs: object) -> None:
        """Nothing to do: they stay there."""

    def shutdown(self) -> bool:
        """Ends the processes of the cluster."""
        return self.cluster.shutdown()


class DistributedPolicy(DistributedModel, PolicyInterface):
    """`Policy` in several processes."""

    def __init__(self, cluster: RayVirtualCluster, **options: object) -> None:
        super().__init__(PolicyWorker, cluster, **options)
        self.tokenizer = options["tokenizer"]
        self.skips_prev_logprobs = self.config.reuse_generation_logprobs != "never"
        self.zero_gradient_share = self.reused_forward_share = 0.0

    skips_prev_logprobs: bool = False

    def get_logprobs(self, data: Mapping[str, object] | RaggedBatch, **options: object) -> BatchedDataDict:
        """As `Policy.get_logprobs`."""
        return self._gather("get_logprobs", "logprobs", data, options)

    def get_reference_policy_logprobs(
        self, data: Mapping[str, object] | RaggedBatch, **options: object
    ) -> BatchedDataDict:
        """As `Policy.get_reference_policy_logprobs`."""
        return self._gather("get_reference_policy_logprobs", "reference_logprobs", data, options)

    def train(
        self, data: Mapping[str, object] | RaggedBatch, loss_fn: Loss, eval_mode: bool = False, gbs: int | None = None,
        mbs: int | None = None, timer: Timer | None = None,
    ) -> TrainingResult:  # fmt: skip
        """As `Policy.train`. The loss function is sent to the processes, so it must be importable there."""
        batch = plain_batch(data)
        parts = self.group.call_all("train_part", batch, loss_fn, eval_mode, gbs, mbs)
        done = PolicyUpdates.of_ranks(parts, self._trained(batch, gbs))
        self.zero_gradient_share, self.reused_forward_share = done.shares(self.reused_forward_share)
        return done.report(data, batch)

    def _trained(self, batch: RaggedBatch, gbs: int | None) -> list[Tensor]:
        """bool [T] of each rank: the tokens of the samples that it trained on."""
        gbs, count, blocks = gbs or self.config.train_global_batch_size, self.group.dp_size, self.config.gradient_blocks
        own = []
        for rank in range(count):
            ranks = Ranks(rank, count)
            dealt = [ranks.blocks(batch, begin, begin + gbs, blocks) for begin in range(0, batch.size, gbs)]
            own.append(tokens_of(batch, [row for parts in dealt for rows in parts for row in rows]))
        return own

    def create_generation(
        self, generation_config: EvalGenerationConfig | None = None, **options: object
    ) -> DistributedGeneration:
        """An engine in every process, on its own weights: no copy, no refit."""
        from nemo_rl_cpp.models.generation.distributed import DistributedGeneration

        return DistributedGeneration(
            self.group, generation_config, options, getattr(self.tokenizer, "pad_token_id", None)
        )

    def performance(self) -> dict[str, float]:
        """As `Policy.performance`, over all ranks."""
        return {"reused_forward_share": self.reused_forward_share, "zero_gradient_share": self.zero_gradient_share}

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        """Nothing to do: weights and workspace stay where they are."""


class DistributedValue(DistributedModel, ValueInterface):
    """`Value` in several processes."""

    def __init__(self, cluster: RayVirtualCluster, **options: object) -> None:
        super().__init__(Value, cluster, **options)

    def get_values(self, data: Mapping[str, object] | RaggedBatch, **options: object) -> BatchedDataDict:
        """As `Value.get_values`."""
        return self._gather("get_values", "values", data, options)

    def train(
        self, data: Mapping[str, object] | RaggedBatch, loss_fn: Loss, eval_mode: bool = False, *, gbs: int | None = None, mbs: int | None = None,
        timer: Timer | None = None,
    ) -> TrainingResult:  # fmt: skip
        """As `Value.train`."""
        return Updates.of_ranks(
            self.group.call_all("train_part", plain_batch(data), loss_fn, eval_mode, gbs, mbs)
        ).report()

    def prepare_for_inference(self, *args: object, **kwargs: object) -> None:
        """Nothing to do: weights and workspace stay where they are."""

    def finish_inference(self, *args: object, **kwargs: object) -> None:
        """Nothing to do: values keep no state."""


def plain_batch(data: Mapping[str, object] | RaggedBatch) -> RaggedBatch:
    """The batch as it travels: a RaggedBatch of numbers. What is neither a tensor nor a plain list of samples (messages,
    environments' notes) stays here."""
    batch = RaggedBatch.of(data)
    samples = {name: value for name, value in batch.samples.items() if isinstance(value, Tensor)}
    return RaggedBatch(batch.offsets, dict(batch.tokens), samples, pad_token_id=batch.pad_token_id, width=batch.width)


def tokens_of(batch: RaggedBatch, rows: list[int]) -> Tensor:
    """bool [T]: the tokens of these samples."""
    of_samples = torch.zeros(batch.size, dtype=torch.bool)
    of_samples[rows] = True
    return batch.by_token(of_samples)
