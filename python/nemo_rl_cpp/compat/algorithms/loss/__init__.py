"""Re-export the loss functions, their configurations and what a loss function is made of."""

from nemo_rl_cpp.algorithms.loss import ClippedPGLossFn, LossFunction, LossInputType, LossType, MseValueLossFn
from nemo_rl_cpp.config.loss import ClippedPGLossConfig, MseValueLossConfig
