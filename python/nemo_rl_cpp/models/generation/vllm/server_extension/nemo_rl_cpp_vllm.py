"""An extension of vLLM's server that receives weights from a run. vLLM's interpreter loads this file:

    VLLM_SERVER_DEV_MODE=1 PYTHONPATH=<this folder> python -m vllm.entrypoints.openai.api_server --model MODEL \
        --worker-extension-cls nemo_rl_cpp_vllm.Weights --weight-transfer-config '{"backend": "nemo_rl_cpp_shared_memory"}' ...

`docs/vllm.md` shows the whole command. The file imports only the standard library, torch and vLLM. It does not import
this package, which needs a different torch, so a remote machine needs only this file. It adds two weight transfers:

    nemo_rl_cpp_shared_memory   for a trainer on the same machine with the same user; both processes map the same memory
    nemo_rl_cpp_nccl            the trainer's GPU broadcasts each tensor, as vLLM's own engine `nccl` expects (unpacked)

Both compute a digest of the received weights, which the trainer requests. The trainer imports this file for the names
of the transfers and for `begin_digest`."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from dataclasses import dataclass, field

TESTED_VERSION = "0.32.0"
"""The only supported version of vLLM: the tests have run with it."""
SHARED_MEMORY, NCCL = "nemo_rl_cpp_shared_memory", "nemo_rl_cpp_nccl"
PROTOCOL = 1
"""The protocol of trainer and extension; each incompatible change increases it."""


def begin_digest(manifest: list) -> hashlib.blake2b:
    """Return a BLAKE2b hash of `manifest`, [name, dtype, shape, offset, bytes] of each tensor. The caller adds the
    tensors' bytes to it."""
    return hashlib.blake2b(json.dumps(manifest).encode(), digest_size=16)


class SharedWeights:
    """The trainer's weights in memory that both processes map, and their manifest (see `begin_digest`)."""

    def __init__(self, descriptor: int, manifest: list, size: int) -> None:
        self.manifest = manifest
        self.memory = mmap.mmap(descriptor, size)

    def digest(self) -> str:
        digest = begin_digest(self.manifest)
        view = memoryview(self.memory)
        for _, _, _, offset, size in self.manifest:
            digest.update(view[offset : offset + size])
        return digest.hexdigest()

    def tensors(self):
        """Yield (name, tensor) for each tensor, as views of the shared memory."""
        import torch

        for name, dtype, shape, offset, size in self.manifest:
            flat = torch.frombuffer(self.memory, dtype=torch.uint8, count=size, offset=offset)
            yield name, flat.view(getattr(torch, dtype)).view(shape)


def open_memory(path: str, size: int, manifest: list):
    """Return the trainer's weights in its anonymous memory, which is opened by its path in /proc; the path exists only
    while the trainer keeps the file open. Raise RuntimeError if the file cannot be opened, or does not have `size`
    bytes. `manifest`: see `SharedWeights`."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError as error:
        raise RuntimeError(
            f"the trainer's memory {path} cannot be opened ({error.strerror}): trainer and vLLM must run on one machine, as one user, and see "
            "each other's processes"
        ) from error
    try:
        if os.fstat(descriptor).st_size != size:
            raise RuntimeError(f"the trainer's memory {path} is another file here: vLLM must run on its machine")
        return SharedWeights(descriptor, manifest, size)
    finally:
        os.close(descriptor)


def check_all_loaded(expected: set, loaded: set | None) -> None:
    """Raise RuntimeError if a parameter of vLLM's model (one of the names `expected`) is not in `loaded`, the names
    that received values (None: no names). Such a parameter would keep its old values."""
    missing = sorted(expected - set(loaded or ()))
    if missing:
        raise RuntimeError(
            f"{len(missing)} parameters of vLLM's model got no weights from the trainer, first {', '.join(missing[:4])}"
        )


def pack_again(model) -> None:
    """On a CPU, restore the layout that matrix products read for weights of `model` that a reload leaves in another
    one: the packed copy of a tied LM head, and the weights of experts, which vLLM packs in place only at the first
    load."""
    for module in model.modules():
        if hasattr(module, "cpu_linear") and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if hasattr(experts := getattr(kernel, "fused_experts", None), "isa"):
            experts.process_weights_after_loading(module)


def shared_memory_engine() -> type:
    """Return the class of the shared-memory transfer. It reloads the model layer by layer, like vLLM's own engines."""
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class Init(WeightTransferInitInfo):
        path: str = ""
        size: int = 0
        manifest: list = field(default_factory=list)
        digest: str = ""

    @dataclass
    class Update(WeightTransferUpdateInfo):
        pass

    class SharedMemoryOfATrainer(WeightTransferEngine):
        init_info_cls, update_info_cls = Init, Update
        weights = digest = None

        def init_transfer_engine(self, init_info: Init) -> None:
            """Open the shared memory that `init_info` describes, and check that it holds the trainer's weights. Called
            before each update. If the digest differs, raise RuntimeError; vLLM keeps its current weights."""
            self.weights = self.digest = None
            weights = open_memory(init_info.path, init_info.size, init_info.manifest)
            self.found = weights.digest()
            if self.found != init_info.digest:
                raise RuntimeError(
                    f"the weights that arrived are not the trainer's: digest {self.found} against {init_info.digest}; vLLM keeps the old ones"
                )
            self.weights, self.expected = weights, {name for name, _ in self.model.named_parameters()}

        def start_weight_update(self) -> None:
            if self.weights is None:
                raise RuntimeError("no trainer has said where its weights lie")
            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict) -> None:
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: Update) -> None:
            check_all_loaded(self.expected, self.model.load_weights(self.weights.tensors()))

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)
            pack_again(self.model)
            self.digest, self.weights = self.found, None

        def shutdown(self) -> None:
            self.weights = None

    return SharedMemoryOfATrainer


def nccl_engine() -> type:
    """Return the class of the NCCL transfer: vLLM's engine `nccl` for tensors sent one by one, plus their digest."""
    import torch
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo

    class NcclOfATrainer(NCCLWeightTransferEngine):
        digest = None

        def init_transfer_engine(self, init_info) -> None:
            if init_info.packed:
                raise RuntimeError("this trainer sends tensors one by one: packed must be false")
            self.digest, self.expected = None, {name for name, _ in self.model.named_parameters()}
            super().init_transfer_engine(init_info)

        def start_weight_update(self) -> None:
            self.digest = None
            super().start_weight_update()

        def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
            manifest = [list(each) for each in zip(update_info.names, update_info.dtype_names, update_info.shapes)]
            digest, loaded = begin_digest(manifest), set()
            for name, dtype, shape in manifest:
                weight = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
                self.model_update_group.broadcast(weight, src=0)  # runs on the current stream
                digest.update(weight.contiguous().reshape(-1).view(torch.uint8).cpu().numpy())
                loaded |= set(self.model.load_weights([(name, weight)]) or ())
            check_all_loaded(self.expected, loaded)
            self.digest = digest.hexdigest()

    return NcclOfATrainer


def __getattr__(name: str) -> type:
    """Return the transfer class that vLLM requests by name. A class is created only then, because it needs vLLM."""
    makers = {"SharedMemoryOfATrainer": shared_memory_engine, "NcclOfATrainer": nccl_engine}
    if name not in makers:
        raise AttributeError(name)
    return makers[name]()


def register() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(SHARED_MEMORY, __name__, "SharedMemoryOfATrainer")
    WeightTransferEngineFactory.register_engine(NCCL, __name__, "NcclOfATrainer")


class Weights:
    """The extension of vLLM's workers (`--worker-extension-cls`), which answers a trainer's queries."""

    def nemo_rl_cpp_weights(self) -> dict:
        """Return the properties of this server that a trainer checks, and the digest of the last received weights."""
        import vllm
        from vllm.platforms import current_platform

        config, engine = self.vllm_config, self.weight_transfer_engine
        return {
            "protocol": PROTOCOL, "vllm": vllm.__version__, "digest": getattr(engine, "digest", None),
            "transfer": None if config.weight_transfer_config is None else config.weight_transfer_config.backend,
            "is_cpu": current_platform.is_cpu(), "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "logprobs_mode": config.model_config.logprobs_mode, "max_model_len": config.model_config.max_model_len,
            "generation_config": config.model_config.generation_config, "max_num_seqs": config.scheduler_config.max_num_seqs,
            "chunked_prefill": bool(config.scheduler_config.enable_chunked_prefill), "vocab_size": config.model_config.get_vocab_size(),
        }  # fmt: skip


if not __package__:  # only in vLLM's interpreter; in the trainer this file is part of a package
    register()
