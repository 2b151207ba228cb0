"""Rules of the policy loss."""

from nemo_rl_cpp.dotted_names import is_user_defined

from .errors import Report
from .grpo import GRPOConfig
from .loss import ClippedPGLossConfig
from .ppo import PPOConfig


def check_policy_loss(loss: ClippedPGLossConfig, report: Report) -> None:
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
                    f"is {value:g} but no truncation is chosen; set truncated_importance_sampling_type to tis, icepop "
                    "or seq-mask-tis, or this to null",
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
    if low is None and kind != "tis":
        report.add(f"{prefix}_ratio_min", f"is missing: the type {kind} needs a lower bound", f"{prefix}_type")
    elif low is not None and high is not None and low > high:
        report.add(
            f"{prefix}_ratio_min", f"{low:g} is above truncated_importance_sampling_ratio {high:g}", f"{prefix}_ratio"
        )
    if kind == "seq-mask-tis" and loss.sequence_level_importance_ratios:
        report.add(
            f"{prefix}_type",
            "seq-mask-tis needs token-level ratios: set sequence_level_importance_ratios to false",
            "loss_fn.sequence_level_importance_ratios",
        )


def check_kl(
    loss: ClippedPGLossConfig, loop: GRPOConfig | PPOConfig, name: str, kl_estimator: str, report: Report
) -> None:
    """`kl_estimator` is the advantage estimator that takes the KL into the reward."""
    penalty = loss.reference_policy_kl_penalty
    if penalty == 0:
        return
    if loop.skip_reference_policy_logprobs_calculation:
        report.add(
            f"{name}.skip_reference_policy_logprobs_calculation",
            f"is true but loss_fn.reference_policy_kl_penalty is {penalty:g}; set the penalty to 0 or this to false",
            "loss_fn.reference_policy_kl_penalty",
        )
    if (
        loss.use_kl_in_reward
        and loop.adv_estimator.name != kl_estimator
        and not is_user_defined(loop.adv_estimator.name)
    ):
        report.add(
            "loss_fn.use_kl_in_reward",
            f"has an effect with {name}.adv_estimator.name {kl_estimator} only, not {loop.adv_estimator.name}; set it to false "
            "or change the estimator",
            f"{name}.adv_estimator.name",
        )
