"""Synchronizers that bring the policy's weights to the generation engine: by shared storage, by shared memory, or by
sending them from trainer workers to engine workers."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Protocol

from nemo_rl_cpp.distributed.launch import rendezvous_store
from nemo_rl_cpp.distributed.worker_calls import wait_together
from nemo_rl_cpp.metrics.timer import Timer
from nemo_rl_cpp.models.distributed_models import DistributedPolicy
from nemo_rl_cpp.models.generation.distributed import DedicatedGeneration
from nemo_rl_cpp.models.generation.interfaces import DEFAULT_BUCKET_BYTES, GenerationInterface, RefitRendezvous
from nemo_rl_cpp.models.generation.vllm.vllm_generation import VllmGeneration
from nemo_rl_cpp.models.interfaces import PolicyInterface
from nemo_rl_cpp.models.trained_model import TrainedModel


class WeightSynchronizer(Protocol):
    """A synchronizer that brings the policy's weights to the engine and tracks whether the engine's weights are stale.
    Before the first `sync_weights` they are stale."""

    def sync_weights(self, *, timer: Timer | None = None) -> dict[str, float | str | None]:
        """Update the engine's weights if they are stale. Return the transfer's metrics, which the step logs."""

    def mark_stale(self) -> None:
        """Record that the policy has been trained, so that the engine's weights are stale."""

    def verify_before_training(self) -> None:
        """Raise RuntimeError if the policy's weights are not those that generated the rollouts."""


RefitMetrics = dict[str, float | str | None]


class CheckedWeights(WeightSynchronizer):
    """The base class of all synchronizers. It stores a digest of the weights at the last `sync_weights` and compares it
    before training, which detects an unexpected change of the weights in between."""

    def __init__(self, policy: PolicyInterface, generation: GenerationInterface) -> None:
        self._policy, self._generation = policy, generation
        self._digest: str | None = None
        self._stale = True

    def mark_stale(self) -> None:
        self._stale = True

    def verify_before_training(self) -> None:
        if not self._stale and (now := self._policy.weight_digest()) != self._digest:
            raise RuntimeError(
                f"the weights have changed between generation (digest {self._digest}) and training (digest {now}): "
                "something wrote into them, or memory is damaged. The last checkpoint is not affected."
            )


class SharedWeights(CheckedWeights):
    """A synchronizer for an engine that reads the policy's weights in memory: it only compares digests."""

    def sync_weights(self, *, timer: Timer | None = None) -> RefitMetrics:
        """Discard the engine's KV cache if the weights are stale. Return `refit/bytes` (0: nothing is copied) and
        `weights/digest`, which is equal for policy and engine.

        Raise RuntimeError if the digests of policy and engine differ."""
        if self._stale:
            self._generation.invalidate_kv_cache()
            self._digest, theirs = self._policy.weight_digest(), self._generation.weight_digest()
            if self._digest != theirs:
                raise RuntimeError(f"the engine's weights are not the policy's: digest {theirs} against {self._digest}")
            self._stale = False
        return {"refit/bytes": 0, "weights/digest": self._digest}


class SentWeights(CheckedWeights, abc.ABC):
    """The base class of synchronizers for engines with their own copy of the weights, updated after training. `version`
    returns the version of the current weights, which engines attach to their responses."""

    def __init__(self, policy: PolicyInterface, generation: GenerationInterface, version: Callable[[], int]) -> None:
        super().__init__(policy, generation)
        self._version = version
        self._metrics: RefitMetrics = {}

    def sync_weights(self, *, timer: Timer | None = None) -> RefitMetrics:
        """Send the weights if the engine's weights are stale. Return the metrics of the last transfer (refit):
        `refit/bytes`, `refit/seconds` (digests included), `refit/gb_per_s`, `refit/version` and `weights/digest`, the
        digest of the policy's weights.

        Raise RuntimeError if an engine's weights differ from the policy's afterwards."""
        if self._stale:
            with timer("prepare_for_generation/transfer_and_update_weights") if timer is not None else nullcontext():
                self._refit()
            self._stale = False
        return dict(self._metrics)

    @abc.abstractmethod
    def _refit(self) -> None:
        """Send the current weights. Set `_metrics`, and set `_digest` to the digest of the policy's weights."""


class SharedMemoryWeights(SentWeights):
    """A synchronizer for a vLLM server, through shared memory, or from a GPU through NCCL. It logs the digests of the
    trainer's weights (`weights/digest`) and of those received (`refit/digest`). The run stops if they differ, or if a
    parameter of vLLM's model received no values."""

    _policy: TrainedModel
    _generation: VllmGeneration

    def _refit(self) -> None:
        version = self._version()
        moved = self._generation.update_weights(self._policy.state_dict(), version)
        self._digest = self._policy.weight_digest()
        self._metrics = {
            "refit/bytes": moved.bytes, "refit/seconds": moved.seconds, "refit/gb_per_s": moved.bytes / moved.seconds / 1e9,
            "refit/version": version, "refit/digest": moved.digest, "weights/digest": self._digest,
        }  # fmt: skip


class CollectiveWeights(SentWeights):
    """A synchronizer that sends weights from the policy's workers to the engines' workers. Trainer rank 0 broadcasts
    them to all engines, in C++ (`csrc/refit/`).

    Trainers and engines rendezvous at the first `sync_weights`. If an engine rejects the weights or a worker is lost,
    an error is raised and no engine uses the new weights. Between two calls of `sync_weights` engines and trainers run
    independently. A call needs both, so it must not run while either works in another thread. `refit/bytes` is the sum
    over all engines."""

    _policy: DistributedPolicy
    _generation: DedicatedGeneration
    _store: object = None  # the TCP store of the rendezvous; None before it

    def _connect(self) -> None:
        gigabytes, cluster = self._policy.config.refit_buffer_size_gb, self._policy.cluster
        self._store = rendezvous_store(cluster.workers.host, cluster.deadline)
        meeting = RefitRendezvous(
            host=cluster.workers.host,
            port=self._store.port,
            size=1 + self._generation.cluster.world_size(),
            deadline=cluster.deadline,
            bucket_bytes=DEFAULT_BUCKET_BYTES if gigabytes is None else max(int(gigabytes * 1e9), 1),
            delta=self._policy.config.refit == "delta",
        )
        self._together("init_collective", "init_collective", meeting)

    def _refit(self) -> None:
        if self._store is None:
            self._connect()
        version, began = self._version(), time.perf_counter()
        ours, theirs = self._together("broadcast_weights_for_collective", "update_weights_from_collective", version)
        seconds, digest = time.perf_counter() - began, ours[0].digest
        for number, engine in enumerate(theirs):
            if engine.digest != digest:
                raise RuntimeError(
                    f"engine worker {number}'s weights are not the policy's: {engine.digest} against {digest}"
                )
        self._generation.weight_version, self._digest = version, digest
        self._generation.invalidate_kv_cache()
        moved = sum(engine.bytes for engine in theirs)
        self._metrics = {
            "refit/bytes": moved, "refit/sent_bytes": sum(engine.sent for engine in theirs), "refit/seconds": seconds,
            "refit/gb_per_s": moved / seconds / 1e9, "refit/version": version, "weights/digest": digest,
        }  # fmt: skip

    def _together(self, ours: str, theirs: str, argument: object) -> list[list]:
        """Call the method `ours` of the policy's rank 0 and `theirs` of all engines with `argument`, at the same time.
        Return [[rank 0's result], [engines' results]]."""
        trainers, engines = self._policy.group, self._generation.group
        calls = [trainers.run_single_worker_single_data(ours, 0, argument)]
        others = engines.run_all_workers_single_data(theirs, argument)
        return wait_together((trainers.cluster.workers, calls), (engines.cluster.workers, others))


def create_weight_synchronizer(
    policy: PolicyInterface, generation: GenerationInterface, colocated: bool, version: Callable[[], int] = lambda: 0
) -> WeightSynchronizer:
    """Return the synchronizer for a policy and an engine.

    If `colocated`, policy and engine share the weights. Otherwise the engine has a separate copy (`DistributedPolicy`
    and `DedicatedGeneration`), and `version` returns the version number of the policy's weights. A `VllmGeneration`
    always has a separate copy."""
    if isinstance(generation, VllmGeneration):
        return SharedMemoryWeights(policy, generation, version)
    if colocated:
        return SharedWeights(policy, generation)
    return CollectiveWeights(policy, generation, version)
