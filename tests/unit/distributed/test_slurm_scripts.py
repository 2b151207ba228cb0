"""The scripts for Slurm are Bash, and say of a run what its configuration knows."""

import re
import subprocess
from pathlib import Path

import pytest
from nemo_rl_cpp.config.cluster import ClusterConfig

SCRIPTS = sorted((Path(__file__).resolve().parents[3] / "examples" / "slurm").glob("*.sh"))


def test_slurm_scripts_exist_for_ray_and_srun():
    assert [script.name for script in SCRIPTS] == ["ray.sh", "srun.sh"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_slurm_script_is_valid_bash_and_uses_existing_configuration_keys(script):
    subprocess.run(["bash", "-n", script], check=True, timeout=20)
    keys = set(re.findall(r"\bcluster\.(\w+)=", script.read_text()))
    assert keys == {"executor", "num_nodes", "gpus_per_node", "cpus_per_worker"} <= set(ClusterConfig.model_fields)
