"""The module path of the losses that the guides print; the code is in nemo_rl_cpp.algorithms.loss."""

from nemo_rl_cpp.algorithms.loss import ClippedPGLossConfig, ClippedPGLossFn, MseValueLossConfig, MseValueLossFn

__all__ = ["ClippedPGLossConfig", "ClippedPGLossFn", "MseValueLossConfig", "MseValueLossFn"]
