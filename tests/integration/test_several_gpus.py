"""Several processes on GPUs; on one GPU they share it."""

import fake_gpus
import pytest
import tiny
import torch
from test_dedicated_engines import apart, trained

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
ON_GPU = "cluster.device=cuda"


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def alone(request, tmp_path_factory):
    precision = f"policy.precision={request.param}"
    return precision, trained(tmp_path_factory.mktemp("alone"), precision, ON_GPU)


@pytest.mark.gpu  # on an emulated one: tests/unit/cuda/test_runs_emulated.py
@pytest.mark.parametrize("where", [tiny.workers(2), apart(1, 1), apart(2, 1)], ids=["2", "1+1", "2+1"])
def test_training_on_gpus_is_bit_identical_in_one_and_several_processes(tmp_path, alone, where):
    precision, (digest, rows) = alone
    found, history = trained(tmp_path, ON_GPU, precision, *where, "cluster.worker_timeout_s=60")
    assert found == digest
    for row, same in zip(history, rows, strict=True):
        assert row["token_mult_prob_error"] == 1.0 and row["max_logprob_gap"] == 0.0
        assert all(row[name] == same[name] for name in ("reward", "loss", "grad_norm", "weights/digest"))


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="FSDP2 needs a GPU for each process")
def test_transformers_backend_trains_in_two_processes_on_gpus(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    if not torch.cuda.is_available():
        fake_gpus.install(tmp_path, monkeypatch, "0,1")
    hf, place = ("policy.backend=hf", "policy.gradient_blocks=null"), (ON_GPU,) if torch.cuda.is_available() else ()
    _, alone = trained(tmp_path / "alone", *hf, *place)
    _, history = trained(tmp_path / "two", *hf, ON_GPU, *tiny.workers(2))
    for row, same in zip(history, alone, strict=True):
        assert row["loss"] == pytest.approx(same["loss"], abs=1e-4) and row["grad_norm"] == pytest.approx(
            same["grad_norm"], rel=1e-3
        )
