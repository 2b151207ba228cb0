import hashlib
import json
import os
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
import tiny
import torch
from nemo_rl_cpp.algorithms.build import build_run
from nemo_rl_cpp.commands.runs import train_to_the_end
from nemo_rl_cpp.config import load_grpo_config
from nemo_rl_cpp.distributed.ranks import Ranks
from nemo_rl_cpp.models.distributed_models import plain_batch
from safetensors.torch import load_file
from tiny import workers

pytestmark = pytest.mark.usefixtures("forked_workers")
BLOCKS = ("policy.gradient_blocks=4",)
BATCH = ("policy.train_global_batch_size=32",)
BESIDE = ("policy.overlap_grad_reduce=true",)
SHARDED = ("policy.data_parallel_sharding_strategy=optim_grads",)


KL = ("loss_fn.reference_policy_kl_penalty=0.01", "grpo.skip_reference_policy_logprobs_calculation=false")


ENTROPIES = (
    "loss_fn.entropy_coef=0.1", "loss_fn.top_entropy_quantile=0.5", "grpo.adv_estimator.name=optimal_token_baseline",
)  # fmt: skip


def tensor_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Trained(NamedTuple):
    tensors: dict[str, str]  # SHA-256 of every tensor file of the checkpoint
    metrics: str  # those that a step computes
    checkpoint: Path


COMPUTED = ("reward", "loss", "grad_norm", "accuracy", "gen_kl", "critic/loss")


def trained(folder: Path, steps: int, *overrides: str, config: str = "grpo_tiny.yaml") -> Trained:
    history, checkpoint = tiny.saved(folder, steps, *overrides, config=config)
    files = sorted(path for path in checkpoint.rglob("*.safetensors") if "trainer_state" not in path.parts)
    digests = {str(path.relative_to(checkpoint)): tensor_digest(path) for path in files}
    rows = [{name: value for name, value in row.items() if name.startswith(COMPUTED)} for row in history]
    return Trained(digests, json.dumps(rows), checkpoint)


@pytest.mark.parametrize(
    "config, overrides, steps, others",
    [
        ("grpo_tiny.yaml", BATCH, 4, (workers(2), workers(4) + SHARDED)),
        ("dapo_tiny.yaml", (), 3, (workers(2) + BESIDE,)),
        ("ppo_tiny.yaml", (), 3, (workers(2) + SHARDED, workers(4) + BESIDE)),
        ("grpo_guess_number.yaml", (), 2, (workers(2),)),
        ("grpo_tiny.yaml", ("policy.precision=bfloat16", *KL), 3, (workers(2) + SHARDED,)),
        ("grpo_tiny.yaml", ENTROPIES, 2, (workers(2),)),
    ],
    ids=["grpo", "dapo", "ppo", "multi_turn", "bfloat16_kl", "entropies"],
)
def test_training_with_gradient_blocks_gives_bit_identical_weights_on_any_number_of_processes(
    tmp_path, config, overrides, steps, others
):
    one = trained(tmp_path / "one", steps, *overrides, *BLOCKS, config=config)
    for i, more in enumerate(others):
        several = trained(tmp_path / str(i), steps, *overrides, *BLOCKS, *more, config=config)
        assert several[:2] == one[:2], more


def test_weights_trained_without_gradient_blocks_on_one_and_three_processes_differ_by_rounding(tmp_path):
    runs = trained(tmp_path / "1", 3), trained(tmp_path / "3", 3, *workers(3))
    a, b = (load_file(run.checkpoint / "policy" / "weights" / "model.safetensors") for run in runs)
    first, second = (torch.cat([tensors[name].flatten().double() for name in sorted(a)]) for tensors in (a, b))
    assert float((first - second).norm() / first.norm()) < 1e-6 and not torch.equal(first, second)


def test_activations_of_generation_are_reused_for_samples_moved_to_another_rank(tmp_path):
    moves, digests = [], []
    for kept in ("null", "0"):
        with tiny.make(
            tmp_path / kept, *tiny.SMALL, *workers(2), "grpo.max_num_steps=5", f"policy.kept_activations_gb={kept}"
        ) as run:

            def note(batch):
                data = plain_batch(batch)
                moves.append(Ranks(0, 2).even_block(data, 0, data.size, run.loss_fn.zero_gradient_rows(data))[1])

            tiny.watch_training(run, note)
            run.train()
            shares = [row["reused_forward_share"] for row in run.history]
            assert shares == ([0, 1, 1, 1, 1] if kept == "null" else [0] * 5)
            digests.append([row["weights/digest"] for row in run.history])
    assert any(moves[1:5]) and digests[0] == digests[1]


def test_checkpoint_resumes_on_any_number_of_processes(tmp_path):
    """Two steps in two processes, two in one and one in four give the weights of five steps in one process."""
    straight = trained(tmp_path / "straight", 5, *BLOCKS, config="ppo_tiny.yaml")
    for steps, more in ((2, workers(2)), (4, ()), (5, workers(4))):
        mixed = trained(tmp_path / "mixed", steps, *BLOCKS, *more, config="ppo_tiny.yaml")
    assert mixed.tensors == straight.tensors


def test_run_that_lost_a_worker_process_resumes_from_its_checkpoint(tmp_path, monkeypatch, capfd):
    straight = trained(tmp_path / "straight", 4, *BLOCKS)
    folder, built = tmp_path / "broken", []

    def build(config):
        run = build_run(config)
        built.append(run)

        def kill_a_worker(result):
            """Kill rank 1 after step 3 of the first run."""
            if result.step == 3 and len(built) == 1:
                os.kill(run.cluster.workers.pids[1], signal.SIGKILL)

        run.after_step.append(kill_a_worker)
        return run

    monkeypatch.setattr("nemo_rl_cpp.algorithms.build.build_run", build)
    config = load_grpo_config(
        "grpo_tiny.yaml",
        [*BLOCKS, *workers(2), "cluster.max_restarts=1", f"logger.log_dir={folder / 'logs'}", "grpo.max_num_steps=4",
         f"checkpointing.checkpoint_dir={folder / 'checkpoints'}", "checkpointing.enabled=true", "checkpointing.save_period=2",
         "checkpointing.metric_name=null", "grpo.val_period=0", "grpo.val_at_end=false"],
    )  # fmt: skip
    train_to_the_end(config)
    assert len(built) == 2 and built[1].history[0]["step"] == 3
    assert "rank 1 of 2" in (said := capfd.readouterr().err) and "restart 1 of 1, from the newest checkpoint" in said
    checkpoint = folder / "checkpoints" / "step_4"
    assert {name: tensor_digest(checkpoint / name) for name in straight.tensors} == straight.tensors
