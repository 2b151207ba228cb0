"""Lists of DatumSpec to NeMo RL's batches."""

from typing import Any

from nemo_rl_cpp.compat.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_cpp.data import collate_fn as house
from nemo_rl_cpp.data.interfaces import DatumSpec


def rl_collate_fn(data_batch: list[DatumSpec]) -> BatchedDataDict[Any]:
    """A batch of prompts: `length`, `loss_multiplier` and `batch_max_length` as tensors [B], the rest as lists."""
    return BatchedDataDict(house.rl_collate_fn(data_batch))


def eval_collate_fn(data_batch: list[DatumSpec]) -> BatchedDataDict[Any]:
    """What an evaluation needs of each prompt: `message_log`, `extra_env_info`, `idx`, as lists."""
    return BatchedDataDict(house.eval_collate_fn(data_batch))
