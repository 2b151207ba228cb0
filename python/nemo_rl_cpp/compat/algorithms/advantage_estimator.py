"""Advantage estimators under NeMo RL's names."""

import torch
from torch import Tensor

from nemo_rl_cpp.algorithms import advantage_estimator as house
from nemo_rl_cpp.algorithms.advantage_estimator import (
    ADVANTAGE_ESTIMATORS,
    GDPOAdvantageEstimator,
    GRPOAdvantageEstimator,
    OPDAdvantageEstimator,
    RawRewardAdvantageEstimator,
    ReinforcePlusPlusAdvantageEstimator,
)
from nemo_rl_cpp.config.grpo import AdvEstimatorConfig


class GeneralizedAdvantageEstimator(house.GeneralizedAdvantageEstimator):
    """GAE, see `nemo_rl_cpp.algorithms.advantage_estimator`."""

    def _resolve_lambda_policy(self, mask: Tensor) -> float | Tensor:
        """Lambda of the advantages: of each row [B] if it adapts to the length, clamp(1 - 1 / max(alpha * length, 1), 0, 1)."""
        if self.length_adaptive_alpha > 0:
            scaled = (self.length_adaptive_alpha * mask.sum(-1).double()).clamp(min=1.0)
            return (1.0 - 1.0 / scaled).clamp(0.0, 1.0).to(torch.float32)
        return self.gae_lambda if self.gae_lambda_policy is None else self.gae_lambda_policy
