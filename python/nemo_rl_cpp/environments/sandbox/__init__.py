"""Runs untrusted programs with limits on time, memory and processes, no network, and only their own files."""

from nemo_rl_cpp.environments.sandbox.run import Limits, Outcome, SandboxUnavailableError, run_program

__all__ = ["Limits", "Outcome", "SandboxUnavailableError", "run_program"]
