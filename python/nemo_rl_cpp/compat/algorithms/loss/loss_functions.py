"""Re-export the loss functions and their configurations."""

from nemo_rl_cpp.algorithms.loss import ClippedPGLossFn, MseValueLossFn
from nemo_rl_cpp.config.loss import ClippedPGLossConfig, MseValueLossConfig
