"""Advantage estimators, over the native ops. One class and one line in ADVANTAGE_ESTIMATORS add another."""

from nemo_rl_cpp.algorithms.advantage_estimator import (
    ADVANTAGE_ESTIMATORS,
    GDPOAdvantageEstimator,
    GeneralizedAdvantageEstimator,
    GRPOAdvantageEstimator,
    OPDAdvantageEstimator,
    RawRewardAdvantageEstimator,
    ReinforcePlusPlusAdvantageEstimator,
)
from nemo_rl_cpp.config.grpo import AdvEstimatorConfig

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "AdvEstimatorConfig",
    "GDPOAdvantageEstimator",
    "GRPOAdvantageEstimator",
    "GeneralizedAdvantageEstimator",
    "OPDAdvantageEstimator",
    "RawRewardAdvantageEstimator",
    "ReinforcePlusPlusAdvantageEstimator",
]
