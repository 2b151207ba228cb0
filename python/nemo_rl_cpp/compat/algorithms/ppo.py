"""PPO under NeMo RL's names."""

from nemo_rl_cpp.algorithms.advantage_estimator import RawRewardAdvantageEstimator
from nemo_rl_cpp.algorithms.dynamic_sampling import dynamic_sampling
from nemo_rl_cpp.algorithms.ppo import (
    MasterConfig,
    PPOSaveState,
    _compute_critic_metrics,
    _create_advantage_estimator,
    async_ppo_train,
    main,
    ppo_train,
    setup,
    validate,
)
from nemo_rl_cpp.compat.algorithms.advantage_estimator import GeneralizedAdvantageEstimator
from nemo_rl_cpp.config.logger import LoggerConfig as PPOLoggerConfig
from nemo_rl_cpp.config.ppo import AsyncPPOConfig, PPOConfig
from nemo_rl_cpp.config.ppo import GAEConfig as AdvEstimatorConfig

__all__ = [
    "AdvEstimatorConfig",
    "AsyncPPOConfig",
    "GeneralizedAdvantageEstimator",
    "MasterConfig",
    "PPOConfig",
    "PPOLoggerConfig",
    "PPOSaveState",
    "RawRewardAdvantageEstimator",
    "_compute_critic_metrics",
    "_create_advantage_estimator",
    "async_ppo_train",
    "dynamic_sampling",
    "main",
    "ppo_train",
    "setup",
    "validate",
]
