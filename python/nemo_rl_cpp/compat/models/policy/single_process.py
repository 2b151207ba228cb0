"""NeMo RL's calls on a policy that is spread over workers and hosts its own engine, for a policy that is one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nemo_rl_cpp.compat.models.generation.interfaces import GenerationInterface

if TYPE_CHECKING:
    from nemo_rl_cpp.compat.models.policy.interfaces import ScoreOutputSpec
    from nemo_rl_cpp.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl_cpp.models.generation.interfaces import GenerationDatumSpec, GenerationOutputSpec


class SingleProcessPolicy(GenerationInterface):
    """Generation through an engine on the policy's own weights, and the calls that address workers: there is one.

    What needs several processes, or a model of another kind, raises NotImplementedError with the reason.
    """

    _engine: GenerationInterface | None = None

    def create_generation(self, generation_config: Any = None, **options: Any) -> GenerationInterface:
        raise NotImplementedError

    # ---- workers

    def run_all_workers_single_data(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """[result of `method_name(*args, **kwargs)`]: one worker, one result."""
        return [getattr(self, method_name)(*args, **kwargs)]

    def run_all_workers_multiple_data(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """As above, where every argument is a list with one entry a worker. ValueError for another number of entries."""
        for value in (*args, *kwargs.values()):
            if len(value) != 1:
                raise ValueError(f"{method_name}: {len(value)} entries for one worker")
        only = {name: value[0] for name, value in kwargs.items()}
        return self.run_all_workers_single_data(method_name, *(value[0] for value in args), **only)

    def print_node_ip_and_gpu_id(self) -> list[tuple[str, int]]:
        """Prints and returns where the worker runs: [(address, device index)]."""
        places = [("127.0.0.1", 0)]
        print(f"policy worker: {places[0][0]}, device {places[0][1]}")
        return places

    # ---- generation on these weights

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """A response for every prompt, by an engine that reads the policy's weights; made at the first call."""
        if self._engine is None:
            self._engine = self.create_generation()
        return self._engine.generate(data, greedy)

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Nothing to make ready: the engine reads the policy's own weights."""
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Gives back what the policy's own engine holds."""
        return self._engine.finish_generation(*args, **kwargs) if self._engine is not None else True

    def invalidate_kv_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Forgets cached keys and values; whether there was such a cache."""
        return self._engine.invalidate_kv_cache() if self._engine is not None else False

    def finish_inference(self) -> None:
        """Nothing to give back: log-probabilities keep no state."""

    # ---- memory, saving, profiling

    def get_free_memory_bytes(self) -> int:
        """Bytes that the machine can still give to this process."""
        from nemo_rl_cpp.telemetry.memory import available_bytes

        return available_bytes()

    def finalize_async_save(self) -> None:
        """Nothing is pending: `save_checkpoint` returns when the files are written."""

    def start_gpu_profiling(self) -> None:
        """Starts CUDA's profiler. RuntimeError where there is no CUDA device."""
        _profiler().start()

    def stop_gpu_profiling(self) -> None:
        """Stops CUDA's profiler. RuntimeError where there is no CUDA device."""
        _profiler().stop()

    # ---- what one process with a language model cannot do

    def score(self, data: BatchedDataDict[GenerationDatumSpec]) -> BatchedDataDict[ScoreOutputSpec]:
        """Rewards by a reward model."""
        raise _cannot("score", "a language model gives no scores; score responses in an environment")

    def get_full_logits_ipc(
        self, data: Any, micro_batch_size: int | None = None, timer: Any = None
    ) -> list[dict[str, Any]]:
        """All logits, for distillation."""
        raise _cannot("get_full_logits_ipc", "distillation is not supported")

    def release_ipc_buffer(self) -> None:
        """Gives back the logits' buffers."""
        raise _cannot("release_ipc_buffer", "distillation is not supported")

    def init_collective_mcore_generation(
        self, ip: str, port: int, world_size: int, *, rank_offset: int, refit_backend: str = "gloo"
    ) -> list[Any]:
        """Joins the group of a Megatron engine."""
        raise _cannot("init_collective_mcore_generation", "the engine reads the policy's own weights")

    def preinit_nvshmem(self) -> list[Any]:
        """Prepares NVSHMEM."""
        raise _cannot("preinit_nvshmem", "the engine reads the policy's own weights")

    def swap_weights_via_reshard(self, *, is_source: bool) -> list[Any]:
        """Sends the weights by resharding."""
        raise _cannot("swap_weights_via_reshard", "the engine reads the policy's own weights")

    def init_nccl_reshard_comm_group(
        self,
        pp_ips: list[str],
        pp_ports: list[int],
        pp_size: int,
        pp_stages: list[int],
        sub_world_size: int,
        ranks_in_group: list[int],
    ) -> list[Any]:
        """Joins the groups of a resharding refit."""
        raise _cannot("init_nccl_reshard_comm_group", "the engine reads the policy's own weights")


def _cannot(method: str, reason: str) -> NotImplementedError:
    return NotImplementedError(f"the native policy has no {method}: {reason}")


def _profiler() -> Any:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("GPU profiling needs a CUDA device, and torch sees none")
    return torch.cuda.profiler
