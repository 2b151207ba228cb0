"""Runs untrusted programs: limits of time, memory and processes, no network, and no files but its own folder."""

from nemo_rl_cpp.environments.sandbox.limits import Limits
from nemo_rl_cpp.environments.sandbox.run import Outcome, SandboxUnavailableError, run_program

__all__ = ["Limits", "Outcome", "SandboxUnavailableError", "run_program"]
