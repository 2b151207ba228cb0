"""Refit of engines with weights of their own: rank 0 of the trainers sends them to all engines, in C++ (`csrc/refit/`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from nemo_rl_cpp.distributed.process_workers import meeting_place
from nemo_rl_cpp.distributed.worker_calls import wait_together
from nemo_rl_cpp.models.generation.refit import DEFAULT_BUCKET_BYTES, Moved, RefitMeeting
from nemo_rl_cpp.weight_sync.checked import SentWeights

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from nemo_rl_cpp.distributed.worker_calls import WorkerCall
    from nemo_rl_cpp.models.distributed_models import DistributedPolicy
    from nemo_rl_cpp.models.generation.dedicated import DedicatedGeneration


class CollectiveWeights(SentWeights):
    """Weights that travel from the policy's workers to the engines'.

    The two groups meet at the first `sync_weights`. A refit that an engine refuses, or in which a worker is lost, is an error, and
    no engine has taken the new weights then. Engines generate and policies train independently of one another; only
    `sync_weights` needs both, so it must not run while either is at work in another thread. `refit/bytes` are those of all engines
    together.
    """

    _policy: DistributedPolicy
    _generation: DedicatedGeneration

    def __init__(
        self, policy: DistributedPolicy, generation: DedicatedGeneration, version: Callable[[], int], check_digests: bool = True
    ) -> None:  # fmt: skip
        super().__init__(policy, generation, version, check_digests)
        self._store: TCPStore | None = None

    def init_communicator(self) -> None:
        """Lets trainers and engines meet. Nothing to do when they have."""
        if self._store is not None:
            return
        gigabytes, cluster = self._policy.config.refit_buffer_size_gb, self._policy.cluster
        self._store = meeting_place(cluster.workers.host, cluster.deadline)
        meeting = RefitMeeting(
            host=cluster.workers.host, port=self._store.port, size=1 + self._generation.cluster.world_size(), deadline=cluster.deadline,
            bucket_bytes=DEFAULT_BUCKET_BYTES if gigabytes is None else max(int(gigabytes * 1e9), 1),
            delta=self._policy.config.refit == "delta",
        )  # fmt: skip
        self._together(self._policy.init_collective(meeting), self._generation.init_collective(meeting))

    def _refit(self) -> None:
        self.init_communicator()
        version, began = self._version(), time.perf_counter()
        ours, theirs = self._together(
            self._policy.broadcast_weights_for_collective(version),
            self._generation.update_weights_from_collective(version),
        )
        seconds, digest = time.perf_counter() - began, ours[0].digest
        self._compare(digest, theirs)
        self._generation.weight_version, self._digest = version, digest
        self._generation.invalidate_kv_cache()
        moved = sum(engine.bytes for engine in theirs)
        self._metrics = {
            "refit/bytes": moved, "refit/sent_bytes": sum(engine.sent for engine in theirs), "refit/seconds": seconds, "refit/gb_per_s": moved / seconds / 1e9, "refit/version": version,
            "weights/digest": digest,
        }  # fmt: skip

    def _compare(self, ours: str, engines: Sequence[Moved]) -> None:
        for number, engine in enumerate(engines):
            if self._check and engine.digest != ours:
                raise RuntimeError(
                    f"the weights of engine worker {number} are not the policy's: digest {engine.digest} against {ours}"
                )

    def _together(self, trainers: Sequence[WorkerCall], engines: Sequence[WorkerCall]) -> list[list]:
        return wait_together(
            (self._policy.cluster.workers, trainers), (self._generation.cluster.workers, engines)
        )  # fmt: skip


__all__ = ["CollectiveWeights"]
