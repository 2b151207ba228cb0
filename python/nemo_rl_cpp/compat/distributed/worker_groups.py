"""Re-export the group of workers."""

from nemo_rl_cpp.distributed.worker_groups import RayWorkerGroup
