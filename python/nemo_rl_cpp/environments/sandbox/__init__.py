"""Run untrusted programs: with limits of time, memory and processes, no network, and no files but their own folder."""

from nemo_rl_cpp.environments.sandbox.run import Limits, Outcome, SandboxUnavailableError, run_program

__all__ = ["Limits", "Outcome", "SandboxUnavailableError", "run_program"]
