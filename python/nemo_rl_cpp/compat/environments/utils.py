"""Environments by name, and work dealt out to workers."""

from typing import Any

from nemo_rl_cpp.environments.utils import ENV_REGISTRY, create_env, register_env


def chunk_list_to_workers(to_chunk: list[Any], num_workers: int) -> list[list[Any]]:
    """Consecutive parts of ceil(n / num_workers) items, in order; the last may be shorter.

    With fewer items than workers every item is a part of its own, followed by empty parts.
    """
    if len(to_chunk) <= num_workers:
        return [[item] for item in to_chunk] + [[] for _ in range(num_workers - len(to_chunk))]
    size = -(-len(to_chunk) // num_workers)
    return [to_chunk[start : start + size] for start in range(0, len(to_chunk), size)]
