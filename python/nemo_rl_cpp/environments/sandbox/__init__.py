"""The sandbox, which runs untrusted programs without network, with access only to their own files, and with limits on
time, memory and processes."""

from nemo_rl_cpp.environments.sandbox.run import Limits, Outcome, SandboxUnavailableError, run_program

__all__ = ["Limits", "Outcome", "SandboxUnavailableError", "run_program"]
