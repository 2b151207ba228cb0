"""The `value` section: PPO's critic."""

from .base import Section, key, section
from .policy import Backend, Precision, SequencePackingConfig, TokenizerConfig, TrainedModelConfig, fill


class RewardModelConfig(Section):
    """NeMo RL's way to a scalar head; the native value model always has one."""


class ValuePackingConfig(SequencePackingConfig):
    """Sequence packing of the value model."""

    enabled: bool = key(False, "pack sequences")


class ValueTokenizerConfig(TokenizerConfig):
    """The tokenizer that is saved beside the critic. It reads what the policy's tokenizer wrote."""


class ValueConfig(TrainedModelConfig):
    """The critic: the policy's architecture with a scalar head. What is left out follows the policy."""

    backend: Backend | None = key(None, "native or hf, as policy.backend; null: policy.backend")
    tokenizer: ValueTokenizerConfig = section(ValueTokenizerConfig, "tokenizer")
    precision: Precision | None = key(None, "float32 or bfloat16; null: policy.precision")
    sequence_packing: ValuePackingConfig = section(ValuePackingConfig, "micro-batches without padding")
    reward_model_cfg: RewardModelConfig | None = section(RewardModelConfig, "scalar head (always there)")

    def fill_from(self, policy: TrainedModelConfig) -> None:
        """Takes what the file leaves out from the policy."""
        fill(
            self,
            backend=policy.backend,
            model_name=policy.model_name,
            precision=policy.precision,
            gradient_blocks=policy.gradient_blocks,
            data_parallel_sharding_strategy=policy.data_parallel_sharding_strategy,
            overlap_grad_reduce=policy.overlap_grad_reduce,
            train_global_batch_size=policy.train_global_batch_size,
            train_micro_batch_size=policy.train_micro_batch_size,
            max_total_sequence_length=policy.max_total_sequence_length,
        )
        self.fill_batching()
