"""Several processes on GPUs. Without a GPU the workers compute on the CPU; on one GPU they share it."""

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
    place = (ON_GPU,) if torch.cuda.is_available() else ()
    return precision, trained(tmp_path_factory.mktemp("alone"), precision, *place)


@pytest.mark.parametrize("where", [tiny.workers(2), apart(1, 1), apart(2, 1)], ids=["2", "1+1", "2+1"])
def test_training_on_gpus_is_bit_identical_in_one_and_several_processes(tmp_path, monkeypatch, alone, where):
    if not torch.cuda.is_available():
        fake_gpus.install(tmp_path, monkeypatch, "0,1")
    precision, (digest, rows) = alone
    found, history = trained(tmp_path, ON_GPU, precision, *where)
    assert found == digest
    for row, same in zip(history, rows, strict=True):
        assert row["token_mult_prob_error"] == 1.0 and row["max_logprob_gap"] == 0.0
        assert all(row[name] == same[name] for name in ("reward", "loss", "grad_norm", "weights/digest"))
