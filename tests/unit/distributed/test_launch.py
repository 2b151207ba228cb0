import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import answer_challenge, deliver_challenge
from pathlib import Path

import pytest
import tiny
import torch.distributed as dist
from nemo_rl_cpp.config import ConfigError
from nemo_rl_cpp.config.cluster import ClusterConfig
from nemo_rl_cpp.distributed import launch
from nemo_rl_cpp.distributed.launch import Launch, admit, as_connection, check_launch, launched, listen, take_own_gpu
from processes import alive, descendants, wait_until_gone

SLURM_SCRIPTS = Path(__file__).resolve().parents[3] / "examples" / "slurm"
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node7", "MASTER_PORT": "29512", "TORCHELASTIC_RUN_ID": "x"}
SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "77", "MASTER_ADDR": "node1"}


@pytest.mark.parametrize(("environment", "wanted"), [
    ({}, None),
    (TORCHRUN, Launch(1, 2, "node7", 29512, "WORLD_SIZE")),
    (TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"}, Launch(1, 2, "node7", 29512, "WORLD_SIZE")),
    (TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}, None),
    (SRUN, Launch(3, 4, "node1", 29500, "SLURM_NTASKS")),
    (SRUN | {"SLURM_STEP_NUM_TASKS": "8"}, Launch(3, 8, "node1", 29500, "SLURM_STEP_NUM_TASKS")),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),  # the batch script itself, which nobody launched four times
    (SRUN | TORCHRUN, Launch(1, 2, "node7", 29512, "WORLD_SIZE")),
])  # fmt: skip
def test_environment_variables_of_torchrun_and_srun_give_rank_and_world_size(environment, wanted):
    assert launched(environment) == wanted


@pytest.mark.parametrize("variables, visible, own", [
    ({"LOCAL_RANK": "1"}, "4,5,6", "5"), ({"SLURM_LOCALID": "2"}, "4,5", "4"), ({"LOCAL_RANK": "1"}, "3", "3"), ({}, "4,5,6", "6"),
])  # fmt: skip
def test_launched_rank_takes_the_gpu_of_its_rank_on_the_machine(monkeypatch, variables, visible, own):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    take_own_gpu(Launch(5, 6, "node7", 29512, "WORLD_SIZE"), variables)
    assert variables["CUDA_VISIBLE_DEVICES"] == own


def test_launcher_without_master_addr_is_an_error():
    with pytest.raises(ValueError, match="MASTER_ADDR is not set"):
        launched(TORCHRUN | {"MASTER_ADDR": ""})


def test_error_for_conflicting_world_size_names_both_settings():
    cluster = ClusterConfig(executor="processes", gpus_per_node=2, num_nodes=3, max_restarts=1)
    with pytest.raises(ConfigError) as caught:
        check_launch(cluster, launched(TORCHRUN))
    said = str(caught.value)
    assert "cluster.gpus_per_node * cluster.num_nodes is 2 * 3 = 6, but WORLD_SIZE is 2" in said
    assert "launch 6 ranks" in said
    assert "cluster.max_restarts is 1" in said and "torchrun --max-restarts" in said
    check_launch(ClusterConfig(executor="processes", gpus_per_node=2), launched(TORCHRUN))


class Deadly:
    """An object that aborts the process that unpickles it."""

    def __reduce__(self):
        return (os.abort, ())


def test_executor_or_generation_engines_incompatible_with_the_launcher_are_errors():
    text = "cluster.executor.* is ray, but WORLD_SIZE is 2, so every rank would be a run of its own"
    with pytest.raises(ConfigError, match=text):
        check_launch(ClusterConfig(executor="ray", gpus_per_node=2), launched(TORCHRUN))
    check_launch(ClusterConfig(gpus_per_node=8), launched(TORCHRUN))  # auto: as many as were launched
    text = "colocated.enabled.* is false, but all ranks that a launcher has started train"
    with pytest.raises(ConfigError, match=text):
        check_launch(ClusterConfig(executor="processes", gpus_per_node=2), launched(TORCHRUN), engines=1)


@pytest.mark.parametrize("given", [None, "a secret that all ranks have"])
def test_connection_to_a_worker_without_the_shared_secret_is_rejected(monkeypatch, given):
    monkeypatch.delenv("NEMO_RL_LAUNCH_TOKEN", raising=False)
    if given:
        monkeypatch.setenv("NEMO_RL_LAUNCH_TOKEN", given)
    monkeypatch.setattr(launch, "HANDSHAKE_SECONDS", 1.0)
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    listening, token = listen(Launch(0, 2, "127.0.0.1", 29500, "WORLD_SIZE"), store)
    port = int(store.get("port"))
    if given:  # it does not travel
        assert token == given.encode() and not store.check(["secret"])
    else:
        assert token == store.get("secret") and len(token) == 64

    def knock(talk):
        """Return the result of `admit` for a peer that calls talk(connection)."""

        def visit():
            try:
                talk(as_connection(socket.create_connection(("127.0.0.1", port), timeout=5)))
            except (OSError, EOFError, AuthenticationError):
                pass

        visitor = threading.Thread(target=visit)
        visitor.start()
        try:
            return admit(listening.accept()[0], token)
        finally:
            visitor.join(10)

    def guess(connection):
        answer_challenge(connection, b"0" * 32)

    def pickles(connection):
        connection.send(Deadly())
        connection.recv_bytes()

    def silent(connection):
        connection.recv_bytes(), connection.recv_bytes()

    for stranger in (guess, pickles, silent):
        with pytest.raises((OSError, EOFError, ValueError, AuthenticationError)):
            knock(stranger)

    def ours(connection):
        answer_challenge(connection, token)
        deliver_challenge(connection, token)
        connection.send_bytes(b'{"rank": 1, "size": 2}')

    connection, said = knock(ours)
    assert said == {"rank": 1, "size": 2}
    connection.close(), listening.close()


RUN = [
    "--config", "configs/grpo_tiny.yaml", "cluster.executor=processes", "cluster.gpus_per_node=2", "cluster.cpus_per_worker=1",
    "policy.gradient_blocks=2", "grpo.val_period=0", "grpo.val_at_end=false", "checkpointing.enabled=true", "checkpointing.save_period=1000",
    "checkpointing.metric_name=null", "logger.report=false",
]  # fmt: skip


def grpo_arguments(folder: Path, steps: int) -> list[str]:
    return [
        *RUN, f"grpo.max_num_steps={steps}", f"checkpointing.checkpoint_dir={folder / 'checkpoints'}", f"logger.log_dir={folder / 'logs'}",
    ]  # fmt: skip


def weights(folder: Path, step: int) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted((folder / "checkpoints" / f"step_{step}").glob("*/weights/model.safetensors"))
    }


@pytest.mark.slow
def test_run_launched_by_srun_is_bit_identical_to_a_run_that_starts_its_own_workers(tmp_path, forked_workers):
    few = ["ppo.num_prompts_per_step=8", "policy.train_global_batch_size=32", "value.train_global_batch_size=32"]

    def arguments(folder: Path, steps: int) -> list[str]:
        return [*(argument.replace("grpo", "ppo") for argument in grpo_arguments(folder, steps)), *few]

    with tiny.make(tmp_path / "one", *arguments(tmp_path / "one", 2)[2:], config="ppo_tiny.yaml") as run:
        run.train()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    more = SRUN | {"SLURM_NTASKS": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "nemo_rl_cpp.run_ppo", *arguments(tmp_path / "two", 2), "cluster.executor=auto", "cluster.gpus_per_node=8"],
            env=os.environ | more | {"SLURM_PROCID": str(rank)}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for rank in (1, 0)
    ]  # fmt: skip
    said = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert "step 2/2" in said[1] and "step 2/2" not in said[0]
    assert weights(tmp_path / "two", 2) == weights(tmp_path / "one", 2) != {}
    assert "written for 8 devices" in said[1] and "runs on 2 processes (cpu)" in said[1]


@pytest.mark.slow
def test_all_ranks_under_torchrun_end_if_one_rank_hangs(tmp_path):
    """torchrun itself detects a rank that has ended, but not one that is stopped."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "nemo_rl_cpp.run_grpo_math",
        *grpo_arguments(tmp_path, 50_000), "cluster.worker_timeout_s=8",
    ]  # fmt: skip
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    lines = []
    for line in run.stdout:
        lines.append(line)
        if line.startswith("step 2/"):
            break
    assert lines and lines[-1].startswith("step 2/"), "".join(lines)
    everyone = descendants(run.pid)
    victim = next(
        p for p in everyone if b"\0RANK=1\0" in Path(f"/proc/{p}/environ").read_bytes() and rank_of(p) is None
    )
    began = time.monotonic()
    os.kill(int(victim), signal.SIGSTOP)
    rest = run.communicate(timeout=180)[0]
    assert run.returncode != 0 and time.monotonic() - began < 90
    assert f"rank 1 of 2 (process {victim})" in "".join(lines) + rest, "".join(lines) + rest
    assert not wait_until_gone(everyone) and not any(map(alive, everyone))


def rank_of(pid: str) -> str | None:
    """Return "worker" if the process was started by a run as a worker, otherwise None."""
    return "worker" if b"nemo_rl_cpp.distributed.worker" in Path(f"/proc/{pid}/cmdline").read_bytes() else None


@pytest.mark.parametrize("script", ["ray.sh", "srun.sh"])
def test_slurm_script_is_valid_bash_and_uses_existing_configuration_keys(script):
    subprocess.run(["bash", "-n", SLURM_SCRIPTS / script], check=True, timeout=20)
    keys = set(re.findall(r"\bcluster\.(\w+)=", (SLURM_SCRIPTS / script).read_text()))
    assert keys == {"executor", "num_nodes", "gpus_per_node", "cpus_per_worker"} <= set(ClusterConfig.model_fields)
