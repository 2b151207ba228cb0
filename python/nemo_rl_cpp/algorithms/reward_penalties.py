"""NeMo RL's `reward_penalties`: a response with a formal defect gets reward 0. NeMo RL applies them only in NeMo Gym,
this package in every environment.
"""

from collections.abc import Callable, MutableMapping
from functools import partial

import torch

from nemo_rl_cpp.algorithms.reward_functions import THINKING_TAGS, reasoning_and_answer
from nemo_rl_cpp.config.penalties import RewardPenaltyConfig
from nemo_rl_cpp.data.interfaces import LLMMessageLogType, TokenizerType

Defect = Callable[[LLMMessageLogType], bool]


def apply_reward_penalties(
    rollouts: MutableMapping[str, torch.Tensor], config: RewardPenaltyConfig, tokenizer: TokenizerType
) -> dict[str, float]:
    """Set `total_reward` [B] and its components (`reward/<name>`) to 0 for conversations with a defect that the
    configuration penalises. Return the share of conversations with each defect, under NeMo RL's metric names.
    """
    logs = rollouts["message_log"]
    metrics, bad = {}, torch.zeros(len(logs), dtype=torch.bool)
    for name, has_defect in defects_of(config, tokenizer).items():
        found = torch.tensor([has_defect(log) for log in logs], dtype=torch.bool)
        metrics[name] = int(found.sum()) / max(1, len(logs))
        bad |= found
    for key in [key for key in rollouts.keys() if key == "total_reward" or str(key).startswith("reward/")]:
        rollouts[key] = rollouts[key].masked_fill(bad, 0.0)
    return metrics


def defects_of(config: RewardPenaltyConfig, tokenizer: TokenizerType) -> dict[str, Defect]:
    """Return {metric name: function} for the defects that the configuration penalises. Each function returns whether a
    conversation has the defect.
    """
    defects: dict[str, Defect] = {}
    if config.penalize_duplicated_reasoning:
        defects["reasoning_equal_to_final_answer_rate"] = has_duplicated_reasoning
    if config.penalize_empty_final_answer:
        defects["empty_final_answer_rate"] = has_empty_final_answer
    if config.penalize_unwanted_tokens:
        defects["unwanted_token_rate"] = partial(has_token, unwanted=config.ids.unwanted)
    if config.penalize_malformed_think_tag:
        tags = config.ids.thinking or _single_tokens(tokenizer)
        defects["malformed_think_tag_rate"] = partial(has_malformed_thinking, tag_ids=tags)
    return defects


def has_duplicated_reasoning(log: LLMMessageLogType) -> bool:
    """Return whether a response's answer repeats its reasoning word for word."""
    for message in _responses(log):
        reasoning, answer = reasoning_and_answer(str(message["content"]))
        if reasoning.strip() and reasoning.strip() == answer.strip():
            return True
    return False


def has_empty_final_answer(log: LLMMessageLogType) -> bool:
    """Return whether the last response has no answer, for instance because it was truncated during its reasoning."""
    last = _responses(log)[-1:]
    return not last or not reasoning_and_answer(str(last[0]["content"]))[1].strip()


def has_token(log: LLMMessageLogType, unwanted: list[int]) -> bool:
    """Return whether a response contains one of the `unwanted` token ids."""
    return any(bool(torch.isin(message["token_ids"], torch.tensor(unwanted)).any()) for message in _responses(log))


def has_malformed_thinking(log: LLMMessageLogType, tag_ids: tuple[int, int] | None) -> bool:
    """Return whether a conversation has misplaced thinking tags, `<think>` or `</think>`.

    A response must not contain `<think>`, because the prompt opens the thinking. Consider the messages before it, back
    to the previous response. If they have one opening tag more than closing tags, the response must close the thinking
    exactly once. If they have equally many, it must not close it. Any other difference is a defect. These rules count
    token ids; they are skipped if `tag_ids`, the ids of `<think>` and `</think>`, is None. In its text, a response may
    have no `<think>` and at most one `</think>`.
    """
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


def _responses(log: LLMMessageLogType) -> LLMMessageLogType:
    return [message for message in log if message["role"] == "assistant"]


def _single_tokens(tokenizer: TokenizerType) -> tuple[int, int] | None:
    """Return the token ids of the thinking tags, or None if a tag is not a single token."""
    ids = [tokenizer(tag, add_special_tokens=False)["input_ids"] for tag in THINKING_TAGS]
    return (int(ids[0][0]), int(ids[1][0])) if all(len(each) == 1 for each in ids) else None
