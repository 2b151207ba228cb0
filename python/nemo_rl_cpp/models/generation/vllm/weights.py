"""The transfer of weights to a vLLM server, through shared memory or NCCL."""

import base64
import mmap
import os
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_cpp._native import C
from nemo_rl_cpp.distributed.worker_calls import WorkerLostError
from nemo_rl_cpp.models.generation.vllm.client import ServerClient
from nemo_rl_cpp.models.generation.vllm.server_extension.nemo_rl_cpp_vllm import begin_digest

_ALIGNED = 64  # bytes
REFIT = "a refit"
_ID = "nccl_unique_id"  # key of the store under which csrc/distributed/nccl_communicator.cpp writes the id


class WeightBuffer:
    """Anonymous shared memory with a copy of the weights. It is freed when the last process closes it.

    Attributes:
        manifest: [name, dtype, shape, offset, bytes] of each tensor, as `nemo_rl_cpp_vllm.SharedWeights` reads it.
        size: total size in bytes.
        weight_bytes: size of all tensors in bytes.
        descriptor: file descriptor, which the server's process opens by its path in /proc.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.manifest: list[list] = []
        end = 0
        for name, tensor in tensors.items():
            offset, size = -(-end // _ALIGNED) * _ALIGNED, tensor.numel() * tensor.element_size()
            self.manifest.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset, size])
            end = offset + size
        self.size, self.weight_bytes = max(end, 1), sum(size for *_, size in self.manifest)
        self.descriptor = os.memfd_create("nemo_rl_cpp_weights")
        self._closing = weakref.finalize(self, os.close, self.descriptor)  # also closes it if creating the engine fails
        os.ftruncate(self.descriptor, self.size)
        self._memory = torch.frombuffer(mmap.mmap(self.descriptor, self.size), dtype=torch.uint8)

    def fill(self, tensors: Mapping[str, Tensor]) -> str:
        """Copy the current weights into this shared memory. Return a digest of `tensors`, not of the copy."""
        digest = begin_digest(self.manifest)
        for name, _, _, offset, size in self.manifest:
            flat = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            self._memory[offset : offset + size].copy_(flat)
            digest.update(flat.numpy())
        return digest.hexdigest()

    def close(self) -> None:
        """Close the file. The memory is freed when the last view of it is released. Idempotent."""
        self._closing()
        self.descriptor = -1


class SharedMemoryTransport:
    """A transfer through anonymous memory that this process and the server's workers map. The memory is reachable only
    by this process's open file, so that it is freed once both processes have ended, even if they are killed."""

    def __init__(self, weights: Mapping[str, Tensor], client: ServerClient) -> None:
        self._client, self._buffer, self._sent = client, WeightBuffer(weights), ""
        self.weight_bytes = self._buffer.weight_bytes

    def prepare(self, weights: Mapping[str, Tensor]) -> None:
        """Copy the weights into the shared memory, and let vLLM verify the digest of the copy. On failure vLLM keeps
        its old weights."""
        self._sent = self._buffer.fill(weights)
        info = {
            "path": f"/proc/{os.getpid()}/fd/{self._buffer.descriptor}", "size": self._buffer.size, "manifest": self._buffer.manifest,
            "digest": self._sent,
        }  # fmt: skip
        self._client.call(REFIT, "POST", "/init_weight_transfer_engine", {"init_info": info})

    def send(self, weights: Mapping[str, Tensor]) -> str:
        """Let vLLM load the weights from the shared memory. Return the digest of the policy's weights."""
        self._client.call(REFIT, "POST", "/update_weights", {"update_info": {}})
        return self._sent

    def close(self) -> None:
        """Release the shared memory. Idempotent."""
        self._buffer.close()


class NcclTransport:
    """A transfer by NCCL: the trainer's GPU is rank 0 and broadcasts each tensor to the server's workers, in the order
    of `update_info`.

    The workers receive NCCL's id by HTTP, join an all-reduce of one number as a greeting, and then receive one
    broadcast per tensor, as vLLM's engine `nccl` does without packing.
    """

    def __init__(self, weights: Mapping[str, Tensor], client: ServerClient) -> None:
        self._client, self._communicator = client, None
        self._device = next(iter(weights.values())).device
        self.weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())

    def prepare(self, weights: Mapping[str, Tensor]) -> None:
        """At the first refit, connect to the workers. On failure vLLM keeps its old weights."""
        if self._communicator is not None:
            return
        workers = self._client.call(REFIT, "GET", "/get_world_size")["world_size"]
        store, seconds = dist.HashStore(), self._client.timeout
        thread = ThreadPoolExecutor(1, thread_name_prefix="nccl")
        try:
            meeting = thread.submit(connect, store, workers + 1, self._device, seconds)
            info = {
                "nccl_unique_id_b64": base64.b64encode(_id_of(store, meeting)).decode(), "rank_offset": 1, "world_size": workers + 1,
                "packed": False,
            }  # fmt: skip
            self._client.call(REFIT, "POST", "/init_weight_transfer_engine", {"init_info": info})
            self._communicator = meeting.result()
        except C.CommunicatorError as error:
            raise WorkerLostError(
                f"the workers of vLLM at {self._client.url} did not meet the trainer: {error}"
            ) from error
        finally:
            thread.shutdown(wait=False)  # if vLLM rejects the request, the rendezvous ends at its deadline

    def send(self, weights: Mapping[str, Tensor]) -> str:
        """Broadcast the weights and let vLLM load them. Return the digest of the policy's weights. After an error the
        communicator is unusable."""
        manifest = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in weights.items()]
        digest = begin_digest(manifest)
        info = dict(zip(("names", "dtype_names", "shapes"), map(list, zip(*manifest))))
        thread = ThreadPoolExecutor(1, thread_name_prefix="nccl")
        try:
            told = thread.submit(self._client.call, REFIT, "POST", "/update_weights", {"update_info": info})
            for name, tensor in weights.items():
                flat = tensor.detach().contiguous()
                self._communicator.broadcast(flat, 0, f"sending {name} to vLLM")
                digest.update(flat.reshape(-1).view(torch.uint8).cpu().numpy())
            told.result()
        except C.CommunicatorError as error:
            self._communicator = None
            if told.done() and (refusal := told.exception()) is not None:
                raise refusal from error
            raise WorkerLostError(f"vLLM at {self._client.url} did not take the weights: {error}") from error
        finally:
            thread.shutdown(wait=False)
        return digest.hexdigest()

    def close(self) -> None:
        """Close the communicator. Idempotent."""
        self._communicator = None


def connect(store: dist.Store, size: int, device: torch.device, seconds: float) -> C.Communicator:
    """Return the communicator of rank 0, once the other `size - 1` ranks have joined it and the greeting (an all-reduce
    of one number) has succeeded."""
    communicator = C.nccl_communicator(store, 0, size, device, seconds)
    C.nccl_greeting(communicator, "greeting vLLM's workers")
    return communicator


def _id_of(store: dist.Store, meeting: Future[C.Communicator]) -> bytes:
    """Return NCCL's id once the thread of `meeting` has created it. If that thread raises an exception, re-raise it."""
    failed = threading.Event()
    meeting.add_done_callback(lambda _: failed.set())
    while not store.check([_ID]):
        if failed.wait(0.01):
            meeting.result()
    return store.get(_ID)
