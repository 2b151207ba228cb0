"""The `loss_fn` and `value_loss_fn` sections."""

from typing import Annotated, Literal

from pydantic import PrivateAttr

from .base import NonNegative, Real, Section, key
from .tables import OneOf

LossName = Annotated[str, OneOf(lambda: ["clipped_pg"], dotted=True)]


class ClippedPGLossConfig(Section):
    """The clipped policy-gradient loss of GRPO and PPO."""

    name: LossName = key(
        "clipped_pg",
        "clipped_pg: the loss that the other keys describe; or a class or function of yours, as my_module.MyLoss, which reads of them "
        "what it takes as `loss_config`",
    )
    kwargs: dict[str, object] = key({}, "keyword arguments of a loss of yours")
    reference_policy_kl_penalty: NonNegative = key(0.01, "weight of the KL term; 0: no reference model is kept")
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = key("k3", "estimator of the KL divergence")
    kl_input_clamp_value: Real | None = key(20.0, "largest log ratio that enters the KL; null: no limit", gt=0)
    kl_output_clamp_value: Real | None = key(10.0, "largest KL of a token; null: no limit", gt=0)
    use_kl_in_reward: bool = key(False, "subtract the KL from the reward instead of adding it to the loss")
    ratio_clip_min: NonNegative = key(0.2, "lower clip of the ratio: 1 - this")
    ratio_clip_max: NonNegative = key(
        0.2, "upper clip of the ratio: 1 + this (larger than ratio_clip_min: clip higher)"
    )
    ratio_clip_c: Real | None = key(None, "dual clip for negative advantages, above 1 (usually 3); null: off")
    token_level_loss: bool = key(
        True, "true: mean over all tokens; false: mean over each sequence's tokens, then over sequences"
    )
    sequence_level_importance_ratios: bool = key(False, "one ratio a sequence (GSPO); needs token_level_loss: false")
    disable_ppo_ratio: bool = key(False, "plain policy gradient: the loss uses log-probabilities instead of the ratio")
    force_on_policy_ratio: bool = key(
        False, "the ratio's value is 1, its gradient stays; needs one optimizer step a batch"
    )
    use_cispo: bool = key(False, "CISPO: clipped ratio as a constant weight of the log-probability")
    use_on_policy_kl_approximation: bool = key(False, "importance weight on the KL term")
    use_importance_sampling_correction: bool | None = key(
        None,
        "weight tokens by training over generation probability; null: where the two are not equal to the bit (docs/vllm.md)",
    )
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = key(
        None, "tis: clamp weights; icepop: zero weights out of bounds; seq-mask-tis: drop sequences out of bounds"
    )
    truncated_importance_sampling_ratio: Real | None = key(None, "upper bound of the weight")
    truncated_importance_sampling_ratio_min: Real | None = key(None, "lower bound of the weight (icepop, seq-mask-tis)")
    positive_example_nll_weight: NonNegative = key(0.0, "VAPO: weight of the likelihood of correct samples; 0: off")
    # set by the program, see config.exactness
    _correction_left_open: bool = PrivateAttr(False)

    @property
    def correction_left_open(self) -> bool:
        """Whether `use_importance_sampling_correction` follows from trainer and generator."""
        return self._correction_left_open

    def fill_correction(self, wanted: bool) -> None:
        """Gives `use_importance_sampling_correction` its value, where it is left open."""
        if self.use_importance_sampling_correction is None:
            self._correction_left_open = True
            self.__dict__["use_importance_sampling_correction"] = wanted


class MseValueLossConfig(Section):
    """The critic's clipped squared error."""

    scale: NonNegative = key(1.0, "factor of the loss")
    cliprange: NonNegative | None = key(None, "largest change of a value since the rollout; null or 0: no limit")
