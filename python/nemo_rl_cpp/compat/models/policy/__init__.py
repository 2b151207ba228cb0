"""The policy: the model that is trained and that generates."""

from nemo_rl_cpp.config.policy import DynamicBatchingConfig, PolicyConfig, SequencePackingConfig, TokenizerConfig
