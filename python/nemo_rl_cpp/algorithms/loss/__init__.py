"""Loss functions and their configurations."""

from nemo_rl_cpp.algorithms.loss.clipped_pg import ClippedPGLossFn
from nemo_rl_cpp.algorithms.loss.interfaces import LossFunction, LossInputType, LossType, MetricNormalizer
from nemo_rl_cpp.algorithms.loss.value_loss import MseValueLossFn
from nemo_rl_cpp.config.loss import ClippedPGLossConfig, MseValueLossConfig

__all__ = [
    "ClippedPGLossConfig",
    "ClippedPGLossFn",
    "LossFunction",
    "LossInputType",
    "LossType",
    "MetricNormalizer",
    "MseValueLossConfig",
    "MseValueLossFn",
]
