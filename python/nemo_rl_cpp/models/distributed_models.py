"""Policy and critic trained by several processes, with the interface of a single model."""

from collections.abc import Mapping
from functools import partial, partialmethod
from pathlib import Path
from types import NoneType

from torch import Tensor

from nemo_rl_cpp._native import C
from nemo_rl_cpp.config.distillation import absolute_folder
from nemo_rl_cpp.config.generation import GenerationConfig
from nemo_rl_cpp.config.policy import PolicyConfig, TrainedModelConfig, ValueConfig
from nemo_rl_cpp.config.rules_model import checked_policy
from nemo_rl_cpp.data.interfaces import TokenizerType
from nemo_rl_cpp.distributed.cluster import Cluster, WorkerGroup
from nemo_rl_cpp.distributed.ragged_batch import Batch, BatchedDataDict, RaggedBatch
from nemo_rl_cpp.distributed.ranks import Ranks, connect
from nemo_rl_cpp.models.generation.distributed import DistributedGeneration, EngineHost
from nemo_rl_cpp.models.generation.interfaces import RefitRendezvous, RefitResult
from nemo_rl_cpp.models.hf.trained import HfPolicyWorker, HfValue
from nemo_rl_cpp.models.interfaces import PolicyInterface, TrainingResult, ValueInterface
from nemo_rl_cpp.models.lm_value import Value
from nemo_rl_cpp.models.policy.lm_policy import Policy, PolicyUpdates
from nemo_rl_cpp.models.policy.train_step import Loss
from nemo_rl_cpp.models.policy.updates import Updates
from nemo_rl_cpp.models.trained_model import in_layout_of


class PolicyWorker(Policy, EngineHost):  # Policy is first, so that its create_generation is used
    """The policy in a worker process. The worker also holds the generation engines that read the policy's weights in
    place, and sends copies of the weights to engines in other workers."""

    _publisher: C.RefitPublisher | None = None

    def init_collective(self, meeting: RefitRendezvous) -> None:
        """Connect, as rank 0, to the engines in other workers, for refits (transfers of new weights)."""
        ranks = connect(0, meeting.size, meeting.host, meeting.port, meeting.deadline, self.ranks.address)
        self._publisher = C.RefitPublisher(ranks.communicator, meeting.bucket_bytes, meeting.delta)

    def broadcast_weights_for_collective(self, version: int) -> RefitResult:
        """Send the current weights to the engines in other workers, labelled with the weight version `version`."""
        weights = [(name, tensor.cpu()) for name, tensor in self.state_dict().items()]
        done = self._publisher.publish(weights, version)
        return RefitResult(done.bytes, done.seconds, self.weight_digest(), done.sent)


def _built(
    model: type[Policy] | type[Value], options: dict[str, object], tensor_size: int, ranks: Ranks
) -> Policy | Value:
    return model(None, **options, ranks=ranks.split(tensor_size))


class DistributedModel:
    """One model, of the class `model`, in all workers of a cluster. A method passes its batch to all workers; each
    processes its share of the samples with the model or its tensor-parallel slice, and results are combined."""

    def __init__(
        self,
        model: type[Policy] | type[Value],
        cluster: Cluster,
        config: TrainedModelConfig,
        tokenizer: TokenizerType | None,
        **options: object,
    ) -> None:
        config = config.model_copy(update={"model_name": absolute_folder(config.model_name)})
        paths = {name: absolute(options.get(name)) for name in ("weights_path", "optimizer_path")}
        self.cluster, self.config, self.tokenizer = cluster, config, tokenizer
        count = config.tensor_parallel(cluster.world_size())
        options = {**options, **paths, "config": config, "tokenizer": tokenizer}
        self.group = WorkerGroup(cluster, partial(_built, model, options, count), tensor_size=count)

    @property
    def learning_rate(self) -> float:
        return self.group.call_all("learning_rate")[0]

    def _of_rank_0(self, method: str, *arguments: object) -> object:
        """Call `method` in all workers, with the paths in `arguments` made absolute, and return rank 0's result."""
        return self.group.call_all(method, *map(absolute, arguments))[0]

    state_dict = partialmethod(_of_rank_0, "first_state_dict")  # all weights, by their Hugging Face names
    checkpoint_bytes = partialmethod(_of_rank_0, "checkpoint_bytes")
    save_checkpoint = partialmethod(_of_rank_0, "save_checkpoint")  # the files of a single process, written by rank 0
    keep_bad_batches = partialmethod(_of_rank_0, "keep_bad_batches")

    def weight_digest(self) -> str:
        """Return the digest of the weights. Raise RuntimeError if it is not the same on all ranks."""
        return self.group.call_for_one_value("weight_digest")

    def _gather(self, method: str, data: Batch, *options: object) -> BatchedDataDict:
        """Call `method` in all workers, and return {name: a value per token} of the batch, in the layout of `data`."""
        batch = plain_batch(data)
        ((name, of_tokens),) = self.group.call_all(method, batch, *options)[0].items()
        return BatchedDataDict({name: in_layout_of(data, batch, of_tokens)})

    def non_finite_parameters(self) -> list[str]:
        return list(dict.fromkeys(name for names in self.group.call_all("non_finite_parameters") for name in names))

    def shutdown(self) -> bool:
        return self.cluster.shutdown()


class DistributedPolicy(DistributedModel, PolicyInterface):
    """`Policy` in several processes: it has the methods of `Policy`, and each worker trains on its share of a batch."""

    def __init__(
        self, cluster: Cluster, config: PolicyConfig | Mapping[str, object], tokenizer: TokenizerType | None, **options: object
    ) -> None:  # fmt: skip
        config = checked_policy(config)
        worker = HfPolicyWorker if config.backend == "hf" else PolicyWorker
        super().__init__(worker, cluster, config, tokenizer, **options)
        self.zero_gradient_share = self.reused_forward_share = 0.0

    skips_prev_logprobs, performance = Policy.skips_prev_logprobs, Policy.performance
    get_logprobs = partialmethod(DistributedModel._gather, "get_logprobs")
    get_reference_policy_logprobs = partialmethod(DistributedModel._gather, "get_reference_policy_logprobs")
    get_entropies = partialmethod(DistributedModel._gather, "get_entropies")
    get_sum_pi_squared = partialmethod(DistributedModel._gather, "get_sum_pi_squared")
    get_teacher_logprobs = partialmethod(DistributedModel._gather, "get_teacher_logprobs")

    def get_topk_logprobs(self, data: RaggedBatch, k: int, teacher: str | None = None) -> BatchedDataDict:
        return self.group.call_all("get_topk_logprobs", plain_batch(data), k, teacher)[0]

    def train(
        self, data: Batch, loss_fn: Loss, eval_mode: bool = False, gbs: int | None = None,
        mbs: int | None = None,
    ) -> TrainingResult:  # fmt: skip
        """Train like `Policy.train`; the loss function is pickled, so every process must be able to import it."""
        batch = plain_batch(data)
        parts = self.group.call_all("train_part", batch, loss_fn, eval_mode, gbs, mbs)
        done = PolicyUpdates.of_ranks(self.group.first_of_groups(parts))
        self.zero_gradient_share, self.reused_forward_share = done.shares(self.reused_forward_share)
        return done.report(data, batch)

    def create_generation(
        self, generation_config: GenerationConfig | None = None, **options: object
    ) -> DistributedGeneration:
        blocks = self.config.gradient_blocks, self.config.train_global_batch_size, self.config.shards_gradients
        config = generation_config or self.config.generation
        return DistributedGeneration(self.group, config, options, self.tokenizer, blocks)


class DistributedValue(DistributedModel, ValueInterface):
    """`Value`, the critic, in several processes: each worker trains on its share of a batch."""

    def __init__(
        self, cluster: Cluster, config: ValueConfig, tokenizer: TokenizerType | None, **options: object
    ) -> None:
        super().__init__(HfValue if config.backend == "hf" else Value, cluster, config, tokenizer, **options)

    get_values = partialmethod(DistributedModel._gather, "get_values")

    def train(
        self, data: Batch, loss_fn: Loss, eval_mode: bool = False, *, gbs: int | None = None, mbs: int | None = None,
    ) -> TrainingResult:  # fmt: skip
        parts = self.group.call_all("train_part", plain_batch(data), loss_fn, eval_mode, gbs, mbs)
        return Updates.of_ranks(self.group.first_of_groups(parts)).report()


def plain_batch(data: Batch) -> RaggedBatch:
    """Return the part of a batch that workers receive: tensors, numbers and strings, one per sample or for the whole
    batch. Message logs and environment metadata are dropped."""
    batch = RaggedBatch.of(data)
    plain = (Tensor, str, int, float, NoneType)
    samples = {
        name: value
        for name, value in batch.samples.items()
        if isinstance(value, plain) or (isinstance(value, list) and all(isinstance(item, plain) for item in value))
    }
    return RaggedBatch(batch.offsets, dict(batch.tokens), samples, pad_token_id=batch.pad_token_id, width=batch.width)


def absolute(path: object) -> object:
    """Return a path as an absolute one, as workers may have other working directories, and other values unchanged."""
    return Path(path).expanduser().absolute() if isinstance(path, (str, Path)) else path
