"""Re-export the cluster."""

from nemo_rl_cpp.distributed.cluster import Cluster as RayVirtualCluster
