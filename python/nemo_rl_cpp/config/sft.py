"""Supervised fine-tuning: the section `sft`, and the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import PrivateAttr

from nemo_rl_cpp.dotted_names import is_user_defined

from .base import Count, Int, NonNegative, Positive, Seed, key
from .cluster import engines_of
from .errors import Report
from .loop import AdvEstimatorConfig, OnePassLoop
from .loss import ClippedPGLossConfig, LossName

if TYPE_CHECKING:
    from .master import SFTMasterConfig


class SFTLossConfig(ClippedPGLossConfig):
    """The loss on the answers in the dataset."""

    name: LossName = key(
        "nll",
        "Loss. nll: the negative log-likelihood. Your own class or function is given by its dotted name, for "
        "example my_module.MyLoss.",
    )
    reference_policy_kl_penalty: NonNegative = key(
        0.0,
        "Weight of the KL term between the policy and the model that the run started from. 0: no reference "
        "model is loaded.",
    )


class SFTConfig(OnePassLoop):
    """The training loop of supervised fine-tuning. Each step trains on policy.train_global_batch_size rows of the
    dataset."""

    section_name: ClassVar[str] = "sft"
    max_num_epochs: Positive = key(
        1, "Number of passes over the data. Training ends after max_num_epochs or max_num_steps, whichever comes first."
    )
    max_num_steps: Count = key(
        60, "Number of training steps. Training ends after max_num_epochs or max_num_steps, whichever comes first."
    )
    val_period: Int = key(10, "Number of steps between validations. 0 or less: no validation at intervals.")
    val_batches: Int = key(8, "Number of batches per validation. 0 or less: all.")
    val_global_batch_size: Positive = key(32, "Number of rows in a validation batch.")
    val_micro_batch_size: Positive = key(1, "Number of rows in a validation micro-batch.")
    val_at_start: bool = key(True, "Run a validation before the first step.")
    val_at_end: bool = key(False, "Run a validation after the last step.")
    seed: Seed = key(42, "Random seed for the order of the data.")

    # values of keys that other training loops have
    num_generations_per_prompt: ClassVar[int] = 1
    max_rollout_turns: ClassVar[int] = 1
    val_start_at: ClassVar[int] = -1
    stop_at_validation_metric: ClassVar[None] = None
    stop_at_validation_threshold: ClassVar[None] = None
    overlong_filtering: ClassVar[bool] = False
    skip_reference_policy_logprobs_calculation: ClassVar[bool] = False
    seq_logprob_error_threshold: ClassVar[None] = None
    adv_estimator: ClassVar[AdvEstimatorConfig] = AdvEstimatorConfig.model_construct(name="none")
    _rows: int = PrivateAttr(1)

    @property
    def num_prompts_per_step(self) -> int:
        """The number of rows per step: policy.train_global_batch_size."""
        return self._rows

    prompts_per_round = num_prompts_per_step

    @property
    def val_batch_size(self) -> int:
        return self.val_global_batch_size

    @property
    def max_val_samples(self) -> int | None:
        return self.val_batches * self.val_global_batch_size if self.val_batches > 0 else None


def check_sft(config: SFTMasterConfig, report: Report) -> None:
    """Report settings that supervised fine-tuning does not support: losses other than nll or your own, and separate
    generation engines."""
    if config.loss_fn.name != "nll" and not is_user_defined(config.loss_fn.name):
        report.add(
            "loss_fn.name",
            f"must be nll, or a loss of yours, not {config.loss_fn.name}: answers of a file have no advantages",
        )
    if engines_of(config) or config.policy.generation.runs_vllm:
        report.add("policy.generation", "asks for engines, but nothing is generated: leave the section out")
