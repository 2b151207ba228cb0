"""What PPO's loop asks of a value model."""

from nemo_rl_cpp.models.value.interfaces import ValueInterface, ValueOutputSpec

__all__ = ["ValueInterface", "ValueOutputSpec"]
