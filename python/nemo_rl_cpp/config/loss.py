"""The `loss_fn` and `value_loss_fn` sections."""

from typing import Annotated, Literal, Self

from pydantic import PrivateAttr, model_validator

from .base import Fraction, NonNegative, Positive, Real, Section, key
from .errors import Report
from .tables import OneOf

LOSSES: dict[str, dict[str, object]] = {
    "clipped_pg": {},
    "grpo": {"token_level_loss": False},
    "dapo": {"token_level_loss": True},
    "bnpo": {"token_level_loss": True},
    "dr_grpo": {"token_level_loss": False, "loss_agg_mode": "seq-mean-token-sum-norm"},
    "gpg": {"disable_ppo_ratio": True},
    "cispo": {"use_cispo": True},
    "gspo": {"token_level_loss": False, "sequence_level_importance_ratios": True},
    "luspo": {
        "token_level_loss": False,
        "sequence_level_importance_ratios": True,
        "loss_agg_mode": "seq-mean-token-sum",
    },
    "gmpo": {"token_level_loss": False, "sequence_level_importance_ratios": True},
    "sapo": {},
    "dppo_tv": {},
    "dppo_kl": {},
    "dro": {},
    "vespo": {},
    "clip_cov": {},
    "kl_cov": {},
    "nll": {"disable_ppo_ratio": True},
}
"""The losses that `loss_fn.name` chooses, and the keys that each decides (docs/losses.md)."""
_ALIASES = {"vanilla": "clipped_pg", "geo_mean": "gmpo"}
OWN_TERMS = ("sapo", "dppo_tv", "dppo_kl", "dro", "gmpo", "vespo", "kl_cov")
"""Those whose name is the ratio mode of the native op; the others are clipped_pg with some keys."""
TRUNCATIONS = {
    "tis": ("tis", "token"),
    "icepop": ("icepop", "token"),
    "seq-mask-tis": ("seq-mask-tis", "token"),
    "seq-tis": ("tis", "sequence"),
    "seq-icepop": ("icepop", "sequence"),
    "geo-tis": ("tis", "geometric"),
    "geo-icepop": ("icepop", "geometric"),
}
"""truncated_importance_sampling_type: (what happens to a weight out of bounds, over what the weight is formed)."""
TruncationType = Literal["tis", "icepop", "seq-mask-tis", "seq-tis", "seq-icepop", "geo-tis", "geo-icepop"]
LossName = Annotated[str, OneOf(lambda: [*LOSSES, *_ALIASES], dotted=True)]


class ClippedPGLossConfig(Section):
    """The clipped policy-gradient loss of GRPO and PPO."""

    name: LossName = key(
        "clipped_pg",
        "clipped_pg: the loss that the other keys describe; or one of docs/losses.md (dr_grpo, gspo, sapo, gmpo, ...), which sets the "
        "keys that it decides; or a class or function of yours, as my_module.MyLoss, which reads of them what it takes as `loss_config`",
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
    loss_agg_mode: (
        Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] | None
    ) = key(
        None,
        "mean over tokens; or over sequences of the mean, the sum, or the sum over loss_scale_factor of their tokens; null: as "
        "token_level_loss says",
    )
    loss_scale_factor: Real | None = key(
        None, "divisor of a sequence's sum with seq-mean-token-sum-norm; null: policy.generation.max_new_tokens", gt=0
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
    truncated_importance_sampling_type: TruncationType | None = key(
        None,
        "tis: clamp weights; icepop: zero weights out of bounds; seq-mask-tis: drop sequences out of bounds; seq-tis, seq-icepop: one "
        "weight a sequence, the product of its tokens'; geo-tis, geo-icepop: their geometric mean",
    )
    truncated_importance_sampling_ratio: Real | None = key(None, "upper bound of the weight")
    truncated_importance_sampling_ratio_min: Real | None = key(
        None, "lower bound of the weight (needed except by tis, seq-tis and geo-tis)"
    )
    positive_example_nll_weight: NonNegative = key(0.0, "VAPO: weight of the likelihood of correct samples; 0: off")
    sapo_temperature_pos: Real = key(1.0, "sapo: steepness of the gate for positive advantages", gt=0)
    sapo_temperature_neg: Real = key(1.05, "sapo: steepness of the gate for other advantages", gt=0)
    dro_beta: NonNegative = key(0.1, "dro: weight of the squared log ratio")
    vespo_k_pos: NonNegative = key(2.0, "vespo: power of the sequence's ratio, advantages from 0 on")
    vespo_lambda_pos: NonNegative = key(3.0, "vespo: decay in the sequence's ratio, advantages from 0 on")
    vespo_k_neg: NonNegative = key(3.0, "vespo: power of the sequence's ratio, negative advantages")
    vespo_lambda_neg: NonNegative = key(2.0, "vespo: decay in the sequence's ratio, negative advantages")
    bypass_mode: bool = key(
        False,
        "ratios against the log-probabilities that generation reported, instead of those of a pass before training",
    )
    entropy_coef: NonNegative = key(
        0.0, "entropy bonus: weight of the policy's mean entropy, which is subtracted from the loss; 0: off"
    )
    top_entropy_quantile: Fraction = key(
        1.0, "share of the step's tokens, those with the largest entropy, that learn from their advantages", gt=0
    )
    score_centering_k: Positive | None = key(
        None, "gpg, cispo: subtract the expected score, from so many of the likeliest tokens at each token; null: off"
    )
    clip_cov_ratio: Fraction = key(0.0002, "clip_cov: share of the step's tokens that are left out", gt=0)
    clip_cov_lb: Real = key(1.0, "clip_cov: tokens are drawn among those with a covariance above this ...")
    clip_cov_ub: Real = key(5.0, "clip_cov: ... and below this")
    kl_cov_ratio: Fraction = key(0.0002, "kl_cov: share of the step's tokens that are penalised", gt=0)
    ppo_kl_coef: NonNegative = key(1.0, "kl_cov: weight of the distance from the old log-probability at those tokens")
    # set by the program, see config.fold
    _correction_left_open: bool = PrivateAttr(False)

    @model_validator(mode="after")
    def _set_keys_of_name(self) -> Self:
        """Set the keys that `name` determines. Raise ValueError if the user gave a different value."""
        self.__dict__["name"] = name = _ALIASES.get(self.name, self.name)
        decided = dict(LOSSES.get(name, {}))
        if self.loss_agg_mode is not None:
            decided.setdefault("token_level_loss", self.loss_agg_mode == "token-mean")
        for field, value in decided.items():
            given = getattr(self, field)
            if given not in (value, type(self).model_fields[field].default):
                raise ValueError(f"{field} is {given}, but the loss {name} needs {value}: leave it out")
            self.__dict__[field] = value
        if name == "vespo" and self.truncated_importance_sampling_type is not None:
            raise ValueError(
                "truncated_importance_sampling_type does not go with the loss vespo, whose own weights hold large ratios back: leave it out"
            )
        if name == "nll" and self.use_importance_sampling_correction:
            raise ValueError(
                "use_importance_sampling_correction does not go with the loss nll, whose answers nobody sampled"
            )
        if name in ("dro", "nll") and self.top_entropy_quantile < 1:
            raise ValueError(
                f"top_entropy_quantile is {self.top_entropy_quantile:g}, but the loss {name} does not vanish where the advantage does: "
                "leave it out"
            )
        if self.score_centering_k is not None and (
            name not in ("gpg", "cispo") or self.use_importance_sampling_correction
        ):
            raise ValueError(
                "score_centering_k goes with the losses gpg and cispo, without use_importance_sampling_correction: set name to one of "
                "them, or leave it out"
            )
        if self.bypass_mode and (self.use_importance_sampling_correction or self.force_on_policy_ratio):
            raise ValueError(
                "bypass_mode takes generation's log-probabilities for the old policy's, so that nothing is left to correct: leave "
                "use_importance_sampling_correction and force_on_policy_ratio out"
            )
        if name in OWN_TERMS and (self.use_cispo or self.disable_ppo_ratio or self.force_on_policy_ratio):
            raise ValueError(f"use_cispo, disable_ppo_ratio and force_on_policy_ratio do not go with the loss {name}")
        return self

    @property
    def correction_left_open(self) -> bool:
        """Whether the user left `use_importance_sampling_correction` to follow from the backends."""
        return self._correction_left_open

    def fill_correction(self, wanted: bool) -> None:
        """Set `use_importance_sampling_correction` if it is left open."""
        if self.use_importance_sampling_correction is None:
            self._correction_left_open = True
            self.__dict__["use_importance_sampling_correction"] = (
                wanted and self.name != "nll" and not self.bypass_mode and self.score_centering_k is None
            )

    def fill_scale_factor(self, max_new_tokens: int) -> None:
        """Set `loss_scale_factor` if it is needed and left open."""
        if self.loss_agg_mode == "seq-mean-token-sum-norm" and self.loss_scale_factor is None:
            self.__dict__["loss_scale_factor"] = float(max_new_tokens)


class MseValueLossConfig(Section):
    """The critic's clipped squared error."""

    scale: NonNegative = key(1.0, "factor of the loss")
    cliprange: NonNegative | None = key(None, "largest change of a value since the rollout; null or 0: no limit")


def check_policy_loss(loss: ClippedPGLossConfig, report: Report) -> None:
    """Report incompatible settings within `loss_fn`."""
    if loss.ratio_clip_c is not None and loss.ratio_clip_c <= 1:
        report.add("loss_fn.ratio_clip_c", f"must be greater than 1 (usually 3) or null, not {loss.ratio_clip_c:g}")
    if loss.sequence_level_importance_ratios and loss.token_level_loss:
        report.add(
            "loss_fn.sequence_level_importance_ratios",
            "needs loss_fn.token_level_loss: false",
            "loss_fn.token_level_loss",
        )
    _check_cispo(loss, report)
    _check_truncation(loss, report)


def _check_cispo(loss: ClippedPGLossConfig, report: Report) -> None:
    if not loss.use_cispo:
        return
    for name in ("disable_ppo_ratio", "force_on_policy_ratio", "sequence_level_importance_ratios"):
        if getattr(loss, name):
            report.add(
                f"loss_fn.{name}",
                "cannot be true together with loss_fn.use_cispo; set one of them to false",
                "loss_fn.use_cispo",
            )
    if loss.ratio_clip_c is not None:
        report.add(
            "loss_fn.ratio_clip_c", "must be null with loss_fn.use_cispo: CISPO has no dual clip", "loss_fn.use_cispo"
        )
    if not loss.token_level_loss:
        report.add("loss_fn.token_level_loss", "must be true with loss_fn.use_cispo", "loss_fn.use_cispo")


def _check_truncation(loss: ClippedPGLossConfig, report: Report) -> None:
    kind, high, low = (
        loss.truncated_importance_sampling_type,
        loss.truncated_importance_sampling_ratio,
        loss.truncated_importance_sampling_ratio_min,
    )
    prefix = "loss_fn.truncated_importance_sampling"
    if kind is None:
        for name, value in (("ratio", high), ("ratio_min", low)):
            if value is not None:
                report.add(
                    f"{prefix}_{name}",
                    f"is {value:g} but no truncation is chosen; set truncated_importance_sampling_type to {_one_of_truncations()}, or "
                    "this to null",
                    f"{prefix}_type",
                )
        return
    if not loss.use_importance_sampling_correction:
        report.add(
            "loss_fn.use_importance_sampling_correction",
            f"must be true with truncated_importance_sampling_type {kind}",
            f"{prefix}_type",
        )
    if high is None:
        report.add(f"{prefix}_ratio", f"is missing: the type {kind} needs an upper bound", f"{prefix}_type")
    elif high <= 0:
        report.add(f"{prefix}_ratio", f"must be greater than 0, not {high:g}")
    if low is None and TRUNCATIONS[kind][0] != "tis":
        report.add(f"{prefix}_ratio_min", f"is missing: the type {kind} needs a lower bound", f"{prefix}_type")
    elif low is not None and high is not None and low > high:
        report.add(
            f"{prefix}_ratio_min", f"{low:g} is above truncated_importance_sampling_ratio {high:g}", f"{prefix}_ratio"
        )
    if kind not in ("tis", "icepop") and loss.sequence_level_importance_ratios:
        report.add(
            f"{prefix}_type",
            f"{kind} needs token-level ratios: set sequence_level_importance_ratios to false",
            "loss_fn.sequence_level_importance_ratios",
        )


def _one_of_truncations() -> str:
    *others, last = TRUNCATIONS
    return f"{', '.join(others)} or {last}"
