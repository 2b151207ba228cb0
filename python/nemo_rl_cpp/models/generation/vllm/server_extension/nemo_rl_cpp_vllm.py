"""The part of vLLM's server through which a run brings it weights. vLLM's interpreter loads this file:

    VLLM_SERVER_DEV_MODE=1 PYTHONPATH=<this folder> python -m vllm.entrypoints.openai.api_server --model MODEL \
        --worker-extension-cls nemo_rl_cpp_vllm.Weights --weight-transfer-config '{"backend": "nemo_rl_cpp_shared_memory"}' ...

`docs/vllm.md` has the whole command. A plain file that imports the standard library, torch and vLLM, and nothing of this package,
which needs another torch: on another machine it is enough alone. vLLM learns two weight transfers from it:

    nemo_rl_cpp_shared_memory   the trainer is a process of this machine and of this user; weights lie in memory that both map
    nemo_rl_cpp_nccl            the trainer's GPU broadcasts each tensor, as vLLM's own engine `nccl` expects it (not packed)

Both take a digest of what arrived, and keep it for the trainer to ask for. The trainer imports the digest and the names from here.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from dataclasses import dataclass, field

TESTED_VERSION = "0.32.0"
"""The one version of vLLM whose interfaces are used here, and with which the tests have run."""
SHARED_MEMORY, NCCL = "nemo_rl_cpp_shared_memory", "nemo_rl_cpp_nccl"
PROTOCOL = 1
"""Rises where a trainer and the extension of a server no longer understand one another."""


def begin_digest(manifest: list) -> hashlib.blake2b:
    """A digest that has taken in the names, types, shapes and places of all tensors; their bytes follow in this order."""
    return hashlib.blake2b(json.dumps(manifest).encode(), digest_size=16)


class SharedWeights:
    """The trainer's weights in memory that both processes map: [name, dtype, shape, offset, bytes] of each tensor."""

    def __init__(self, descriptor: int, manifest: list, size: int) -> None:
        self.manifest = manifest
        self.memory = mmap.mmap(descriptor, size)

    def digest(self) -> str:
        """Of what has arrived."""
        digest = begin_digest(self.manifest)
        view = memoryview(self.memory)
        for _, _, _, offset, size in self.manifest:
            digest.update(view[offset : offset + size])
        return digest.hexdigest()

    def tensors(self):
        """(name, tensor) one after the other, as views of the shared memory."""
        import torch

        for name, dtype, shape, offset, size in self.manifest:
            flat = torch.frombuffer(self.memory, dtype=torch.uint8, count=size, offset=offset)
            yield name, flat.view(getattr(torch, dtype)).view(shape)


def open_memory(path: str, size: int, manifest: list):
    """The trainer's memory, whose path is that of a file that only its process has open."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError as error:
        raise RuntimeError(
            f"the trainer's memory {path} cannot be opened ({error.strerror}): trainer and vLLM must run on one machine, as one user, and see "
            "each other's processes"
        ) from error
    try:
        if os.fstat(descriptor).st_size != size:
            raise RuntimeError(
                f"the trainer's memory {path} is another file here: trainer and vLLM must run on one machine"
            )
        return SharedWeights(descriptor, manifest, size)
    finally:
        os.close(descriptor)


def check_all_loaded(expected: set, loaded: set | None) -> None:
    """RuntimeError where a parameter of vLLM's model got nothing: it would keep its old values."""
    missing = sorted(expected - set(loaded or ()))
    if missing:
        raise RuntimeError(
            f"{len(missing)} parameters of vLLM's model got no weights from the trainer, first {', '.join(missing[:4])}"
        )


def check_digest(found: str, sent: str) -> None:
    """RuntimeError where other bytes arrived than the trainer sent."""
    if found != sent:
        raise RuntimeError(
            f"the weights that arrived are not the trainer's: digest {found} against {sent}; vLLM keeps the old ones"
        )


def pack_again(model) -> None:
    """On a CPU a head that shares the embedding's weights has a packed copy of its own, which the reload forgets."""
    for module in model.modules():
        if hasattr(module, "cpu_linear") and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)


def shared_memory_engine() -> type:
    """Return the class of the weight transfer through shared memory: it reloads layer after layer, as vLLM's own engines do."""
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
            """Before each update: what lies in the memory now must be what the trainer has, or vLLM keeps the weights
            that it has."""
            self.weights = self.digest = None
            weights = open_memory(init_info.path, init_info.size, init_info.manifest)
            self.found = weights.digest()
            check_digest(self.found, init_info.digest)
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
    """vLLM's own engine `nccl` for tensors that come one by one, with a digest of what came."""
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
                self.model_update_group.broadcast(weight, src=0)  # on the current stream
                digest.update(weight.contiguous().reshape(-1).view(torch.uint8).cpu().numpy())
                loaded |= set(self.model.load_weights([(name, weight)]) or ())
            check_all_loaded(self.expected, loaded)
            self.digest = digest.hexdigest()

    return NcclOfATrainer


def __getattr__(name: str) -> type:
    """The classes of the transfers, which vLLM asks for by name: that of NCCL is made only where it is used."""
    makers = {"SharedMemoryOfATrainer": shared_memory_engine, "NcclOfATrainer": nccl_engine}
    if name not in makers:
        raise AttributeError(name)
    return makers[name]()


def register() -> None:
    """Makes the transfers known to vLLM."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(SHARED_MEMORY, __name__, "SharedMemoryOfATrainer")
    WeightTransferEngineFactory.register_engine(NCCL, __name__, "NcclOfATrainer")


class Weights:
    """Becomes a part of vLLM's worker (`--worker-extension-cls`): answers what a trainer asks before and after it
    brings weights."""

    def nemo_rl_cpp_weights(self) -> dict:
        """What this server is, as far as a trainer must know it, and the digest of the weights that it was last brought."""
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


if not __package__:  # in vLLM's interpreter: the trainer imports this file as a module of its package
    register()
