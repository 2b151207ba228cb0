"""What a vLLM server is started with so that a run can bring it weights:

    VLLM_SERVER_DEV_MODE=1 PYTHONPATH=<this folder> python -m vllm.entrypoints.openai.api_server --model MODEL \
        --worker-extension-cls nemo_rl_cpp_vllm.Weights --weight-transfer-config '{"backend": "nemo_rl_cpp_shared_memory"}' ...

`docs/vllm.md` has the whole command. A plain file for vLLM's interpreter, as `worker_script.py`, which it loads from its own folder or
the one above: on another machine these two files are enough. Importing it makes two weight transfers known to vLLM:

    nemo_rl_cpp_shared_memory   the trainer is a process of this machine and of this user; weights lie in memory that both map
    nemo_rl_cpp_nccl            the trainer's GPU broadcasts each tensor, as vLLM's own engine `nccl` expects it (not packed)

Both take a digest of what arrived, and keep it for the trainer to ask for.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, field
from pathlib import Path


def _beside(name: str):
    here = Path(__file__).resolve().parent
    path = next((folder / name for folder in (here, here.parent) if (folder / name).is_file()), None)
    if path is None:
        raise ImportError(f"{name} of nemo-rl-cpp must lie in {here} or in the folder above it")
    spec = importlib.util.spec_from_file_location("nemo_rl_cpp_worker_script", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = _beside("worker_script.py")


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
        return script.SharedWeights(descriptor, manifest, size)
    finally:
        os.close(descriptor)


def shared_memory_engine() -> type:
    """The class of the weight transfer through shared memory."""
    from vllm.distributed.weight_transfer.base import WeightTransferInitInfo

    @dataclass
    class Init(WeightTransferInitInfo):
        path: str = ""
        size: int = 0
        manifest: list = field(default_factory=list)
        digest: str = ""

    class SharedMemoryOfATrainer(script.transfer_engine()):
        init_info_cls = Init
        digest = None

        def init_transfer_engine(self, init_info: Init) -> None:
            """Before each update: what lies in the memory now must be what the trainer has, or vLLM keeps the weights that it has."""
            self.weights = self.digest = None
            weights = open_memory(init_info.path, init_info.size, init_info.manifest)
            self.found = weights.digest()
            script.check_digest(self.found, init_info.digest)
            self.weights = weights
            super().init_transfer_engine(init_info)

        def start_weight_update(self) -> None:
            if self.weights is None:
                raise RuntimeError("no trainer has said where its weights lie")
            super().start_weight_update()

        def finish_weight_update(self) -> None:
            super().finish_weight_update()
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
            digest, loaded = script.begin_digest(manifest), set()
            for name, dtype, shape in manifest:
                weight = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
                self.model_update_group.broadcast(weight, src=0)  # on the current stream
                digest.update(weight.contiguous().reshape(-1).view(torch.uint8).cpu().numpy())
                loaded |= set(self.model.load_weights([(name, weight)]) or ())
            script.check_all_loaded(self.expected, loaded)
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

    WeightTransferEngineFactory.register_engine(script.SHARED_MEMORY, __name__, "SharedMemoryOfATrainer")
    WeightTransferEngineFactory.register_engine(script.NCCL, __name__, "NcclOfATrainer")


class Weights:
    """Becomes a part of vLLM's worker (`--worker-extension-cls`): answers what a trainer asks before and after it brings weights."""

    def nemo_rl_cpp_weights(self) -> dict:
        """What this server is, as far as a trainer must know it, and the digest of the weights that it was last brought."""
        import vllm
        from vllm.platforms import current_platform

        config, engine = self.vllm_config, self.weight_transfer_engine
        return {
            "protocol": script.PROTOCOL, "vllm": vllm.__version__, "digest": getattr(engine, "digest", None),
            "transfer": None if config.weight_transfer_config is None else config.weight_transfer_config.backend,
            "is_cpu": current_platform.is_cpu(), "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "logprobs_mode": config.model_config.logprobs_mode, "max_model_len": config.model_config.max_model_len,
            "generation_config": config.model_config.generation_config, "max_num_seqs": config.scheduler_config.max_num_seqs,
            "chunked_prefill": bool(config.scheduler_config.enable_chunked_prefill), "vocab_size": config.model_config.get_vocab_size(),
        }  # fmt: skip


register()
