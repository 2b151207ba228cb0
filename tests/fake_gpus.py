"""Workers that take the CPU for their GPU, for tests of several GPUs on a machine without one."""

WORKER = """
import os, types, torch
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_properties = lambda gpu: types.SimpleNamespace(uuid=os.environ["CUDA_VISIBLE_DEVICES"])
from nemo_rl_cpp.distributed import ranks
ranks._own_gpu = lambda: torch.device("cpu")
ranks.C.nccl_communicator = lambda *place: None
ranks.C.communicator_by_device = lambda on_cpu, on_gpus: on_gpus or on_cpu
"""


def install(folder, monkeypatch, visible):
    """Let workers that this process starts believe in the GPUs `visible`, a value of CUDA_VISIBLE_DEVICES."""
    (folder / "sitecustomize.py").write_text(WORKER)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("nemo_rl_cpp.distributed.cluster.cuda_usable", lambda: True)
