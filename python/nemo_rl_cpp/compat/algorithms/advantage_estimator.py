"""Re-export the advantage estimators."""

from nemo_rl_cpp.algorithms.advantage_estimator import (
    GDPOAdvantageEstimator,
    GeneralizedAdvantageEstimator,
    GRPOAdvantageEstimator,
    RawRewardAdvantageEstimator,
    ReinforcePlusPlusAdvantageEstimator,
)
