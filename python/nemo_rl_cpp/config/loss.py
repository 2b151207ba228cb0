"""The `loss_fn` and `value_loss_fn` sections."""

from operator import attrgetter
from typing import Annotated, Any, Literal, Self

from pydantic import PrivateAttr, model_validator

from .base import Fraction, NonNegative, OneOf, Positive, Real, Section, key, mark_of
from .errors import Report, shown

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
"""Name of a loss -> the keys of `loss_fn` that it sets (docs/losses.md)."""
_ALIASES = {"vanilla": "clipped_pg", "geo_mean": "gmpo"}
OWN_TERMS = ("sapo", "dppo_tv", "dppo_kl", "dro", "gmpo", "vespo", "kl_cov")
"""Losses that the native op implements separately. The others are clipped_pg with particular keys."""
TRUNCATIONS = {
    "tis": ("tis", "token"),
    "icepop": ("icepop", "token"),
    "seq-mask-tis": ("seq-mask-tis", "token"),
    "seq-tis": ("tis", "sequence"),
    "seq-icepop": ("icepop", "sequence"),
    "geo-tis": ("tis", "geometric"),
    "geo-icepop": ("icepop", "geometric"),
}
"""truncated_importance_sampling_type -> (what happens to a weight out of bounds, the level of weights)."""
TruncationType = Literal["tis", "icepop", "seq-mask-tis", "seq-tis", "seq-icepop", "geo-tis", "geo-icepop"]


def _of(loss: str, default: object, doc: str | None = None, **options: object) -> Any:
    """Declare a key that is read by the loss `loss` alone."""
    return key(default, doc, json_schema_extra={"loss": loss}, **options)


LossName = Annotated[str, OneOf(lambda: [*LOSSES, *_ALIASES], dotted=True)]


class ClippedPGLossConfig(Section):
    """Settings of the clipped policy-gradient loss of GRPO and PPO."""

    name: LossName = "clipped_pg"
    """Policy loss. clipped_pg: the clipped policy-gradient loss that the other keys configure. The losses of
    docs/losses.md (dr_grpo, gspo, sapo, gmpo, ...) set some of these keys themselves. Your own class or function is
    given by its dotted name, for example my_module.MyLoss; it receives the keys as `loss_config`."""
    kwargs: dict[str, object] = key({}, "Keyword arguments of your own loss.")
    reference_policy_kl_penalty: NonNegative = 0.01
    """Weight of the KL term between the policy and the reference model, the initial one. 0: it is not loaded."""
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence per token: k1, k2 or k3."""
    kl_input_clamp_value: Real | None = key(20.0, gt=0)
    """Clamp the log-ratio of policy and reference to plus or minus this. null: off; with use_kl_in_reward 20."""
    kl_output_clamp_value: Real | None = key(10.0, gt=0)
    """Clamp the KL of a token to plus or minus this value. null: no limit. With use_kl_in_reward the limit is 10."""
    use_kl_in_reward: bool = key(False, "Subtract the KL from the reward instead of adding it to the loss.")
    ratio_clip_min: NonNegative = key(0.2, "The probability ratio is clipped below at 1 - ratio_clip_min.")
    ratio_clip_max: NonNegative = 0.2
    """The probability ratio is clipped above at 1 + ratio_clip_max. Above ratio_clip_min it is DAPO's clip-higher."""
    ratio_clip_c: Real | None = None
    """Dual clipping: upper bound, above 1, usually 3, of the ratio if the advantage is negative. null: off."""
    token_level_loss: bool = True
    """true: mean over all tokens of the batch. false: mean over the sequences of the mean over their tokens."""
    loss_agg_mode: (
        Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] | None
    ) = None
    """How the loss is aggregated. token-mean: mean over all tokens. The other modes take the mean over sequences of:
    the mean of a sequence's tokens (seq-mean-token-mean), their sum (seq-mean-token-sum), or their sum divided by
    loss_scale_factor (seq-mean-token-sum-norm). null: chosen by token_level_loss."""
    loss_scale_factor: Real | None = key(None, gt=0)
    """loss_agg_mode seq-mean-token-sum-norm: divisor of a sequence's sum. null: policy.generation.max_new_tokens."""
    sequence_level_importance_ratios: bool = False
    """Use one probability ratio per sequence instead of one per token (GSPO). This needs token_level_loss false."""
    disable_ppo_ratio: bool = False
    """Use the plain policy gradient: log-probabilities instead of the probability ratio, without clipping."""
    force_on_policy_ratio: bool = False
    """Set the value of the ratio to 1 and keep its gradient. This needs one optimizer step per batch."""
    use_cispo: bool = key(False, "CISPO: the clipped ratio is a constant weight (no gradient) of the log-probability.")
    use_on_policy_kl_approximation: bool = False
    """Multiply the KL term by the importance weight of policy and generation."""
    use_importance_sampling_correction: bool | None = None
    """Weight each token by its probability in training divided by its probability in generation. null: on if the engine
    is not bit-identical to training, see docs/vllm.md."""
    truncated_importance_sampling_type: TruncationType | None = None
    """How importance weights beyond the bounds are truncated. tis: clamp the weight of the token. icepop: set it to 0.
    seq-mask-tis: drop sequences whose weight is out of bounds. seq-tis, seq-icepop: the same as tis and icepop with one
    weight per sequence, the product of its tokens' weights; geo-tis, geo-icepop: with their geometric mean. null: no
    truncation."""
    truncated_importance_sampling_ratio: Real | None = None
    """Upper bound of the importance weight. Required by every truncated_importance_sampling_type."""
    truncated_importance_sampling_ratio_min: Real | None = None
    """Lower bound of the importance weight. Optional for tis, seq-tis and geo-tis, required by the other types."""
    positive_example_nll_weight: NonNegative = 0.0
    """VAPO: weight of an additional term, the negative log-likelihood of correct responses. 0: off."""
    sapo_temperature_pos: Real = _of("sapo", 1.0, gt=0)
    """sapo: temperature of the sigmoid gate for tokens with a positive advantage."""
    sapo_temperature_neg: Real = _of("sapo", 1.05, "sapo: temperature of the sigmoid gate for the other tokens.", gt=0)
    dro_beta: NonNegative = _of("dro", 0.1, "dro: weight of the squared log-ratio.")
    vespo_k_pos: NonNegative = _of("vespo", 2.0)
    """vespo: exponent k of the sequence's ratio W in exp(lambda (1 - W)) W^k, for advantages of 0 or more."""
    vespo_lambda_pos: NonNegative = _of("vespo", 3.0)
    """vespo: lambda in exp(lambda (1 - W)) W^k, for advantages of 0 or more."""
    vespo_k_neg: NonNegative = _of("vespo", 3.0)
    """vespo: exponent k of the sequence's ratio W in exp(lambda (1 - W)) W^k, for negative advantages."""
    vespo_lambda_neg: NonNegative = _of("vespo", 2.0)
    """vespo: lambda in exp(lambda (1 - W)) W^k, for negative advantages."""
    bypass_mode: bool = False
    """Use generation's log-probabilities as the old policy's in the ratio. false: those of a forward pass."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus: this times the mean entropy of the policy is subtracted from the loss. 0: off."""
    top_entropy_quantile: Fraction = key(1.0, gt=0)
    """Fraction of the step's tokens, those with the highest entropy, that keep their advantage. 1: all tokens."""
    score_centering_k: Positive | None = None
    """gpg and cispo: subtract the expected score (gradient of the log-probability), computed from this many most likely
    tokens at each position. null: off."""
    clip_cov_ratio: Fraction = _of("clip_cov", 0.0002, gt=0)
    """clip_cov: fraction of the step's tokens that are excluded."""
    clip_cov_lb: Real = _of("clip_cov", 1.0)
    """clip_cov: only tokens whose covariance of advantage and log-probability is above this value may be excluded."""
    clip_cov_ub: Real = _of("clip_cov", 5.0)
    """clip_cov: only tokens whose covariance of advantage and log-probability is below this value may be excluded."""
    kl_cov_ratio: Fraction = _of("kl_cov", 0.0002, gt=0)
    """kl_cov: fraction of the step's tokens, those with the largest covariance of advantage and log-probability, that
    are penalised."""
    ppo_kl_coef: NonNegative = _of("kl_cov", 1.0)
    """kl_cov: weight of the penalty, which is the absolute difference between the new and the old log-probability."""
    # set by fill_correction
    _correction_left_open: bool = PrivateAttr(False)

    @model_validator(mode="after")
    def _set_keys_of_name(self) -> Self:
        """Set the keys that `name` determines, and raise ValueError for keys that contradict it."""
        self.__dict__["name"] = name = _ALIASES.get(self.name, self.name)
        decided = dict(LOSSES.get(name, {}))
        if self.loss_agg_mode is not None:
            decided.setdefault("token_level_loss", self.loss_agg_mode == "token-mean")
        for field, value in decided.items():
            given = getattr(self, field)
            if given not in (value, type(self).model_fields[field].default):
                raise ValueError(f"{field} is {shown(given)}, but the loss {name} needs {shown(value)}: leave it out")
            self.__dict__[field] = value
        correction = self.use_importance_sampling_correction
        if name == "vespo" and self.truncated_importance_sampling_type is not None:
            raise ValueError("truncated_importance_sampling_type does not go with the loss vespo: leave it out")
        if name == "nll" and correction:
            raise ValueError("use_importance_sampling_correction does not go with the loss nll: leave it out")
        if name in ("dro", "nll") and self.top_entropy_quantile < 1:
            raise ValueError(f"top_entropy_quantile does not go with the loss {name}: leave it out")
        if self.score_centering_k is not None and (name not in ("gpg", "cispo") or correction):
            raise ValueError("score_centering_k goes with gpg and cispo, without use_importance_sampling_correction")
        if self.bypass_mode and (correction or self.force_on_policy_ratio):
            excluded = "use_importance_sampling_correction and force_on_policy_ratio"
            raise ValueError(f"bypass_mode does not go with {excluded}: leave them out")
        if name in OWN_TERMS and (self.use_cispo or self.disable_ppo_ratio or self.force_on_policy_ratio):
            raise ValueError(f"use_cispo, disable_ppo_ratio and force_on_policy_ratio do not go with the loss {name}")
        return self

    correction_left_open = property(attrgetter("_correction_left_open"))
    """Whether the user did not set `use_importance_sampling_correction`, so that `fill_correction` has set it."""

    def fill_correction(self, wanted: bool) -> None:
        """Set `use_importance_sampling_correction`, if null, to `wanted`, or to false if other keys exclude it."""
        if self.use_importance_sampling_correction is None:
            self._correction_left_open = True
            self.__dict__["use_importance_sampling_correction"] = (
                wanted and self.name != "nll" and not self.bypass_mode and self.score_centering_k is None
            )


class MseValueLossConfig(Section):
    """Settings of the loss of the critic: the clipped squared error of its values."""

    scale: NonNegative = key(1.0, "Factor of the critic's loss.")
    cliprange: NonNegative | None = None
    """Maximum change of a value since the rollout, beyond which the loss is clipped. null or 0: no clipping."""


def check_policy_loss(loss: ClippedPGLossConfig, report: Report) -> None:
    if loss.ratio_clip_c is not None and loss.ratio_clip_c <= 1:
        report.add("loss_fn.ratio_clip_c", f"must be greater than 1 (usually 3) or null, not {loss.ratio_clip_c:g}")
    by_token = "loss_fn.token_level_loss"
    if loss.sequence_level_importance_ratios and loss.token_level_loss:
        report.add("loss_fn.sequence_level_importance_ratios", f"needs {by_token}: false", by_token)
    if loss.seq_logprob_error_in_loss and not loss.force_on_policy_ratio:
        text = "needs loss_fn.force_on_policy_ratio: true, because the error is measured before a batch's first update"
        report.add("loss_fn.seq_logprob_error_in_loss", text)
    needed = {
        "disable_ppo_ratio": False,
        "force_on_policy_ratio": False,
        "sequence_level_importance_ratios": False,
        "ratio_clip_c": None,
        "token_level_loss": True,
    }
    for name, value in needed.items() if loss.use_cispo else ():
        if getattr(loss, name) != value:
            report.add(f"loss_fn.{name}", f"must be {shown(value)} with loss_fn.use_cispo", "loss_fn.use_cispo")
    for name, info in type(loss).model_fields.items() if loss.name in LOSSES else ():
        owner = mark_of(info).get("loss", loss.name)
        if owner != loss.name and report.nearness(f"loss_fn.{name}") == 3:
            report.add(f"loss_fn.{name}", f"has no effect with loss_fn.name {loss.name}, only with {owner}: omit it")
    _check_truncation(loss, report)


def _check_truncation(loss: ClippedPGLossConfig, report: Report) -> None:
    prefix = "truncated_importance_sampling"
    kind, high, low = (getattr(loss, f"{prefix}_{name}") for name in ("type", "ratio", "ratio_min"))
    chosen, upper, lower = (f"loss_fn.{prefix}_{name}" for name in ("type", "ratio", "ratio_min"))
    if kind is None:
        for key, value in ((upper, high), (lower, low)):
            if value is not None:
                report.add(key, f"is {value:g} but no truncation is chosen; set {prefix}_type, or this to null", chosen)
        return
    if not loss.use_importance_sampling_correction:
        report.add("loss_fn.use_importance_sampling_correction", f"must be true with {prefix}_type {kind}", chosen)
    if high is None:
        report.add(upper, f"is missing: the type {kind} needs an upper bound", chosen)
    elif high <= 0:
        report.add(upper, f"must be greater than 0, not {high:g}")
    if low is None and TRUNCATIONS[kind][0] != "tis":
        report.add(lower, f"is missing: the type {kind} needs a lower bound", chosen)
    elif low is not None and high is not None and low > high:
        report.add(lower, f"{low:g} is above {prefix}_ratio {high:g}", upper)
    if kind not in ("tis", "icepop") and loss.sequence_level_importance_ratios:
        text = f"{kind} needs token-level ratios: set sequence_level_importance_ratios to false"
        report.add(chosen, text, "loss_fn.sequence_level_importance_ratios")
