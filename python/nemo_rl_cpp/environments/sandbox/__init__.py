"""Runs untrusted programs with limits on time, memory and processes, without network, and with files of their own
only."""

from nemo_rl_cpp.environments.sandbox.run import Limits, Outcome, SandboxUnavailableError, run_program

__all__ = ["Limits", "Outcome", "SandboxUnavailableError", "run_program"]
