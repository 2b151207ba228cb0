"""The module path of the losses that the guides print; the code is in nemo_rl_cpp.algorithms.loss."""

from nemo_rl_cpp.algorithms.loss import *  # noqa: F403
from nemo_rl_cpp.algorithms.loss import __all__  # noqa: F401
