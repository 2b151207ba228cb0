"""Re-export what a loss function is made of."""

from nemo_rl_cpp.algorithms.loss import LossFunction, LossInputType, LossType
