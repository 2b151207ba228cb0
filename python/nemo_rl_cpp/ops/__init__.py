"""Typed entry points of the native core, one module an area. Names equal the C++ ones."""

from nemo_rl_cpp.ops.advantages import (
    GAEConfig,
    GroupBaseline,
    TokenAdvantages,
    gae,
    gdpo_advantages,
    group_baseline,
    group_ids_from_prompts,
    grpo_advantages,
    raw_reward,
    reinforce_plus_plus,
)
from nemo_rl_cpp.ops.losses import (
    ClippedPGConfig,
    ClippedPGInputs,
    ClippedPGResult,
    LossCounts,
    ValueLossResult,
    calculate_kl,
    clipped_pg_loss,
    mse_value_loss,
    token_loss,
)

__all__ = [
    "ClippedPGConfig",
    "ClippedPGInputs",
    "ClippedPGResult",
    "GAEConfig",
    "GroupBaseline",
    "LossCounts",
    "TokenAdvantages",
    "ValueLossResult",
    "calculate_kl",
    "clipped_pg_loss",
    "gae",
    "gdpo_advantages",
    "group_baseline",
    "group_ids_from_prompts",
    "grpo_advantages",
    "mse_value_loss",
    "raw_reward",
    "reinforce_plus_plus",
    "token_loss",
]
