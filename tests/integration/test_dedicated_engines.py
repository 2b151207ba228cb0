import os
import signal

import pytest
import tiny
from nemo_rl_cpp.distributed.worker_calls import WorkerLostError
from test_several_processes import tensor_digest

pytestmark = pytest.mark.usefixtures("forked_workers")
STEPS = 3


def apart(trainers: int, engines: int, executor: str = "processes") -> tuple[str, ...]:
    return (
        *tiny.workers(trainers + engines, executor), "policy.generation.colocated.enabled=false", f"policy.generation.colocated.resources.gpus_per_node={engines}",
        "cluster.worker_timeout_s=4",
    )  # fmt: skip


def make(folder, *overrides, **options):
    return tiny.make(
        folder, *tiny.SMALL, *tiny.SAVED_AT_THE_END, f"grpo.max_num_steps={STEPS}", "policy.gradient_blocks=2", *overrides, **options,
    )  # fmt: skip


def trained(folder, *overrides):
    """Return the SHA-256 of the last checkpoint's weights, and the metrics of the steps."""
    with make(folder, *overrides) as run:
        run.train()
    weights = folder / "checkpoints" / f"step_{STEPS}" / "policy" / "weights" / "model.safetensors"
    return tensor_digest(weights), run.history


@pytest.fixture(scope="module")
def colocated(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("colocated"))


@pytest.mark.parametrize(
    "where",
    [apart(1, 1), (*apart(2, 1), "policy.refit_buffer_size_gb=1e-5"), (*apart(1, 2), "policy.refit=delta"), apart(1, 1, "ray")],
    ids=["1+1", "2+1", "1+2, delta", "ray"],
)  # fmt: skip
def test_training_is_bit_identical_with_generation_engines_in_separate_processes(tmp_path, colocated, where):
    weights, history = trained(tmp_path, *where)
    assert weights == colocated[0]
    for step, (row, same) in enumerate(zip(history, colocated[1], strict=True)):
        assert row["token_mult_prob_error"] == 1.0 and row["max_logprob_gap"] == 0.0
        assert row["reward"] == same["reward"] and row["weights/digest"] == same["weights/digest"]
        assert row["refit/version"] == step and row["refit/bytes"] > 0 and row["refit/gb_per_s"] > 0


def test_killed_engine_process_ends_the_run_with_an_error_that_names_the_engine_worker(tmp_path):
    with make(tmp_path, *apart(1, 1)) as run:
        pids = [*run.cluster.workers.pids, *run.engine_cluster.workers.pids]

        def kill(*_):
            os.kill(run.engine_cluster.workers.pids[0], signal.SIGKILL)
            return sync(timer=None)

        sync, run.collector.refit.sync_weights = (
            run.collector.refit.sync_weights,
            lambda **_: kill() if run.state.step else sync(),
        )
        with pytest.raises(WorkerLostError, match=r"engine worker 0 of 1 \(process \d+\) was ended by SIGKILL"):
            run.train()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_each_response_records_the_weight_version_that_generated_it(tmp_path):
    import torch
    from nemo_rl_cpp.distributed.ragged_batch import RaggedBatch, offsets_of

    with make(tmp_path, *apart(1, 2)) as run:
        ids = torch.arange(12) % 5
        prompts = RaggedBatch(offsets_of(torch.tensor([4, 3, 5])), {"input_ids": ids}, {})
        with pytest.raises(RuntimeError, match="no weights before the first sync_weights"):
            run.collector.generation.generate(prompts.copy())
        for step in (0, 5):
            run.state.total_steps = step
            run.collector.refit.mark_stale()
            run.collector.refit.sync_weights()
            assert (
                run.collector.generation.generate(prompts.copy()).weight_version
                == step
                == run.collector.generation.weight_version
            )
