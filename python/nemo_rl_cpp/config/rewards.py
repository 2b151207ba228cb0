"""How a reward is changed before advantages are computed."""

from __future__ import annotations

from .base import Count, Positive, Real, Section, key


class RewardScalingConfig(Section):
    """Linear map of rewards from [source_min, source_max] to [target_min, target_max], clamped.
    Also known: `correct` for target_max and `incorrect` for target_min."""

    enabled: bool = key(False, "scale rewards")
    source_min: Real = key(0.0, "reward that becomes target_min; smaller ones are clamped")
    source_max: Real = key(1.0, "reward that becomes target_max; larger ones are clamped")
    target_min: Real = key(0.0, "new value of source_min (alias: incorrect)")
    target_max: Real = key(1.0, "new value of source_max (alias: correct)")

    @property
    def is_active(self) -> bool:
        return self.enabled


class RewardShapingConfig(Section):
    """Penalties on length: DAPO's overlong penalty, or the stop-properly factor of ProRLv2 (which comes alone unless
    `compose` is set)."""

    enabled: bool = key(False, "shape rewards")
    overlong_buffer_length: Count | None = key(
        None, "DAPO: tokens before max_response_length in which the penalty grows"
    )
    overlong_buffer_penalty: Real | None = key(None, "DAPO: penalty at the end of the buffer; it keeps growing beyond")
    max_response_length: Positive | None = key(
        None, "DAPO: response length in tokens at which the full penalty is reached"
    )
    stop_properly_penalty_coef: Real | None = key(
        None, "factor in [0, 1] on the reward of truncated samples; null switches it off"
    )
    compose: bool = key(False, "apply stop-properly and the overlong penalty both, instead of stop-properly alone")

    @property
    def is_active(self) -> bool:
        return self.enabled
