"""Functions that change rewards: linear scaling, DAPO's overlong penalty, ProRLv2's stop-properly penalty and
`grpo.length_penalty`.
"""

import statistics
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from nemo_rl_cpp.config.base import as_model
from nemo_rl_cpp.config.loop import RewardScalingConfig, RewardShapingConfig
from nemo_rl_cpp.config.penalties import CHANNELS, LengthPenaltyConfig, LengthPenaltyParams, ProfileBandChannel
from nemo_rl_cpp.data.interfaces import TokenizerType
from nemo_rl_cpp.environments.single_turn import assistant_text

BatchT = TypeVar("BatchT", bound=MutableMapping)
_OVERLONG_KEYS = ("overlong_buffer_length", "overlong_buffer_penalty", "max_response_length")
_TOLERANCE = 1e-6
_SMALLEST_RELATIVE_MAD = 0.015  # smallest (median absolute deviation / median) with outliers
Lengths = dict[str, list[int]]

THINKING_TAGS = ("<think>", "</think>")


def apply_reward_shaping(batch: BatchT, cfg: RewardShapingConfig) -> BatchT:
    """Shape `total_reward` of the batch in place and return the batch. Keep the original reward as
    `unshaped_total_reward`.

    The stop-properly penalty multiplies the reward by `stop_properly_penalty_coef` if `truncated` is set. The overlong
    penalty (DAPO, arXiv:2503.14476) gives reward + min(-(L - (max - buffer)) / buffer * penalty, 0), where L is the
    length of the first assistant message (or `response_token_lengths`). This penalty continues to grow beyond
    max_response_length. If the stop-properly penalty is configured, the overlong penalty applies only with `compose`.
    """
    cfg = as_model(cfg, RewardShapingConfig)
    if not cfg.enabled:
        return batch
    rewards: Tensor = batch["total_reward"]
    batch["unshaped_total_reward"] = rewards.clone()
    coef = cfg.stop_properly_penalty_coef
    if coef is not None:
        truncated = torch.as_tensor(batch["truncated"], device=rewards.device).bool()
        batch["total_reward"] = torch.where(truncated, rewards * coef, rewards)
    if coef is None or cfg.compose:
        _overlong(batch, cfg)
    return batch


def shaping_warning(cfg: RewardShapingConfig) -> str | None:
    """Return a warning if the stop-properly penalty disables keys of the overlong penalty that are set,
    otherwise None.
    """
    cfg = as_model(cfg, RewardShapingConfig)
    ignored = [key for key in _OVERLONG_KEYS if getattr(cfg, key) is not None]
    if not cfg.enabled or cfg.compose or cfg.stop_properly_penalty_coef is None or not ignored:
        return None
    return (
        f"[WARN] reward_shaping: stop_properly_penalty_coef is set, so {', '.join(ignored)} are ignored; "
        "set reward_shaping.compose: true to apply both, or the coefficient to null"
    )


def _overlong(batch: MutableMapping[str, Tensor], cfg: RewardShapingConfig) -> None:
    buffer, penalty, longest = cfg.overlong_buffer_length, cfg.overlong_buffer_penalty, cfg.max_response_length
    rewards: Tensor = batch["total_reward"]
    lengths = torch.as_tensor(_response_lengths(batch), dtype=torch.float64, device=rewards.device)
    overlong = torch.clamp(-(lengths - (longest - buffer)) / buffer * penalty, max=0.0)
    batch["total_reward"] = (rewards.double() + overlong).to(rewards.dtype)


def _response_lengths(batch: MutableMapping[str, Tensor]) -> Tensor | list[int]:
    """Return the number of tokens of each sample's first assistant message."""
    if "response_token_lengths" in batch:
        return batch["response_token_lengths"]
    return [next(len(m["token_ids"]) for m in log if m["role"] == "assistant") for log in batch["message_log"]]


def scale_rewards(repeated_batch: BatchT, reward_scaling_cfg: RewardScalingConfig) -> BatchT:
    """Rescale `total_reward` and every `reward/<name>` of the batch linearly, in place, and return the batch.

    r -> target_min + (clamp(r) - source_min) / (source_max - source_min) * (target_max - target_min). Print how many
    rewards were clamped to the source range. If source_min equals source_max, rewards become infinite or NaN, as in
    NeMo RL; the configuration loader rejects such settings.
    """
    cfg = as_model(reward_scaling_cfg, RewardScalingConfig)
    if not cfg.enabled:
        return repeated_batch
    low, high = float(cfg.source_min), float(cfg.source_max)
    target_low, target_high = float(cfg.target_min), float(cfg.target_max)
    keys = ["total_reward", *(k for k in repeated_batch.keys() if str(k).startswith("reward/"))]
    for key in keys:
        rewards = torch.as_tensor(repeated_batch[key])
        outside = int(((rewards < low) | (rewards > high)).sum())
        if outside:
            print(
                f"[WARNING]: reward_scaling: {outside} of {rewards.numel()} values of {key} lie outside [{low}, {high}] and are clamped"
            )
        span = torch.tensor(high - low, dtype=rewards.dtype if rewards.is_floating_point() else torch.float32)
        repeated_batch[key] = target_low + (rewards.clamp(low, high) - low) / span * (target_high - target_low)
    return repeated_batch


def apply_length_penalty(
    rollouts: MutableMapping[str, torch.Tensor], config: LengthPenaltyConfig, tokenizer: TokenizerType
) -> dict[str, float]:
    """Change `total_reward` [B] of the rollouts by response length, within each group (`group_id`), and return the
    metrics.

    A group stays unchanged if any of its rewards is neither 0 nor 1, or if rewards have components (`reward/<name>`). A
    reward never falls below 0. Metrics, all means over B: `length_penalty/env_reward_mean` (before the change),
    `reward_delta_mean`, `wiped_correct_frac` (correct responses reduced to 0), `adjusted_frac` and
    `skipped_non_binary_frac`.
    """
    before = rollouts["total_reward"].double().tolist()
    after, skipped = list(before), 0
    in_parts = any(str(key).startswith("reward/") for key in rollouts.keys())
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(rollouts["group_id"].tolist()):
        groups.setdefault(group, []).append(row)
    for rows in groups.values():
        params = config.params_of(rollouts["task_name"][rows[0]] if "task_name" in rollouts else None)
        if not params.enabled:
            continue
        rewards = [before[row] for row in rows]
        if in_parts or not all(min(abs(reward), abs(reward - 1.0)) <= _TOLERANCE for reward in rewards):
            skipped += len(rows)
            continue
        lengths = _lengths([assistant_text(rollouts["message_log"][row]) for row in rows], params, tokenizer)
        info = rollouts["extra_env_info"][rows[0]] if "extra_env_info" in rollouts else None
        n_std, min_samples = params.profiled_length_n_std, params.profiled_length_min_samples
        too_long = profiled_limit(info, n_std, min_samples) if params.profiled_length_penalty else None
        for row, reward in zip(rows, penalized(rewards, lengths, params, config.bands(), too_long)):
            after[row] = reward
        if config.verbose:
            print(
                f"length_penalty: rewards {rewards} -> {[round(after[row], 4) for row in rows]}, lengths {lengths['total']}",
                flush=True,
            )
    rollouts["total_reward"] = torch.tensor(after, dtype=rollouts["total_reward"].dtype)
    size = max(1, len(before))
    return {
        "length_penalty/env_reward_mean": sum(before) / size,
        "length_penalty/reward_delta_mean": sum(a - b for a, b in zip(after, before)) / size,
        "length_penalty/wiped_correct_frac": sum(b > 0 >= a for a, b in zip(after, before)) / size,
        "length_penalty/adjusted_frac": sum(a != b for a, b in zip(after, before)) / size,
        "length_penalty/skipped_non_binary_frac": skipped / size,
    }


def penalized(
    rewards: Sequence[float], lengths: Mapping[str, Sequence[int]], params: LengthPenaltyParams,
    bands: Mapping[str, ProfileBandChannel] | None = None, too_long: float | None = None,
) -> list[float]:  # fmt: skip
    """Return the rewards [G] of one group after length bonuses, length penalties and the factors of `bands`. Each
    reward is 0 or 1; rewards of 0 do not change.

        reward = max(0, reward + additions) x band_factor of each band

    Args:
        lengths: channel (`reasoning`, `answer`, `total`) -> [G].
        too_long: `profiled_length_penalty` is subtracted if the total length is at least this; None: never.
    """
    bands = bands or {}
    right = [i for i, reward in enumerate(rewards) if reward > 0]
    additions = _additions(right, lengths, params, _gate_is_open(right, lengths, params, bands))
    _add_pass_rate(additions, right, lengths["total"], params.pass_rate_length_penalty_weight)
    if too_long is not None:
        for i in right:
            additions[i] -= params.profiled_length_penalty * (lengths["total"][i] >= too_long)
    result = [max(0.0, reward + addition) if addition else reward for reward, addition in zip(rewards, additions)]
    for name in CHANNELS:
        if getattr(params, f"profile_band_{name}") and name in bands:
            for i in right:
                result[i] *= band_factor(lengths[name][i], bands[name])
    return result


def profiled_limit(info: Mapping[str, object] | None, n_std: float, min_samples: int) -> float | None:
    """Return the response length from which `profiled_length_penalty` applies, or None if it does not apply to the
    prompt.

    The limit is mean + n_std x unbiased standard deviation (0 for one sample) of those `profiled_output_lengths` whose
    `profiled_rewards` are above 0. `info` is the prompt's `extra_env_info`, which may hold these two lists from earlier
    responses. The penalty does not apply without the lists, or if fewer than `min_samples` rewards are above 0. Raise
    ValueError if only one list is there, or if their lengths differ.
    """
    info = info or {}
    rewards, lengths = info.get("profiled_rewards"), info.get("profiled_output_lengths")
    if rewards is None and lengths is None:
        return None
    if rewards is None or lengths is None or len(rewards) != len(lengths):
        raise ValueError(
            "grpo.length_penalty.default.profiled_length_penalty needs profiled_rewards and profiled_output_lengths of equal "
            f"length in extra_env_info, got {rewards} and {lengths}: correct the data, or set the penalty to 0"
        )
    passed = [length for reward, length in zip(rewards, lengths) if reward > 0]
    if len(passed) < min_samples:
        return None
    deviation = statistics.stdev(passed) if len(passed) > 1 else 0.0
    return statistics.mean(passed) + n_std * deviation


def band_factor(length: float, band: ProfileBandChannel) -> float:
    """Return the factor for a length: 1 up to `band.a`, `band.f` from `band.b` on, and a linear interpolation in
    between.
    """
    if length <= band.a:
        return 1.0
    if length >= band.b:
        return float(band.f)
    return 1.0 - (length - band.a) / (band.b - band.a) * (1.0 - band.f)


def _lengths(texts: list[str], params: LengthPenaltyParams, tokenizer: TokenizerType) -> Lengths:
    def measure(text: str) -> int:
        if params.length_type == "chars" or not text:
            return len(text)
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    parts = [reasoning_and_answer(text) for text in texts]
    reasoning, answer = [measure(part) for part, _ in parts], [measure(part) for _, part in parts]
    return {"reasoning": reasoning, "answer": answer, "total": [r + a for r, a in zip(reasoning, answer)]}


def reasoning_and_answer(text: str) -> tuple[str, str]:
    """Split a response into (reasoning, answer) at `</think>`. Without it, a text that begins with `<think>` is all
    reasoning, and any other text is all answer.
    """
    opening, closing = THINKING_TAGS
    before, end, after = text.partition(closing)
    if end:
        return before.removeprefix(opening), after
    return (text.removeprefix(opening), "") if text.lstrip().startswith(opening) else ("", text)


def _additions(
    right: list[int], lengths: Mapping[str, Sequence[int]], params: LengthPenaltyParams, gate: bool
) -> list[float]:
    """Return each response's bonuses minus penalties for its lengths, [G]; zeros if fewer than two are correct."""
    additions = [0.0] * len(lengths["total"])
    if len(right) < 2:
        return additions
    for name in CHANNELS:
        of = lengths[name]
        some = [i for i in right if of[i] > 0]  # rewards are equal, so top_percentile keeps all correct responses
        if (bonus := getattr(params, f"{name}_bonus")) and some:
            additions[min(some, key=lambda i: of[i])] += bonus
        if (penalty := getattr(params, f"longest_{name}_penalty")) and len(some) >= 2:
            additions[max(some, key=lambda i: of[i])] -= penalty
        if (factor := getattr(params, f"group_{name}_length_penalty_coeff")) and gate:
            for i, weight in zip(right, _centred_weights([of[i] for i in right])):
                additions[i] += factor * weight
        threshold, penalty = getattr(params, f"{name}_zmad_threshold"), getattr(params, f"{name}_zmad_penalty")
        if threshold > 0:
            for i in _outliers(right, of, threshold):
                additions[i] -= penalty
    return additions


def _centred_weights(lengths: list[int]) -> list[float]:
    """Return a weight per response, from 1 for the shortest to 0 for the longest, minus their mean. If all lengths are
    equal, return zeros.
    """
    low, high = min(lengths), max(lengths)
    if low == high:
        return [0.0] * len(lengths)
    weights = [1.0 - (length - low) / (high - low) for length in lengths]
    mean = sum(weights) / len(weights)
    return [weight - mean for weight in weights]


def _outliers(rows: list[int], lengths: Sequence[int], threshold: float) -> list[int]:
    """Return the rows whose length is far above the median, by the modified z-score of Iglewicz and Hoaglin."""
    values = [lengths[i] for i in rows]
    median = statistics.median(values)
    mad = statistics.median(abs(value - median) for value in values)
    if mad == 0 or mad / max(median, 1e-9) < _SMALLEST_RELATIVE_MAD:
        return []
    return [i for i in rows if 0.6745 * (lengths[i] - median) / mad > threshold]


def _add_pass_rate(additions: list[float], right: list[int], lengths: Sequence[int], weight: float) -> None:
    longest = max((lengths[i] for i in right), default=0)
    if weight and longest:
        for i in right:
            additions[i] -= weight * len(right) / len(additions) * lengths[i] / longest


def _gate_is_open(
    right: list[int],
    lengths: Mapping[str, Sequence[int]],
    params: LengthPenaltyParams,
    bands: Mapping[str, ProfileBandChannel],
) -> bool:
    if not params.group_length_penalty_profile_gate:
        return True
    channel = params.group_length_penalty_profile_gate_channel
    of = lengths[channel]
    counted = [of[i] for i in right] if params.group_length_penalty_profile_gate_positive_only else list(of)
    if channel not in bands or not counted:
        return False
    return statistics.mean(counted) > getattr(bands[channel], params.group_length_penalty_profile_gate_field)
