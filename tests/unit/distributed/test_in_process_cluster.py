import pytest
from nemo_rl_cpp.distributed.cluster import Cluster, check_device


@pytest.mark.parametrize(
    "usable, use_gpus, precision, device",
    [(True, True, "bfloat16", "cuda"), (True, True, "float32", "cuda"), (True, True, "float64", "cpu"), (True, False, "float32", "cpu"),
     (False, True, "float32", "cpu")],
)  # fmt: skip
def test_models_are_placed_on_a_gpu_if_one_is_usable(monkeypatch, usable, use_gpus, precision, device):
    monkeypatch.setattr("nemo_rl_cpp.distributed.cluster.cuda_usable", lambda: usable)
    assert Cluster([1], use_gpus=use_gpus).device(precision) == device


def test_error_for_an_unusable_gpu_names_cluster_device(monkeypatch):
    monkeypatch.setattr("nemo_rl_cpp.distributed.cluster.cuda_usable", lambda: False)
    assert check_device("cpu") == "cpu"
    with pytest.raises(ValueError, match="cluster.device is cuda, but torch sees no GPU.*cluster.device=cpu"):
        check_device("cuda")
    monkeypatch.setattr("nemo_rl_cpp.distributed.cluster.cuda_usable", lambda: True)
    assert check_device("cuda") == "cuda"
