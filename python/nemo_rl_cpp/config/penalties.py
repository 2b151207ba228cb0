"""The sections `length_penalty` and `reward_penalties`: rewards that change with the length or the form of a response."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from .base import Fraction, Int, NonNegative, Positive, Real, Section, key, section

CHANNELS = ("reasoning", "answer", "total")


class LengthPenaltyParams(Section):
    """Settings of bonuses and penalties for the length of responses, added to the rewards. A response has three
    lengths: of the reasoning (the text before `</think>`), of the answer (the text after it), and in total. Correct
    responses (reward above 0) to the same prompt are compared, if all rewards for this prompt are 0 or 1."""

    is_switched = True
    enabled: bool = key(True, "Apply the length penalties of this section.")
    length_type: Literal["tokens", "chars"] = key("tokens", "Unit of lengths: tokens, or chars (characters).")
    reasoning_bonus: NonNegative = key(0.0, "Added to the reward of the correct response with the shortest reasoning.")
    answer_bonus: NonNegative = key(0.0, "Added to the reward of the correct response with the shortest answer.")
    total_bonus: NonNegative = key(0.0, "Added to the reward of the shortest correct response.")
    longest_reasoning_penalty: NonNegative = 0.0
    """Subtracted from the reward of the correct response with the longest reasoning."""
    longest_answer_penalty: NonNegative = 0.0
    """Subtracted from the reward of the correct response with the longest answer."""
    longest_total_penalty: NonNegative = key(0.0, "Subtracted from the reward of the longest correct response.")
    group_reasoning_length_penalty_coeff: NonNegative = 0.0
    """Coefficient c of a reward term for the length of the reasoning. With w = 1 - (length - min) / (max - min) over
    the correct responses of the group, c * (w - mean(w)) is added. Shorter ones gain what longer ones lose. 0: off."""
    group_answer_length_penalty_coeff: NonNegative = 0.0
    """Like group_reasoning_length_penalty_coeff, for the length of the answer."""
    group_total_length_penalty_coeff: NonNegative = 0.0
    """Like group_reasoning_length_penalty_coeff, for the length of the whole response."""
    reasoning_zmad_threshold: NonNegative = 0.0
    """A correct response is an outlier if the modified z-score of the length of its reasoning, 0.6745 (length - median)
    / MAD, is above this threshold. 0: off."""
    reasoning_zmad_penalty: NonNegative = 0.0
    """Subtracted from the reward of each outlier of reasoning_zmad_threshold."""
    answer_zmad_threshold: NonNegative = 0.0
    """Like reasoning_zmad_threshold, for the length of the answer. 0: off."""
    answer_zmad_penalty: NonNegative = key(0.0, "Subtracted from the reward of each outlier of answer_zmad_threshold.")
    total_zmad_threshold: NonNegative = 0.0
    """Like reasoning_zmad_threshold, for the length of the whole response. 0: off."""
    total_zmad_penalty: NonNegative = key(0.0, "Subtracted from the reward of each outlier of total_zmad_threshold.")
    profiled_length_penalty: NonNegative = 0.0
    """Subtracted from the reward of each correct response that is too long for its prompt, unless the comparison with
    the group has lowered it already. The limit is mean + profiled_length_n_std * standard deviation of earlier lengths:
    the prompt's profiled_output_lengths in extra_env_info for which profiled_rewards is above 0."""
    profiled_length_n_std: Real = 1.0
    """Number of standard deviations above the mean at which profiled_length_penalty begins."""
    profiled_length_min_samples: Positive = 2
    """Minimum number of profiled_rewards above 0. A prompt with fewer gets no profiled_length_penalty."""
    pass_rate_length_penalty_weight: NonNegative = 0.0
    """Weight w of a penalty for long responses to easy prompts: w * (fraction of correct responses in the group) *
    (length / length of the longest correct response) is subtracted from each correct response's reward."""
    profile_band_total: bool = key(False, "Multiply the reward by the factor of the band `total` of profile_band.")
    profile_band_reasoning: bool = False
    """Multiply the reward by the factor of the band `reasoning` of profile_band."""
    profile_band_answer: bool = key(False, "Multiply the reward by the factor of the band `answer` of profile_band.")
    group_length_penalty_profile_gate: bool = False
    """Apply the keys `group_*_length_penalty_coeff` only to groups whose mean length is above a value of profile_band.
    The next three keys choose the length and the value."""
    group_length_penalty_profile_gate_channel: Literal["total", "reasoning", "answer"] = "total"
    """Gate: the length and the band that are compared."""
    group_length_penalty_profile_gate_field: Literal["a", "b", "f"] = "a"
    """Gate: the value of the band that the mean length is compared with."""
    group_length_penalty_profile_gate_positive_only: bool = True
    """Gate: take the mean length over the correct responses of the group. false: over all of its responses."""


class ProfileBandChannel(Section):
    """Settings of a reward factor that depends on a length: 1 up to length a, then falling linearly to f at length b,
    and f for greater lengths."""

    a: Real = key(..., "Length up to which the factor is 1.")
    b: Real = key(..., "Length from which the factor is f. It must be above a.")
    f: Fraction = key(..., "The smallest factor, from 0 to 1.")

    @model_validator(mode="after")
    def _check(self) -> ProfileBandChannel:
        if self.b <= self.a:
            raise ValueError(f"needs b above a, not a = {self.a:g} and b = {self.b:g}")
        return self


class ProfileBandDefaults(Section):
    """The bands of `profile_band`: each sets how the reward falls with one of a response's lengths. The entry
    `profile_band` of a row's extra_env_info, for example {"total": {"a": 100, "b": 200, "f": 0.5}}, replaces them for
    its prompt. A band that is not null here is applied, unless profile_band_total, _reasoning or _answer in the section
    `default` is set to false."""

    total: ProfileBandChannel | None = key(None, "Band for the length of the whole response. null: none.")
    reasoning: ProfileBandChannel | None = key(None, "Band for the length of the reasoning. null: none.")
    answer: ProfileBandChannel | None = key(None, "Band for the length of the answer. null: none.")


class ProfileBandConfig(Section):
    """Settings of factors that multiply the rewards of correct responses, according to the lengths of a response."""

    enabled: bool = key(False, "Multiply rewards by the factors of the bands.")
    defaults: ProfileBandDefaults = section(ProfileBandDefaults)


class LengthPenaltyConfig(Section):
    """Settings of bonuses for short responses and penalties for long ones. NeMo RL applies this section to NeMo Gym
    only; this package applies it to every environment."""

    verbose: bool = key(False, "Print the rewards before and after, and the lengths, of each group.")
    default: LengthPenaltyParams = section(LengthPenaltyParams)
    agent_overrides: dict[str, LengthPenaltyParams | None] | None = None
    """Settings that differ from `default`, by task: the name of a dataset (in NeMo RL, of an agent). null: none."""
    profile_band: ProfileBandConfig | None = key(None, "Reward factors by length. null: none.")

    def bands(self) -> dict[str, ProfileBandChannel]:
        """Return {kind of length ("total", "reasoning" or "answer"): band} for the bands that are set. A band says how
        the reward factor falls with this length. Return {} if profile_band is disabled."""
        if self.profile_band is None or not self.profile_band.enabled:
            return {}
        found = {name: getattr(self.profile_band.defaults, name) for name in CHANNELS}
        return {name: band for name, band in found.items() if band is not None}

    def params_of(self, task: str | None) -> LengthPenaltyParams:
        """Return the settings for the samples of `task`. Keys that the task's entry in agent_overrides sets take
        precedence over the section `default`."""
        params = self.default.model_copy()
        for name in self.bands():
            if f"profile_band_{name}" not in params.model_fields_set:
                setattr(params, f"profile_band_{name}", True)
        override = (self.agent_overrides or {}).get(task or "")
        if override is not None:
            params = params.model_copy(update={name: getattr(override, name) for name in override.model_fields_set})
        return params


class RewardPenaltyTokenIds(Section):
    """Token ids that the penalties of `reward_penalties` look for."""

    unwanted: list[Int] = key([], "penalize_unwanted_tokens: token ids that a response must not contain.")
    think_open: Int | None = None
    """penalize_malformed_think_tag: id of `<think>`. null: the tokenizer's id, if the tag is a single token."""
    think_close: Int | None = None
    """penalize_malformed_think_tag: id of `</think>`. null: the tokenizer's id, if the tag is a single token."""

    @model_validator(mode="after")
    def _check(self) -> RewardPenaltyTokenIds:
        if (self.think_open is None) != (self.think_close is None):
            raise ValueError("needs think_open and think_close together: write both, or neither")
        return self

    @property
    def thinking(self) -> tuple[int, int] | None:
        """The token ids (think_open, think_close); None if they are not set."""
        return None if self.think_open is None or self.think_close is None else (self.think_open, self.think_close)


class RewardPenaltyConfig(Section):
    """Settings of penalties that set the reward of malformed responses to 0. A response is malformed if it repeats its
    reasoning, has no answer, contains unwanted tokens or has misplaced think tags. NeMo RL applies this section to NeMo
    Gym only; this package applies it to every environment."""

    penalize_duplicated_reasoning: bool = False
    """Set the reward to 0 if the answer repeats the reasoning (the text before `</think>`)."""
    penalize_empty_final_answer: bool = False
    """Set the reward to 0 if the last response has no answer after its reasoning."""
    penalize_unwanted_tokens: bool = key(False, "Set the reward to 0 if a response contains one of token_ids.unwanted.")
    penalize_malformed_think_tag: bool = False
    """Set the reward to 0 if a response contains `<think>`. Also if the prompt has opened thinking and the response
    does not close it exactly once, or if the response closes thinking that the prompt has not opened."""
    token_ids: RewardPenaltyTokenIds | None = key(None, "Token ids that the penalties read.")

    @model_validator(mode="after")
    def _check(self) -> RewardPenaltyConfig:
        if self.penalize_unwanted_tokens and not self.ids.unwanted:
            raise ValueError("penalize_unwanted_tokens needs token_ids.unwanted: write them, or set it to false")
        return self

    @property
    def ids(self) -> RewardPenaltyTokenIds:
        """The section `token_ids`, or one with the default values if this key is null."""
        return self.token_ids or RewardPenaltyTokenIds()

    @property
    def any_enabled(self) -> bool:
        return any(getattr(self, name) for name in type(self).model_fields if name.startswith("penalize_"))
