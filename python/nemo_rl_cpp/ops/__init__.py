"""Typed entry points of the native core, one module an area. Names equal the C++ ones."""

from nemo_rl_cpp.ops.losses import ClippedPGConfig, ClippedPGResult, calculate_kl, clipped_pg_loss

__all__ = ["ClippedPGConfig", "ClippedPGResult", "calculate_kl", "clipped_pg_loss"]
