import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from nemo_rl_cpp.config.cluster import ClusterConfig
from nemo_rl_cpp.distributed.cluster import Cluster, WorkerGroup
from nemo_rl_cpp.distributed.ray_workers import ray_module
from nemo_rl_cpp.distributed.worker_calls import WorkerLostError
from nemo_rl_cpp.environments.math_environment import MathEnvironment
from nemo_rl_cpp.environments.remote import ActorSettings, ray_environment
from players import make

pytestmark = pytest.mark.slow
TOOL = Path(__file__).resolve().parents[2] / "tools" / "network_namespaces.py"
LOGS = [[{"role": "assistant", "content": f"Answer: {letter}"}] for letter in "ABCD"]
TRUTHS = [{"ground_truth": "B"}] * 4


def _nodes_of_a_ray_of_its_own() -> str:
    """Return the output of a program without a Ray address, which must start a separate Ray cluster of one node."""
    program = "from nemo_rl_cpp.distributed import ray_workers as s; print(s.start_ray(1), len(s.ray_module().nodes()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    return done.stdout.strip() or done.stderr


def test_death_of_a_ray_node_is_reported_and_its_environments_restart_on_another_node(monkeypatch):
    ray = ray_module()
    from ray.cluster_utils import Cluster as RayCluster

    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 2}
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": quick}
    both = RayCluster(initialize_head=True, head_node_args=head)
    try:
        second = both.add_node(num_cpus=1)
        both.wait_for_nodes(60)
        assert _nodes_of_a_ray_of_its_own() == "True 1"
        monkeypatch.setenv("RAY_ADDRESS", both.address)
        cluster = Cluster(
            [1, 1], use_gpus=False, settings=ClusterConfig(executor="ray", cpus_per_worker=1, worker_timeout_s=5.0)
        )
        group = WorkerGroup(cluster, partial(make, 0))  # one worker of one CPU fits each node
        assert group.call_all("total") == [3.0, 3.0]
        settings = ActorSettings(deadline=120.0, restarts=2)
        env = ray_environment(
            MathEnvironment, ({"verifier_type": "english_multichoice", "num_workers": 2},), {}, settings
        )
        wanted = ray.get(env.step.remote(LOGS, TRUTHS), timeout=120).rewards.tolist()
        assert wanted == [0.0, 1.0, 0.0, 0.0]
        both.remove_node(second, allow_graceful=False)
        with pytest.raises(WorkerLostError, match=r"rank \d of 2 \(process \d+\) (is gone|gave no sign of life)"):
            while True:
                group.call_all("total")
        assert ray.get(env.step.remote(LOGS, TRUTHS), timeout=120).rewards.tolist() == wanted
        env.close()
        cluster.shutdown()
    finally:
        ray.shutdown()
        both.shutdown()


def test_ranks_in_two_network_namespaces_communicate_and_report_a_lost_connection():
    run = subprocess.run([sys.executable, TOOL], capture_output=True, text=True, timeout=240)
    if run.returncode == 3:
        pytest.skip(run.stdout.strip())
    assert run.returncode == 0, run.stdout + run.stderr
