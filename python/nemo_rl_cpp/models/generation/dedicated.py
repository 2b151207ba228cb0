"""Generation on workers of its own: engines with their own copy of the weights, which a refit brings.

Nothing here waits for the trainers: a `generate` in one thread runs while the policy trains in another. A worker answers its
calls in their order, so a refit falls between two calls of `generate`, never into one.
"""

from collections.abc import Callable
from functools import partial

from nemo_rl_cpp._native import C
from nemo_rl_cpp.config.generation import EvalGenerationConfig
from nemo_rl_cpp.config.policy import PolicyConfig
from nemo_rl_cpp.data.interfaces import TokenizerType
from nemo_rl_cpp.distributed.cluster import Cluster, WorkerGroup
from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch
from nemo_rl_cpp.distributed.ranks import Ranks, connect, deal
from nemo_rl_cpp.distributed.worker_calls import WorkerCall
from nemo_rl_cpp.models.distributed_models import for_workers
from nemo_rl_cpp.models.generation.distributed import DistributedGeneration, EngineHost
from nemo_rl_cpp.models.generation.interfaces import Moved, RefitRendezvous, Responses
from nemo_rl_cpp.models.generation.native import NativeGeneration, generation_on
from nemo_rl_cpp.models.model_folder import open_model_folder
from nemo_rl_cpp.models.trained_model import DTYPES
from nemo_rl_cpp.models.weights import named_views


class EngineWorker(EngineHost):
    """In a worker: a model that only generates, so without optimizer and master weights, and its engines.

    Its weights come by refits alone; the model's files are read for its sizes and for where responses end.
    """

    def __init__(self, config: PolicyConfig, tokenizer: TokenizerType | None, seed: int, ranks: Ranks) -> None:
        self.config, self.tokenizer, self.ranks = config, tokenizer, ranks
        self.folder = open_model_folder(
            config.model_name, config.hf_config_overrides, seed=seed, max_length=config.max_total_sequence_length
        )
        self.model = C.DecoderModel(self.folder.native(), DTYPES[config.precision], False)
        self.weight_version: int | None = None
        self._receiver: C.RefitReceiver | None = None

    def weight_digest(self) -> str:
        """As `Policy.weight_digest`."""
        return f"{self.model.digest():016x}"

    def create_generation(self, config: EvalGenerationConfig | None = None, **options: object) -> NativeGeneration:
        """An engine on these weights."""
        options.setdefault("memory_share", 1 / self.ranks.size)
        return generation_on(
            self.model, self.folder, self.config, self.tokenizer, self.weight_digest, config, **options
        )

    def generate_with(
        self, number: int, prompts: RaggedBatch, greedy: bool, on_finished: Callable[..., None] | None = None
    ) -> Responses:
        """As `EngineHost`, with the version of the weights. RuntimeError before the first refit."""
        if self.weight_version is None:
            raise RuntimeError("an engine of its own has no weights before the first sync_weights")
        responses = super().generate_with(number, prompts, greedy, on_finished)
        responses.weight_version = self.weight_version
        return responses

    def init_collective(self, meeting: RefitRendezvous) -> None:
        """Meets rank 0 of the trainers and the other engines."""
        rank = self.ranks.rank + 1
        ranks = connect(rank, meeting.size, meeting.host, meeting.port, meeting.deadline, self.ranks.address)
        weights = named_views(self.model.layout, self.model.compute)
        self._receiver = C.RefitReceiver(ranks.communicator, list(weights.items()))

    def update_weights_from_collective(self, version: int) -> Moved:
        """Takes the weights that rank 0 of the trainers sends; C.RefitRefused, and the old ones stay, where they are not as expected."""
        done = self._receiver.receive(version)
        self.model.masters_changed()  # what was made of the old ones
        self.weight_version = version
        return Moved(done.bytes, done.seconds, self.weight_digest(), done.sent)


class DedicatedGeneration(DistributedGeneration):
    """`NativeGeneration` on the workers of a cluster that trains nothing.

    Prompts go to the engines in about equal numbers of expected tokens: those of the prompt, which is computed once for its
    group, and for each response as many as the responses of the last call had on average.

    Attributes:
        weight_version: of the weights that the engines have; None before the first refit.
    """

    def __init__(self, cluster: Cluster, config: PolicyConfig, tokenizer: TokenizerType | None, seed: int) -> None:
        config = for_workers(config)
        self.cluster = cluster
        self.weight_version: int | None = None
        self._mean_response = float(config.generation.max_new_tokens or 0) / 2
        group = WorkerGroup(cluster, partial(EngineWorker, config, tokenizer, seed))
        super().__init__(group, config.generation, {"seed": seed}, tokenizer)

    def _shares(self, batch: RaggedBatch) -> list[list[int]]:
        rows_of: dict[int, int] = {}
        groups = batch.samples["draw_ids"].tolist()
        for group in groups:
            rows_of[group] = rows_of.get(group, 0) + 1
        tokens = [
            length / rows_of[group] + self._mean_response for length, group in zip(batch.lengths.tolist(), groups)
        ]
        return deal(batch, 0, batch.size, self.group.dp_size, tokens)

    def _joined(self, shares: list[list[int]], parts: list[Responses]) -> Responses:
        responses = super()._joined(shares, parts)
        versions = {part.weight_version for part in parts}
        if len(versions) != 1:
            raise RuntimeError(f"engines answered one batch with weights of versions {sorted(versions)}")
        responses.weight_version = versions.pop()
        self._mean_response = float(responses.lengths.float().mean())
        return responses

    def init_collective(self, meeting: RefitRendezvous) -> list[WorkerCall]:
        """All engines meet rank 0 of the trainers."""
        return self.group.run_all_workers_single_data("init_collective", meeting)

    def update_weights_from_collective(self, version: int) -> list[WorkerCall]:
        """All engines take the weights that rank 0 of the trainers sends. Each gives a `Moved`."""
        return self.group.run_all_workers_single_data("update_weights_from_collective", version)

    def shutdown(self) -> bool:
        """Ends the engines' processes. Safe to call twice."""
        return self.cluster.shutdown()
