"""PPO's critic on the native core: the policy's architecture with a scalar head in place of the language-model head."""

from nemo_rl_cpp.models.value.lm_value import Value
