"""The configuration of runs: YAML with inheritance, overrides and interpolation, checked by a schema without torch."""

from .errors import ConfigError, Problem
from .loader import (
    find_config,
    load_distillation_config,
    load_eval_config,
    load_grpo_config,
    load_ppo_config,
    load_sft_config,
)
from .master import (
    DistillationMasterConfig,
    EvalMasterConfig,
    GRPOMasterConfig,
    MasterConfig,
    PPOMasterConfig,
    SFTMasterConfig,
)

__all__ = [
    "ConfigError", "DistillationMasterConfig", "EvalMasterConfig", "GRPOMasterConfig", "MasterConfig", "PPOMasterConfig",
    "Problem", "SFTMasterConfig", "find_config", "load_distillation_config", "load_eval_config",
    "load_grpo_config", "load_ppo_config", "load_sft_config",
]  # fmt: skip
