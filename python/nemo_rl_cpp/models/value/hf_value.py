"""PPO's critic on transformers (`value.backend: hf`): the layers of any architecture with a scalar head."""

from __future__ import annotations

from nemo_rl_cpp.models.hf.trained import HfTrainedModel
from nemo_rl_cpp.models.value.lm_value import Value


class HfValue(HfTrainedModel, Value):
    """As `Value`, its arguments included, for architectures without a native core."""
