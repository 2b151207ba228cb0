"""Re-export the contracts of a policy and of a value model."""

from nemo_rl_cpp.models.interfaces import PolicyInterface, ValueInterface
