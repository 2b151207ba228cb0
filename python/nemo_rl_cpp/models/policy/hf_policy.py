"""The policy on transformers (`policy.backend: hf`): any causal language model that AutoModelForCausalLM loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_rl_cpp.data.boundaries import end_token_ids
from nemo_rl_cpp.models.generation.engine_host import EngineHost
from nemo_rl_cpp.models.hf.trained import HfTrainedModel
from nemo_rl_cpp.models.policy.lm_policy import Policy

if TYPE_CHECKING:
    from collections.abc import Callable

    from nemo_rl_cpp.config.generation import EvalGenerationConfig
    from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch
    from nemo_rl_cpp.models.generation.hf import HfGeneration
    from nemo_rl_cpp.models.generation.interfaces import Responses
    from nemo_rl_cpp.models.policy.train_step import Exactness


class HfPolicy(HfTrainedModel, Policy):
    """As `Policy`, its arguments included, for architectures without a native core.

    Generation and training are two computations on the same weights here: they agree up to rounding, so that a batch is scored
    before it is trained on, and the metrics of the mismatch say how far the two were apart.
    """

    @property
    def skips_prev_logprobs(self) -> bool:
        """False: generation's log-probabilities are not to the bit those of the training forward."""
        return False

    def _compare_whole_pass_now_and_then(self) -> None:
        """Nothing: generation keeps no activations."""

    def _keep_activations(self, exactness: Exactness, tokens: int) -> None:
        """Nothing: generation keeps no activations."""

    def create_generation(
        self, generation_config: EvalGenerationConfig | None = None, **options: object
    ) -> HfGeneration:
        """An engine on this very module: no copy, no refit."""
        from nemo_rl_cpp.models.generation.hf import HfGeneration
        from nemo_rl_cpp.models.generation.on_model import engine_options

        config = generation_config or self.config.generation
        options = engine_options(self.config, config, options)
        options.setdefault("memory_share", 1 / self.ranks.size)
        options.setdefault("end_token_ids", end_token_ids(self.folder.path, self.folder.raw, self.tokenizer))
        return HfGeneration(self.model.module, config, self.tokenizer, digest=self.weight_digest, **options)

    def performance(self) -> dict[str, float]:
        """`zero_gradient_share` of the last `train`."""
        return {"zero_gradient_share": self.zero_gradient_share}


class HfPolicyWorker(HfPolicy, EngineHost):
    """In a worker: its policy, with the engines that read its weights."""

    def __init__(self, *args: object, **options: object) -> None:
        HfPolicy.__init__(self, *args, **options)
        EngineHost.__init__(self)

    def generate_with(
        self, number: int, prompts: RaggedBatch, greedy: bool, on_finished: Callable[..., None] | None = None
    ) -> Responses:
        """As `EngineHost.generate_with`; the weights are gathered for it, by all ranks, those without prompts too."""
        with self.model.gathered():
            return super().generate_with(number, prompts, greedy, on_finished)
