"""Loss functions, their configurations and the wrappers for packed sequences."""

from nemo_rl_cpp.algorithms.loss.interfaces import LossFunction, LossInputType, LossType, MetricNormalizer
from nemo_rl_cpp.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossDataDict, ClippedPGLossFn

__all__ = [
    "ClippedPGLossConfig",
    "ClippedPGLossDataDict",
    "ClippedPGLossFn",
    "LossFunction",
    "LossInputType",
    "LossType",
    "MetricNormalizer",
]
