"""Reward shaping by response length: DAPO's overlong penalty and ProRLv2's stop-properly penalty."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TypeVar

import torch
from torch import Tensor

from nemo_rl_cpp.algorithms._config import as_model
from nemo_rl_cpp.config.loop import RewardShapingConfig

BatchT = TypeVar("BatchT", bound=MutableMapping)
_OVERLONG_KEYS = ("overlong_buffer_length", "overlong_buffer_penalty", "max_response_length")


def apply_reward_shaping(batch: BatchT, cfg: RewardShapingConfig, quiet: bool = False) -> BatchT:
    """Shapes `total_reward` of the batch in place and returns it; the raw one stays as `unshaped_total_reward`.

    Prints what stop-properly did and which keys it leaves out, as NeMo RL does; not when `quiet` (the training loop says
    once, at its start, what `shaping_warning` gives, and logs `truncation_rate`).

    Stop-properly: reward * coef where `truncated` is set. Overlong (DAPO, arXiv:2503.14476), with L the length of the
    first assistant message (or `response_token_lengths`): reward + min(-(L - (max - buffer)) / buffer * penalty, 0).
    The penalty keeps growing beyond max_response_length.

    Raises ValueError when shaping is enabled with neither complete; AssertionError for a coefficient outside [0, 1], a
    negative penalty, or data that lacks `truncated` or an assistant message; ZeroDivisionError for a buffer of 0.
    """
    cfg = as_model(cfg, RewardShapingConfig)
    if not cfg.enabled:
        return batch
    batch["unshaped_total_reward"] = batch["total_reward"].clone()
    if cfg.stop_properly_penalty_coef is not None:
        _stop_properly(batch, cfg, quiet)
        if not cfg.compose:
            return batch
    _overlong(batch, cfg)
    return batch


def shaping_warning(cfg: RewardShapingConfig) -> str | None:
    """What to tell the user when stop-properly leaves overlong keys without effect."""
    cfg = as_model(cfg, RewardShapingConfig)
    ignored = [key for key in _OVERLONG_KEYS if getattr(cfg, key) is not None]
    if not cfg.enabled or cfg.compose or cfg.stop_properly_penalty_coef is None or not ignored:
        return None
    return (
        f"[WARN] reward_shaping: stop_properly_penalty_coef is set, so {', '.join(ignored)} are ignored; "
        "set reward_shaping.compose: true to apply both, or the coefficient to null"
    )


def _stop_properly(batch: MutableMapping[str, Tensor], cfg: RewardShapingConfig, quiet: bool) -> None:
    coef = cfg.stop_properly_penalty_coef
    assert 0 <= coef <= 1, f"stop_properly_penalty_coef must be in [0, 1], but it is {coef}"
    if not quiet and (warning := shaping_warning(cfg)):
        print(warning, flush=True)
    rewards: Tensor = batch["total_reward"]
    truncated = batch.get("truncated")
    assert truncated is not None, (
        "truncated field not found in the batch: reward_shaping.stop_properly_penalty_coef needs it"
    )
    truncated = torch.as_tensor(truncated, device=rewards.device).bool()
    batch["total_reward"] = torch.where(truncated, rewards * coef, rewards)
    if not quiet:
        print(
            f"[INFO] stop properly: {int(truncated.sum())} of {truncated.numel()} samples truncated, reward times {coef}",
            flush=True,
        )


def _overlong(batch: MutableMapping[str, Tensor], cfg: RewardShapingConfig) -> None:
    buffer, penalty, longest = cfg.overlong_buffer_length, cfg.overlong_buffer_penalty, cfg.max_response_length
    missing = [key for key in _OVERLONG_KEYS if getattr(cfg, key) is None]
    if missing:
        raise ValueError(
            "DAPO reward shaping is currently supported with all of its keys, or stop_properly_penalty_coef alone: "
            f"reward_shaping is enabled but {', '.join(missing)} is not set"
        )
    assert penalty >= 0, f"overlong_buffer_penalty is {penalty}; expected a number >= 0"
    if buffer == 0:
        raise ZeroDivisionError("reward_shaping.overlong_buffer_length is 0; expected at least 1 token")
    rewards: Tensor = batch["total_reward"]
    lengths = _response_lengths(batch)
    assert len(lengths) == len(rewards), (
        "The number of messages in the batch must match the number of rewards, "
        f"but there are {len(lengths)} message logs and {len(rewards)} rewards"
    )
    excess = torch.tensor(lengths, dtype=torch.float64, device=rewards.device) - (longest - buffer)
    overlong = torch.clamp(-excess / buffer * penalty, max=0.0)
    batch["total_reward"] = (rewards.double() + overlong).to(rewards.dtype)


def _response_lengths(batch: MutableMapping[str, Tensor]) -> list[int]:
    """Tokens of each sample's first assistant message."""
    known = batch.get("response_token_lengths")
    if known is not None:
        return known.tolist() if isinstance(known, Tensor) else list(known)
    lengths = []
    for message_log in batch["message_log"]:
        found = next((len(m["token_ids"]) for m in message_log if m["role"] == "assistant"), None)
        assert found is not None, "Assistant response not found during reward shaping: its length is needed"
        lengths.append(found)
    return lengths
