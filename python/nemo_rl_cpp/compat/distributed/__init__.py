"""Batches, devices and processes. `get` waits for the result of a `.remote(...)` call, as `ray.get` does."""

from nemo_rl_cpp.distributed.futures import Future, get
