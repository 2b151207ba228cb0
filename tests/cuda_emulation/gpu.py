"""Run programs of a process on an emulated GPU (device/torch_device.cpp)."""

import ctypes
import types
from pathlib import Path

import torch


def emulate(library: Path | str) -> None:
    """Give torch in this process a CUDA device, with the library that `build.build_device` has made."""
    properties = types.SimpleNamespace(uuid="emulated", name="emulated", total_memory=1 << 34)
    answers = dict(
        _lazy_init=None, is_available=True, is_initialized=False, device_count=1, mem_get_info=(1 << 33, 1 << 34), memory_reserved=0,
        memory_allocated=0, synchronize=None, get_device_properties=properties,
    )  # fmt: skip
    for name, value in answers.items():
        setattr(torch.cuda, name, lambda *_, value=value: value)
    import nemo_rl_cpp.distributed.cluster
    from nemo_rl_cpp._native import C

    assert C is not None and ctypes.CDLL(str(library)).emulate_a_gpu() > 1000
    nemo_rl_cpp.distributed.cluster.cuda_usable = lambda: True
