"""Loss functions, their configurations and the wrappers for packed sequences."""

from nemo_rl_cpp.algorithms.loss import LossFunction, LossInputType, LossType, MetricNormalizer
from nemo_rl_cpp.compat.algorithms.loss.loss_functions import (
    ClippedPGLossConfig,
    ClippedPGLossDataDict,
    ClippedPGLossFn,
    MseValueLossConfig,
    MseValueLossFn,
    NLLLossFn,
)
from nemo_rl_cpp.compat.algorithms.loss.utils import prepare_loss_input, prepare_packed_loss_input
from nemo_rl_cpp.compat.algorithms.loss.wrapper import SequencePackingFusionLossWrapper, SequencePackingLossWrapper

__all__ = [
    "ClippedPGLossConfig",
    "ClippedPGLossDataDict",
    "ClippedPGLossFn",
    "LossFunction",
    "LossInputType",
    "LossType",
    "MetricNormalizer",
    "MseValueLossConfig",
    "MseValueLossFn",
    "NLLLossFn",
    "SequencePackingFusionLossWrapper",
    "SequencePackingLossWrapper",
    "prepare_loss_input",
    "prepare_packed_loss_input",
]
