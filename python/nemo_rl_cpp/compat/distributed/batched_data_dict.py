"""Re-export the batch that environments and losses take."""

from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict
