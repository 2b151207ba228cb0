"""How weights reach the engine: nothing moves, or they go through shared memory, or from the trainers' workers to the engines'."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Protocol

from nemo_rl_cpp.distributed.process_workers import rendezvous_store
from nemo_rl_cpp.distributed.worker_calls import WorkerCall, wait_together
from nemo_rl_cpp.metrics.timer import Timer
from nemo_rl_cpp.models.distributed_models import DistributedPolicy
from nemo_rl_cpp.models.generation.distributed import DedicatedGeneration
from nemo_rl_cpp.models.generation.interfaces import DEFAULT_BUCKET_BYTES, GenerationInterface, RefitRendezvous
from nemo_rl_cpp.models.generation.vllm.vllm_generation import VllmGeneration
from nemo_rl_cpp.models.interfaces import PolicyInterface
from nemo_rl_cpp.models.trained_model import TrainedModel


class WeightSynchronizer(Protocol):
    """Brings the policy's weights to the engine, and knows whether the engine's are old. They are until the first
    `sync_weights`."""

    def sync_weights(self, *, timer: Timer | None = None) -> dict[str, float | str | None]:
        """Bring the present weights over, if the engine's are old; return metrics of the transfer, logged with the step."""

    def mark_stale(self) -> None:
        """Note that the policy has been trained, so that the engine's weights are old."""

    def verify_before_training(self) -> None:
        """Raise RuntimeError if the weights are not those under which the rollouts were generated."""


RefitMetrics = dict[str, float | str | None]


class CheckedWeights(WeightSynchronizer):
    """What all synchronizers share: remembers the digest of the weights of the last `sync_weights`, and compares it before
    training, so that nothing changes the weights between the two phases unseen.

    With `check_digests` off only the counters remain.
    """

    def __init__(self, policy: PolicyInterface, generation: GenerationInterface, check_digests: bool = True) -> None:
        self._policy = policy
        self._generation = generation
        self._check = check_digests
        self._digest: str | None = None
        self._stale = True

    def mark_stale(self) -> None:
        """Note that the policy has been trained."""
        self._stale = True

    def verify_before_training(self) -> None:
        """Raise RuntimeError if the weights are not those under which the rollouts were generated."""
        if not self._check or self._stale:
            return
        now = self._policy.weight_digest()
        if now != self._digest:
            raise RuntimeError(
                f"the weights have changed between generation (digest {self._digest}) and training (digest {now}): "
                "something wrote into them, or memory is damaged. The last checkpoint is not affected."
            )


class SharedWeights(CheckedWeights):
    """Weights that policy and engine both read from one storage: nothing is copied, only checked."""

    def sync_weights(self, *, timer: Timer | None = None) -> RefitMetrics:
        """Return `refit/bytes` (0: nothing moved) and `weights/digest`, the same for both roles.

        Raise RuntimeError if the engine would generate with other weights than those in training.
        """
        if self._stale:
            self._generation.invalidate_kv_cache()
            if self._check:
                self._digest, theirs = self._policy.weight_digest(), self._generation.weight_digest()
                if self._digest != theirs:
                    raise RuntimeError(
                        f"the engine's weights are not the policy's: digest {theirs} against {self._digest}"
                    )
            self._stale = False
        return {"refit/bytes": 0, "weights/digest": self._digest}


class SentWeights(CheckedWeights, abc.ABC):
    """For engines with weights of their own: these are sent when the policy has been trained since the last time.

    Args:
        version: gives the number of the present weights, which engines stamp on their responses.
    """

    def __init__(
        self, policy: PolicyInterface, generation: GenerationInterface, version: Callable[[], int], check_digests: bool = True
    ) -> None:  # fmt: skip
        super().__init__(policy, generation, check_digests)
        self._version = version
        self._metrics: RefitMetrics = {}

    def sync_weights(self, *, timer: Timer | None = None) -> RefitMetrics:
        """Return the metrics of the last refit: `refit/bytes`, `refit/seconds` (digests included), `refit/gb_per_s`,
        `refit/version` and `weights/digest`, the policy's own.

        Raise RuntimeError if an engine has other weights than the policy afterwards.
        """
        if self._stale:
            with timer("prepare_for_generation/transfer_and_update_weights") if timer is not None else nullcontext():
                self._refit()
            self._stale = False
        return dict(self._metrics)

    @abc.abstractmethod
    def _refit(self) -> None:
        """Send the present weights; set `_metrics`, and `_digest` to that of the policy."""


class SharedMemoryWeights(SentWeights):
    """Weights that are copied into memory which this process and another one of this machine map (vLLM, which has another torch).

    The trainer takes a digest of its own weights, the engine of what it finds in the memory. Where they differ, or
    where a parameter
    of the engine's got nothing, the run stops. `refit/digest`, of what arrived, is logged beside the metrics of `SentWeights`.
    """

    _policy: TrainedModel
    _generation: VllmGeneration

    def _refit(self) -> None:
        version = self._version()
        moved = self._generation.update_weights(self._policy.state_dict(), version)
        self._digest = self._policy.weight_digest() if self._check else None
        self._metrics = {
            "refit/bytes": moved.bytes, "refit/seconds": moved.seconds, "refit/gb_per_s": moved.bytes / moved.seconds / 1e9,
            "refit/version": version, "refit/digest": moved.digest, "weights/digest": self._digest,
        }  # fmt: skip


class CollectiveWeights(SentWeights):
    """Weights that travel from the policy's workers to the engines': rank 0 of the trainers sends them to all, in C++
    (`csrc/refit/`).

    The two groups meet at the first `sync_weights`. A refit that an engine refuses, or in which a worker is lost, is an error, and
    no engine has taken the new weights then. Engines generate and policies train independently of one another; only
    `sync_weights` needs both, so it must not run while either is at work in another thread. `refit/bytes` are those of all engines
    together.
    """

    _policy: DistributedPolicy
    _generation: DedicatedGeneration
    _store: object = None  # where the groups meet; None until they have

    def _meet(self) -> None:
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
        self._together(self._policy.init_collective(meeting), self._generation.init_collective(meeting))

    def _refit(self) -> None:
        if self._store is None:
            self._meet()
        version, began = self._version(), time.perf_counter()
        ours, theirs = self._together(
            self._policy.broadcast_weights_for_collective(version),
            self._generation.update_weights_from_collective(version),
        )
        seconds, digest = time.perf_counter() - began, ours[0].digest
        for number, engine in enumerate(theirs):
            if self._check and engine.digest != digest:
                raise RuntimeError(
                    f"the weights of engine worker {number} are not the policy's: digest {engine.digest} against {digest}"
                )
        self._generation.weight_version, self._digest = version, digest
        self._generation.invalidate_kv_cache()
        moved = sum(engine.bytes for engine in theirs)
        self._metrics = {
            "refit/bytes": moved, "refit/sent_bytes": sum(engine.sent for engine in theirs), "refit/seconds": seconds,
            "refit/gb_per_s": moved / seconds / 1e9, "refit/version": version, "weights/digest": digest,
        }  # fmt: skip

    def _together(self, trainers: Sequence[WorkerCall], engines: Sequence[WorkerCall]) -> list[list]:
        ours, theirs = self._policy.cluster.workers, self._generation.cluster.workers
        return wait_together((ours, trainers), (theirs, engines))


def create_weight_synchronizer(
    policy: PolicyInterface, generation: GenerationInterface, generation_backend: str, colocated: bool,
    version: Callable[[], int] = lambda: 0,
) -> WeightSynchronizer:  # fmt: skip
    """Make the synchronizer for an engine of `generation_backend`: on the policy's own weights where `colocated`, else
    with weights of its own (`DistributedPolicy` and `DedicatedGeneration`), whose present ones `version` numbers. A
    `VllmGeneration` always has weights of its own.

    Raise ValueError for what no synchronizer can bring together.
    """
    if isinstance(generation, VllmGeneration):
        return SharedMemoryWeights(policy, generation, version)
    if generation_backend != "native":
        raise ValueError(f"policy.generation.backend={generation_backend!r} has weights of its own, and bringing them there is "
                         "not supported yet: set policy.generation.backend=native")  # fmt: skip
    if colocated:
        return SharedWeights(policy, generation)
    if not isinstance(policy, DistributedPolicy) or not isinstance(generation, DedicatedGeneration):
        raise ValueError(
            "policy.generation.colocated.enabled=false needs a policy and engines in workers of their own (cluster.executor processes or "
            f"ray), not {type(policy).__name__} and {type(generation).__name__}"
        )
    return CollectiveWeights(policy, generation, version)
