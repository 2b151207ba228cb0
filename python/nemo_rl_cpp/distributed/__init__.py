"""Batches, devices and processes. Here `get` waits for the result of a `.remote(...)` call, as `ray.get` does."""

from nemo_rl_cpp.distributed.worker_calls import Future, get

__all__ = ["Future", "get"]
