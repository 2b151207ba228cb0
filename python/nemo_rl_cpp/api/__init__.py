"""What a notebook calls: `train_grpo`, `train_ppo`, `evaluate`, `load`. Importing the folder imports no torch."""

from nemo_rl_cpp.api.rows import Rows

__all__ = ["Rows"]
