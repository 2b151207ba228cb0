"""The older module path of the losses; the code is in nemo_rl_cpp.compat.algorithms.loss."""

from nemo_rl_cpp.compat.algorithms.loss import *  # noqa: F403
from nemo_rl_cpp.compat.algorithms.loss import __all__  # noqa: F401
