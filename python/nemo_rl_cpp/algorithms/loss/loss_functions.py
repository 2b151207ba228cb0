"""The loss functions under NeMo RL's module path."""

from nemo_rl_cpp.algorithms.loss.clipped_pg import ClippedPGLossConfig, ClippedPGLossDataDict, ClippedPGLossFn

__all__ = ["ClippedPGLossConfig", "ClippedPGLossDataDict", "ClippedPGLossFn"]
