"""The contracts of policy, value model and generation in one place, where the GRPO guide has them."""

from nemo_rl_cpp.models.generation.interfaces import GenerationInterface
from nemo_rl_cpp.models.policy.interfaces import PolicyInterface
from nemo_rl_cpp.models.value.interfaces import ValueInterface

__all__ = ["GenerationInterface", "PolicyInterface", "ValueInterface"]
