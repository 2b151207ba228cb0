"""The loss functions under NeMo RL's module path."""

from nemo_rl_cpp.algorithms.loss.clipped_pg import ClippedPGLossConfig, ClippedPGLossDataDict, ClippedPGLossFn
from nemo_rl_cpp.algorithms.loss.value_loss import MseValueLossConfig, MseValueLossFn, NLLLossFn

__all__ = [
    "ClippedPGLossConfig",
    "ClippedPGLossDataDict",
    "ClippedPGLossFn",
    "MseValueLossConfig",
    "MseValueLossFn",
    "NLLLossFn",
]
