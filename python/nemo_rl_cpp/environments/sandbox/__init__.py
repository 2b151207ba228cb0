"""The sandbox, which runs untrusted programs without network, with only their own files, and with limits."""

from nemo_rl_cpp.environments.sandbox.run import Limits, Outcome, SandboxUnavailableError, run_program

__all__ = ["Limits", "Outcome", "SandboxUnavailableError", "run_program"]
