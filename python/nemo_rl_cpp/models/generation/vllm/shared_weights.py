"""The trainer's end of the memory through which vLLM gets its weights."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Mapping

import torch
from torch import Tensor

from nemo_rl_cpp.models.generation.vllm.worker_script import begin_digest

_ALIGNED = 64  # bytes


class WeightBuffer:
    """Memory without a name that holds a copy of a model's weights: it goes with the last process that has it open.

    Attributes:
        manifest: [name, dtype, shape, offset, bytes] of each tensor, as `worker_script.SharedWeights` reads it.
        size: of the whole, in bytes.
        descriptor: an open file, for the other process to inherit.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.manifest: list[list] = []
        end = 0
        for name, tensor in tensors.items():
            offset, size = -(-end // _ALIGNED) * _ALIGNED, tensor.numel() * tensor.element_size()
            self.manifest.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset, size])
            end = offset + size
        self.size = max(end, 1)
        self.descriptor = _unnamed_file()
        self._closing = weakref.finalize(
            self, os.close, self.descriptor
        )  # where an engine fails while it is made, nobody closes
        os.ftruncate(self.descriptor, self.size)
        self._memory = torch.frombuffer(mmap.mmap(self.descriptor, self.size), dtype=torch.uint8)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(size for *_, size in self.manifest)

    def fill(self, tensors: Mapping[str, Tensor]) -> str:
        """Copies the present weights; their digest, taken from the weights themselves, not from the copy.

        ValueError where they are not the tensors that the memory was made for.
        """
        found = {
            name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors.items()
        }
        if found != {name: (dtype, shape) for name, dtype, shape, *_ in self.manifest}:
            raise ValueError("the policy's weights have other names, types or shapes than at the first refit")
        digest = begin_digest(self.manifest)
        for name, _, _, offset, size in self.manifest:
            flat = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            self._memory[offset : offset + size].copy_(flat)
            digest.update(flat.numpy())
        return digest.hexdigest()

    def close(self) -> None:
        """Closes the file; the memory goes with the last view of it. Safe to call twice."""
        self._closing()
        self.descriptor = -1


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("nemo_rl_cpp_weights")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
