"""What a loss function is to a trainer."""

from nemo_rl_cpp.algorithms.loss import LossFunction, LossInputType, LossType, MetricNormalizer

__all__ = ["LossFunction", "LossInputType", "LossType", "MetricNormalizer"]
