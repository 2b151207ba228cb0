"""Keys that stand in NeMo RL's own recipes and that nothing reads, there or here: which key does what they seem to do."""

from __future__ import annotations

DEAD_KEYS = {
    "penalize_invalid_tool_call": "grpo.invalid_tool_call_advantage, for NeMo Gym, which is not supported here",
    "invalid_tool_call_strategy": "grpo.invalid_tool_call_advantage, for NeMo Gym, which is not supported here",
    "penalize_malformed_thinking": "grpo.malformed_thinking_advantage and reward_penalties.penalize_malformed_think_tag, for NeMo Gym, which "
    "is not supported here",
    "zero_variance_prompt_filtering": "grpo.use_dynamic_sampling",
    "num_val_generations_per_prompt": "grpo.val_num_generations_per_prompt",
    "activation_checkpointing_enabled": "policy.dtensor_cfg.activation_checkpointing, or policy.megatron_cfg.activation_checkpointing where "
    "that backend is enabled",
    "enforce_monotonicity": "none: sampling has no such setting",
    "steps_per_epoch": "ppo.ppo_epochs",
    "value_loss": "value_loss_fn",
}
"""The last part of the key -> the key that works."""


def dead_key(dotted: str) -> str | None:
    """What to say about a key that nothing reads; None for any other."""
    right = DEAD_KEYS.get(dotted.rpartition(".")[2])
    return (
        None if right is None else f"is read by nothing, in NeMo RL neither; the key that works is {right}; remove it"
    )
