"""Functions that change rewards: linear scaling, DAPO's overlong penalty, ProRLv2's stop-properly penalty,
`grpo.length_penalty` and `reward_penalties`."""

import statistics
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

from nemo_rl_cpp.config import penalties
from nemo_rl_cpp.config.base import as_model
from nemo_rl_cpp.config.loop import RewardScalingConfig, RewardShapingConfig
from nemo_rl_cpp.data.interfaces import LLMMessageLogType, Message, TokenizerType
from nemo_rl_cpp.data.texts import text_of
from nemo_rl_cpp.environments.single_turn import assistant_text, prompt_text

BatchT = TypeVar("BatchT", bound=MutableMapping)
_TOLERANCE = 1e-6
_SMALLEST_RELATIVE_MAD = 0.015  # smallest (median absolute deviation / median) with outliers
Lengths = dict[str, list[int]]

THINKING_TAGS = ("<think>", "</think>")


def apply_reward_shaping(batch: BatchT, cfg: RewardShapingConfig) -> BatchT:
    """Shape `total_reward` of the batch in place and return the batch. Keep the original as `unshaped_total_reward`.

    The stop-properly penalty multiplies the reward by `stop_properly_penalty_coef` if `truncated` is set. The overlong
    penalty (DAPO, arXiv:2503.14476) gives reward + min(-(L - (max - buffer)) / buffer * penalty, 0), without a limit
    for L above max. L is the length of the first assistant message, max is max_response_length, buffer and penalty are
    the keys `overlong_buffer_*`. With a stop-properly penalty it applies only with `compose`."""
    cfg = as_model(cfg, RewardShapingConfig)
    if not cfg.enabled:
        return batch
    rewards: Tensor = batch["total_reward"]
    batch["unshaped_total_reward"] = rewards.clone()
    coef = cfg.stop_properly_penalty_coef
    if coef is not None:
        truncated = torch.as_tensor(batch["truncated"], device=rewards.device).bool()
        rewards = torch.where(truncated, rewards * coef, rewards)
    if cfg.applies_overlong_penalty:
        buffer, penalty, longest = cfg.overlong_buffer_length, cfg.overlong_buffer_penalty, cfg.max_response_length
        lengths = [_first_response_length(log) for log in batch["message_log"]]
        beyond = torch.tensor(lengths, dtype=torch.float64, device=rewards.device) - (longest - buffer)
        rewards = (rewards.double() + torch.clamp(-beyond / buffer * penalty, max=0.0)).to(rewards.dtype)
    batch["total_reward"] = rewards
    return batch


def _first_response_length(log: LLMMessageLogType) -> int:
    """Return the number of tokens of a conversation's first response, or 0 if an agent failed before it."""
    return next((len(message["token_ids"]) for message in log if message["role"] == "assistant"), 0)


def shaping_warning(cfg: RewardShapingConfig) -> str | None:
    """Return a warning if the stop-properly penalty disables an overlong penalty whose keys are set, otherwise None."""
    keys = ("overlong_buffer_length", "overlong_buffer_penalty", "max_response_length")
    ignored = [key for key in keys if getattr(cfg, key) is not None]
    if not cfg.enabled or cfg.applies_overlong_penalty or not ignored:
        return None
    return (
        f"[WARN] reward_shaping: stop_properly_penalty_coef is set, so {', '.join(ignored)} are ignored; "
        "set reward_shaping.compose: true to apply both, or the coefficient to null"
    )


def scale_rewards(repeated_batch: BatchT, reward_scaling_cfg: RewardScalingConfig) -> BatchT:
    """Rescale `total_reward` and every `reward/<name>` linearly in place: r -> target_min + (clamp(r) - source_min) /
    (source_max - source_min) * (target_max - target_min). Print how many were clamped; return the batch."""
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
    rollouts: MutableMapping[str, torch.Tensor], config: penalties.LengthPenaltyConfig, tokenizer: TokenizerType
) -> dict[str, float]:
    """Change `total_reward` [B] by response length, within each group, and return the metrics.

    A group stays unchanged if any of its rewards is neither 0 nor 1, or if rewards have components. Bands in the entry
    `profile_band` of a prompt's `extra_env_info` replace those of `config`. Metrics, all means over B:
    `length_penalty/env_reward_mean` (before the change), `reward_delta_mean`, `wiped_correct_frac` (correct responses
    reduced to 0), `adjusted_frac` and `skipped_non_binary_frac`."""
    before = rollouts["total_reward"].double().tolist()
    after, skipped = list(before), 0
    in_parts = any(str(key).startswith("reward/") for key in rollouts.keys())
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(rollouts["group_id"].tolist()):
        groups.setdefault(group, []).append(row)
    logs = _with_tags(rollouts["message_log"], tokenizer)
    for rows in groups.values():
        params = config.params_of(rollouts["task_name"][rows[0]] if "task_name" in rollouts else None)
        if not params.enabled:
            continue
        rewards = [before[row] for row in rows]
        if in_parts or not all(min(abs(reward), abs(reward - 1.0)) <= _TOLERANCE for reward in rewards):
            skipped += len(rows)
            continue
        lengths = _lengths([logs[row] for row in rows], params, tokenizer)
        info = rollouts["extra_env_info"][rows[0]] if "extra_env_info" in rollouts else None
        info = info if isinstance(info, Mapping) else {}
        of_row = {name: band for name, band in (info.get("profile_band") or {}).items() if band is not None}
        bands = config.bands() | {name: as_model(of_row[name], penalties.ProfileBandChannel) for name in of_row}
        n_std, min_samples = params.profiled_length_n_std, params.profiled_length_min_samples
        too_long = profiled_limit(info, n_std, min_samples) if params.profiled_length_penalty else None
        for row, reward in zip(rows, penalized(rewards, lengths, params, bands, too_long)):
            after[row] = reward
        if config.verbose:
            shown = [round(after[row], 4) for row in rows]
            print(f"length_penalty: rewards {rewards} -> {shown}, lengths {lengths['total']}", flush=True)
    rollouts["total_reward"] = torch.tensor(after, dtype=rollouts["total_reward"].dtype)
    pairs = list(zip(before, after))
    sums = {
        "env_reward_mean": sum(before), "reward_delta_mean": sum(a - b for b, a in pairs),
        "wiped_correct_frac": sum(b > 0 >= a for b, a in pairs), "adjusted_frac": sum(a != b for b, a in pairs),
        "skipped_non_binary_frac": skipped,
    }  # fmt: skip
    return {f"length_penalty/{name}": total / max(1, len(before)) for name, total in sums.items()}


def penalized(
    rewards: Sequence[float], lengths: Mapping[str, Sequence[int]], params: penalties.LengthPenaltyParams,
    bands: Mapping[str, penalties.ProfileBandChannel] | None = None, too_long: float | None = None,
) -> list[float]:  # fmt: skip
    """Return the rewards of the G responses to one prompt, after length bonuses, length penalties and the factors of
    `bands`. Of the `rewards`, 0 does not change, and 1 becomes

        max(0, 1 + bonuses - penalties) x band_factor(length, band) for each band

    `lengths` maps each part of a response (`reasoning`, `answer`, `total`) to its G lengths. `params` has the weights
    of bonuses and penalties, and determines to which parts the bands apply; `bands` maps parts to their bands (None: no
    bands). Responses whose total length is at least `too_long` (None: no limit) also get the penalty
    `profiled_length_penalty`, as in NeMo RL only if the comparison with the group has not lowered their reward."""
    bands = bands or {}
    right = [i for i, reward in enumerate(rewards) if reward > 0]
    additions = _additions(right, lengths, params, _gate_is_open(right, lengths, params, bands))
    if too_long is not None:
        for i in right:
            additions[i] -= params.profiled_length_penalty * (lengths["total"][i] >= too_long and additions[i] >= 0)
    weight, longest = params.pass_rate_length_penalty_weight, max((lengths["total"][i] for i in right), default=0)
    if weight and longest:
        for i in right:
            additions[i] -= weight * len(right) / len(additions) * lengths["total"][i] / longest
    result = [max(0.0, reward + addition) if addition else reward for reward, addition in zip(rewards, additions)]
    for name in penalties.CHANNELS:
        if getattr(params, f"profile_band_{name}") and name in bands:
            for i in right:
                result[i] *= band_factor(lengths[name][i], bands[name])
    return result


def profiled_limit(info: Mapping[str, object], n_std: float, min_samples: int) -> float | None:
    """Return the response length from which `profiled_length_penalty` applies, or None if it does not.

    The limit is mean + n_std x unbiased standard deviation (0 for one sample) of those `profiled_output_lengths` whose
    `profiled_rewards` are above 0; `info`, the prompt's `extra_env_info`, has these lists of earlier responses. There
    must be `min_samples` such lengths. Raise ValueError if only one list is there, or if their lengths differ."""
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


def band_factor(length: float, band: penalties.ProfileBandChannel) -> float:
    """Return the factor for a response of this length: 1 up to `band.a`, `band.f` from `band.b`, linear between."""
    if length <= band.a:
        return 1.0
    if length >= band.b:
        return float(band.f)
    return 1.0 - (length - band.a) / (band.b - band.a) * (1.0 - band.f)


def _lengths(logs: list[LLMMessageLogType], params: penalties.LengthPenaltyParams, tokenizer: TokenizerType) -> Lengths:
    def measure(text: str) -> int:
        in_characters = params.length_type == "chars" or not text
        return len(text if in_characters else tokenizer(text, add_special_tokens=False)["input_ids"])

    parts = [reasoning_and_answer(assistant_text(log), _opens_thinking(prompt_text(log))) for log in logs]
    reasoning, answer = [measure(part) for part, _ in parts], [measure(part) for _, part in parts]
    return {"reasoning": reasoning, "answer": answer, "total": [r + a for r, a in zip(reasoning, answer)]}


def reasoning_and_answer(text: str, opens_thinking: bool) -> tuple[str, str]:
    """Split a response into (reasoning, answer) at `</think>`. Without it, a text after `<think>`, with which the prompt
    may end (`opens_thinking`), is reasoning."""
    opening, closing = THINKING_TAGS
    before, end, after = text.partition(closing)
    if end:
        return before.removeprefix(opening), after
    is_reasoning = opens_thinking or text.lstrip().startswith(opening)
    return (text.removeprefix(opening), "") if is_reasoning else ("", text)


def _with_tags(logs: list[LLMMessageLogType], tokenizer: TokenizerType) -> list[LLMMessageLogType]:
    """Return the conversations, with the thinking tags in the texts of the responses even if they are special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    added = backend.get_added_tokens_decoder() if backend is not None else {}
    tags = {i: token.content for i, token in added.items() if token.special and token.content in THINKING_TAGS}

    def text(ids: list[int]) -> str:
        runs = [(tag, list(run)) for tag, run in groupby(ids, tags.get)]
        return "".join(text_of(tokenizer, run) if tag is None else tag * len(run) for tag, run in runs)

    def spelled(message: Message) -> Message:
        is_response = message["role"] == "assistant"
        return {**message, "content": text(message["token_ids"].tolist())} if is_response else message

    return [[spelled(message) for message in log] for log in logs] if tags else logs


def _opens_thinking(prompt: str) -> bool:
    return prompt.rstrip().endswith(THINKING_TAGS[0])


def _additions(
    right: list[int], lengths: Mapping[str, Sequence[int]], params: penalties.LengthPenaltyParams, gate: bool
) -> list[float]:
    """Return for each response its length bonuses minus its length penalties. All are 0 if fewer than two are `right`
    (indices of correct responses). `gate` enables `group_*_length_penalty_coeff`."""
    additions = [0.0] * len(lengths["total"])
    if len(right) < 2:
        return additions
    for name in penalties.CHANNELS:
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
    """Return weights from 1 (shortest) to 0 (longest), minus their mean; zeros if all lengths are equal."""
    low, high = min(lengths), max(lengths)
    if low == high:
        return [0.0] * len(lengths)
    weights = [1.0 - (length - low) / (high - low) for length in lengths]
    mean = sum(weights) / len(weights)
    return [weight - mean for weight in weights]


def _outliers(rows: list[int], lengths: Sequence[int], threshold: float) -> list[int]:
    """Return the `rows` whose length has a modified z-score (Iglewicz and Hoaglin) above `threshold`."""
    values = [lengths[i] for i in rows]
    median = statistics.median(values)
    mad = statistics.median(abs(value - median) for value in values)
    if mad == 0 or mad / max(median, 1e-9) < _SMALLEST_RELATIVE_MAD:
        return []
    return [i for i in rows if 0.6745 * (lengths[i] - median) / mad > threshold]


def _gate_is_open(
    right: list[int], lengths: Mapping[str, Sequence[int]], params: penalties.LengthPenaltyParams, bands: Mapping[str, penalties.ProfileBandChannel]
) -> bool:  # fmt: skip
    if not params.group_length_penalty_profile_gate:
        return True
    channel = params.group_length_penalty_profile_gate_channel
    of = lengths[channel]
    counted = [of[i] for i in right] if params.group_length_penalty_profile_gate_positive_only else list(of)
    if channel not in bands or not counted:
        return False
    return statistics.mean(counted) > getattr(bands[channel], params.group_length_penalty_profile_gate_field)


# ---- reward_penalties: a response with a formal defect gets reward 0


def apply_reward_penalties(
    rollouts: MutableMapping[str, torch.Tensor], config: penalties.RewardPenaltyConfig, tokenizer: TokenizerType
) -> dict[str, float]:
    """Set the rewards of conversations with a defect that `config` penalises to 0. Return the share of conversations
    with each defect, under NeMo RL's metric names. NeMo RL penalises only in NeMo Gym, we in every environment."""
    defects: dict[str, Callable[[LLMMessageLogType], bool]] = {}
    if config.penalize_duplicated_reasoning:
        defects["reasoning_equal_to_final_answer_rate"] = has_duplicated_reasoning
    if config.penalize_empty_final_answer:
        defects["empty_final_answer_rate"] = has_empty_final_answer
    if config.penalize_unwanted_tokens:
        unwanted = torch.tensor(config.ids.unwanted)
        defects["unwanted_token_rate"] = lambda log: any(
            message["role"] == "assistant" and bool(torch.isin(message["token_ids"], unwanted).any()) for message in log
        )
    if config.penalize_malformed_think_tag:
        tags = config.ids.thinking
        if tags is None:
            ids = [tokenizer(tag, add_special_tokens=False)["input_ids"] for tag in THINKING_TAGS]
            tags = (ids[0][0], ids[1][0]) if all(len(each) == 1 for each in ids) else None
        defects["malformed_think_tag_rate"] = partial(has_malformed_thinking, tag_ids=tags)
    logs = _with_tags(rollouts["message_log"], tokenizer)
    metrics, bad = {}, torch.zeros(len(logs), dtype=torch.bool)
    for name, has_defect in defects.items():
        found = torch.tensor([has_defect(log) for log in logs], dtype=torch.bool)
        metrics[name] = int(found.sum()) / max(1, len(logs))
        bad |= found
    for key in [key for key in rollouts.keys() if key == "total_reward" or str(key).startswith("reward/")]:
        rollouts[key] = rollouts[key].masked_fill(bad, 0.0)
    return metrics


def _parts(log: LLMMessageLogType) -> list[tuple[str, str]]:
    """Return (reasoning, answer) of each response of a conversation."""
    texts = [str(message["content"]) for message in log]
    return [
        reasoning_and_answer(text, _opens_thinking(before))
        for message, text, before in zip(log, texts, ["", *texts])
        if message["role"] == "assistant"
    ]


def has_duplicated_reasoning(log: LLMMessageLogType) -> bool:
    """Return whether, in some response of a conversation, the answer repeats the reasoning word for word."""
    return any(reasoning.strip() and reasoning.strip() == answer.strip() for reasoning, answer in _parts(log))


def has_empty_final_answer(log: LLMMessageLogType) -> bool:
    """Return whether a conversation's last response has no answer, for instance because its reasoning was truncated."""
    last = _parts(log)[-1:]
    return not last or not last[0][1].strip()


def has_malformed_thinking(log: LLMMessageLogType, tag_ids: tuple[int, int] | None) -> bool:
    """Return whether a conversation has misplaced thinking tags. A response must not contain `<think>`, because the
    prompt opens the thinking. The opening minus the closing tags in the messages between two responses must be 1 (the
    response must then contain `</think>` once) or 0 (never). These rules count token ids, unless `tag_ids` is None. In
    its text, a response may have no `<think>` and at most one `</think>`."""
    opened = closed = 0  # in the messages since the last response
    for message in log:
        here = (0, 0) if tag_ids is None else tuple(int((message["token_ids"] == tag).sum()) for tag in tag_ids)
        if message["role"] != "assistant":
            opened, closed = opened + here[0], closed + here[1]
            continue
        text = str(message["content"])
        if tag_ids is not None and (opened - closed not in (0, 1) or here != (0, opened - closed)):
            return True
        if text.count(THINKING_TAGS[0]) > 0 or text.count(THINKING_TAGS[1]) > 1:
            return True
        opened = closed = 0
    return False
