"""Re-export the group of workers."""

from nemo_rl_cpp.distributed.cluster import WorkerGroup as RayWorkerGroup
