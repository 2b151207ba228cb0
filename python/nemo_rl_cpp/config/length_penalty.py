"""`grpo.length_penalty`: bonuses and penalties on the length of right responses, within each group."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from .base import Fraction, NonNegative, Real, Section, key, section

CHANNELS = ("reasoning", "answer", "total")


class LengthPenaltyParams(Section):
    """What is added to and taken from the rewards of a group. Reasoning is what stands before `</think>`, the answer what
    follows; total is both. Only responses with a reward above 0 are compared, and only groups with rewards of 0 and 1."""

    is_switched = True
    enabled: bool = key(True, "apply these")
    length_type: Literal["tokens", "chars"] = key("tokens", "unit of lengths")
    reasoning_bonus: NonNegative = key(0.0, "to the right response with the shortest reasoning")
    answer_bonus: NonNegative = key(0.0, "to the one with the shortest answer")
    total_bonus: NonNegative = key(0.0, "to the shortest one")
    longest_reasoning_penalty: NonNegative = key(0.0, "from the right response with the longest reasoning")
    longest_answer_penalty: NonNegative = key(0.0, "from the one with the longest answer")
    longest_total_penalty: NonNegative = key(0.0, "from the longest one")
    group_reasoning_length_penalty_coeff: NonNegative = key(
        0.0,
        "factor of (1 - (length - min) / (max - min)) less its mean over the right responses: short gains what long loses",
    )
    group_answer_length_penalty_coeff: NonNegative = key(0.0, "the same of answers")
    group_total_length_penalty_coeff: NonNegative = key(0.0, "the same of whole responses")
    reasoning_zmad_threshold: NonNegative = key(
        0.0, "modified z-score (0.6745 (length - median) / MAD) of an outlier; 0: off"
    )
    reasoning_zmad_penalty: NonNegative = key(0.0, "from each outlier")
    answer_zmad_threshold: NonNegative = key(0.0, "the same of answers; 0: off")
    answer_zmad_penalty: NonNegative = key(0.0, "from each outlier")
    total_zmad_threshold: NonNegative = key(0.0, "the same of whole responses; 0: off")
    total_zmad_penalty: NonNegative = key(0.0, "from each outlier")
    pass_rate_length_penalty_weight: NonNegative = key(
        0.0,
        "from every right response this x the group's share of right ones x its length over the longest right one's",
    )
    profile_band_total: bool = key(False, "multiply by the band `total` of profile_band")
    profile_band_reasoning: bool = key(False, "multiply by the band `reasoning`")
    profile_band_answer: bool = key(False, "multiply by the band `answer`")
    group_length_penalty_profile_gate: bool = key(
        False, "apply group_* only where the mean length is above a number of profile_band"
    )
    group_length_penalty_profile_gate_channel: Literal["total", "reasoning", "answer"] = key(
        "total", "whose lengths and band"
    )
    group_length_penalty_profile_gate_field: Literal["a", "b", "f"] = key("a", "which number of the band")
    group_length_penalty_profile_gate_positive_only: bool = key(True, "mean over right responses; false: over all")


class ProfileBandChannel(Section):
    """Factor of a reward: 1 up to length a, falling in a line to f at length b, f beyond."""

    a: Real = key(..., "length up to which nothing changes")
    b: Real = key(..., "length from which the factor is f; above a")
    f: Fraction = key(..., "smallest factor")

    @model_validator(mode="after")
    def _check(self) -> ProfileBandChannel:
        if self.b <= self.a:
            raise ValueError(f"needs b above a, not a = {self.a:g} and b = {self.b:g}")
        return self


class ProfileBandDefaults(Section):
    """The bands. A band that is given here is switched on, unless `default` says otherwise."""

    total: ProfileBandChannel | None = key(None, "of whole responses")
    reasoning: ProfileBandChannel | None = key(None, "of reasoning")
    answer: ProfileBandChannel | None = key(None, "of answers")


class ProfileBandConfig(Section):
    """Factors by length, for right responses."""

    enabled: bool = key(False, "use the bands")
    defaults: ProfileBandDefaults = section(ProfileBandDefaults, "the bands")


class LengthPenaltyConfig(Section):
    """Rewards short responses. NeMo RL has this section for NeMo Gym; here it works in every environment."""

    verbose: bool = key(False, "print what was done to each group")
    default: LengthPenaltyParams = section(LengthPenaltyParams, "settings of all environments")
    agent_overrides: dict[str, LengthPenaltyParams | None] | None = key(
        None, "by task, the name of a data set (NeMo RL: by agent): keys in place of those of `default`"
    )
    profile_band: ProfileBandConfig | None = key(None, "factors by length; null: none")

    def bands(self) -> dict[str, ProfileBandChannel]:
        """The bands that are switched on as a whole, by channel."""
        if self.profile_band is None or not self.profile_band.enabled:
            return {}
        found = {name: getattr(self.profile_band.defaults, name) for name in CHANNELS}
        return {name: band for name, band in found.items() if band is not None}

    def params_of(self, task: str | None) -> LengthPenaltyParams:
        """The settings for the samples of a task: those of `default`, with the keys that its override sets in place."""
        params = self.default.model_copy()
        for name in self.bands():
            if f"profile_band_{name}" not in params.model_fields_set:
                setattr(params, f"profile_band_{name}", True)
        override = (self.agent_overrides or {}).get(task or "")
        if override is not None:
            params = params.model_copy(update={name: getattr(override, name) for name in override.model_fields_set})
        return params
