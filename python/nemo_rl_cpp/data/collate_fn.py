"""Lists of DatumSpec to batches."""

import torch

from nemo_rl_cpp.data.interfaces import DatumSpec
from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict


def rl_collate_fn(data_batch: list[DatumSpec]) -> BatchedDataDict[DatumSpec]:
    """A batch of prompts: `length`, `loss_multiplier` and `batch_max_length` as tensors [B], the rest as lists."""
    from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict

    length = torch.tensor([datum["length"] for datum in data_batch])
    return BatchedDataDict(
        message_log=[datum["message_log"] for datum in data_batch],
        length=length,
        loss_multiplier=torch.tensor([float(datum["loss_multiplier"]) for datum in data_batch], dtype=torch.float32),
        extra_env_info=[datum["extra_env_info"] for datum in data_batch],
        task_name=[datum.get("task_name") for datum in data_batch],
        idx=[datum["idx"] for datum in data_batch],
        batch_max_length=torch.ones_like(length) * length.max(),
        stop_strings=[datum.get("stop_strings") for datum in data_batch],
    )


def eval_collate_fn(data_batch: list[DatumSpec]) -> BatchedDataDict[DatumSpec]:
    """What an evaluation needs of each prompt: `message_log`, `extra_env_info`, `idx`, as lists."""
    from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict

    return BatchedDataDict(
        message_log=[datum["message_log"] for datum in data_batch],
        extra_env_info=[datum["extra_env_info"] for datum in data_batch],
        idx=[datum["idx"] for datum in data_batch],
        task_name=[datum.get("task_name") for datum in data_batch],
        stop_strings=[datum.get("stop_strings") for datum in data_batch],
    )
