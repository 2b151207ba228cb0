"""GRPO under NeMo RL's names."""

from nemo_rl_cpp.algorithms.advantage_estimator import (
    GDPOAdvantageEstimator,
    GRPOAdvantageEstimator,
    OPDAdvantageEstimator,
    ReinforcePlusPlusAdvantageEstimator,
)
from nemo_rl_cpp.algorithms.dynamic_sampling import dynamic_sampling
from nemo_rl_cpp.algorithms.grpo import (
    GRPOSaveState,
    MasterConfig,
    _clip_grpo_advantages,
    _create_advantage_estimator,
    add_grpo_token_loss_masks_and_generation_logprobs,
    async_grpo_train,
    grpo_train,
    main,
    refit_policy_generation,
    setup,
    validate,
)
from nemo_rl_cpp.algorithms.reward_functions import apply_reward_shaping
from nemo_rl_cpp.algorithms.reward_scaling import scale_rewards
from nemo_rl_cpp.algorithms.seq_logprob_error import compute_and_apply_seq_logprob_error_masking
from nemo_rl_cpp.algorithms.setup import shutdown_environments
from nemo_rl_cpp.algorithms.utils import calculate_baseline_and_std_per_prompt, set_seed
from nemo_rl_cpp.config.grpo import AdvEstimatorConfig, AsyncGRPOConfig, GRPOConfig, RewardPenaltyConfig
from nemo_rl_cpp.config.logger import LoggerConfig as GRPOLoggerConfig
from nemo_rl_cpp.config.rewards import RewardScalingConfig, RewardShapingConfig
from nemo_rl_cpp.experience.rollout_runner import aggregate_rollout_metrics
from nemo_rl_cpp.experience.train_batch import extract_initial_prompt_messages

__all__ = [
    "AdvEstimatorConfig",
    "AsyncGRPOConfig",
    "GDPOAdvantageEstimator",
    "GRPOAdvantageEstimator",
    "GRPOConfig",
    "GRPOLoggerConfig",
    "GRPOSaveState",
    "MasterConfig",
    "OPDAdvantageEstimator",
    "ReinforcePlusPlusAdvantageEstimator",
    "RewardPenaltyConfig",
    "RewardScalingConfig",
    "RewardShapingConfig",
    "_clip_grpo_advantages",
    "_create_advantage_estimator",
    "add_grpo_token_loss_masks_and_generation_logprobs",
    "aggregate_rollout_metrics",
    "apply_reward_shaping",
    "async_grpo_train",
    "calculate_baseline_and_std_per_prompt",
    "compute_and_apply_seq_logprob_error_masking",
    "dynamic_sampling",
    "extract_initial_prompt_messages",
    "grpo_train",
    "main",
    "refit_policy_generation",
    "scale_rewards",
    "set_seed",
    "setup",
    "shutdown_environments",
    "validate",
]
