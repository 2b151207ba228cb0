"""Re-export the loss functions at the path that the guides print."""

from nemo_rl_cpp.algorithms.loss import ClippedPGLossFn, MseValueLossFn
from nemo_rl_cpp.config.loss import ClippedPGLossConfig, MseValueLossConfig
