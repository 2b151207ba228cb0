"""The fast tier, `pytest -m "not slow"`: all tests except those in slow folders, with slow fixtures, or marked `slow`.

With several processes (`-n 2`) the tests of a unit run in one process, and the longest units come first."""

from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
SLOW_FOLDERS = {
    "integration": "whole runs, from a configuration to a trained model",
    "parity": "models of transformers are built and compared with",
    "unit/cuda": "the CUDA kernels are compiled for the CPU",
}
SLOW_FIXTURES = {"hf_smollm2": "transformers is loaded, which takes seconds"}
TOGETHER = ("tests/unit/cuda/",)  # its tests share the compiled kernels
# approximate seconds of the long units; all other units come after them
SECONDS = {
    "tests/unit/cuda/": 130, "tests/unit/environments/test_ray_environment.py": 100,
    "tests/integration/test_user_code_everywhere.py": 60, "tests/integration/test_ppo_tiny.py": 40,
    "tests/integration/test_modes_tiny.py": 50, "tests/unit/distributed/test_two_nodes.py": 60,
    "tests/unit/ops/test_capabilities.py": 90, "tests/unit/distributed/test_launch.py": 60,
    "tests/integration/test_several_processes.py": 45, "tests/documents/test_snippets.py": 55,
    "tests/unit/distributed/test_ray_workers.py": 45,
    "tests/integration/test_dedicated_engines.py": 45, "tests/integration/test_hf_tiny.py": 40,
    "tests/integration/test_resume.py": 35, "tests/parity/test_hf_model.py": 35,
    "tests/integration/test_multi_turn.py": 30, "tests/unit/hub/test_sources.py": 30,
    "tests/unit/checkpoints/test_checkpoint_faults.py": 30, "tests/integration/test_grpo_tiny.py": 30,
    "tests/unit/errors/test_command_lines.py": 25, "tests/unit/errors/test_user_mistakes.py": 25,
    "tests/integration/test_guides.py": 25, "tests/parity/test_model_folders.py": 25, "tests/unit/test_cpp_core.py": 25,
    "tests/integration/test_lora_tiny.py": 25, "tests/unit/distributed/test_process_workers.py": 25,
    "tests/unit/environments/test_sandbox.py": 25, "tests/integration/test_tinker_cookbook.py": 25,
    "tests/unit/config/test_effective_keys.py": 20, "tests/parity/test_smollm2.py": 20,
    "tests/architecture/test_benchmarks.py": 20, "tests/unit/algorithms/test_distillation.py": 20,
    "tests/integration/test_agents.py": 20, "tests/unit/environments/test_end_with_the_trainer.py": 20,
    "tests/unit/tinker/test_sdk.py": 20, "tests/unit/algorithms/test_collector.py": 20,
    "tests/unit/environments/test_code_environment.py": 20, "tests/unit/trainer/test_vocabulary_head.py": 20,
    "tests/parity/test_lora_parity.py": 15, "tests/unit/checks/test_preflight_model.py": 15,
    "tests/unit/tinker/test_robustness.py": 15, "tests/unit/models/test_hf_models.py": 15,
    "tests/unit/generation/test_vllm_generation.py": 15, "tests/integration/test_rollouts_beside_training.py": 15,
    "tests/unit/generation/test_native_generation.py": 15, "tests/integration/test_tensor_parallel.py": 15,
    "tests/unit/ops/test_attention.py": 15, "tests/unit/generation/test_vllm_server.py": 15,
    "tests/unit/tinker/test_hostile.py": 15, "tests/unit/models/test_hf_sharded.py": 15,
    "tests/unit/environments/test_verifier_pool.py": 15, "tests/parity/test_gguf_export.py": 15,
    "tests/unit/ops/test_clipped_pg_loss.py": 15, "tests/unit/data/test_generated_tasks.py": 15,
}  # fmt: skip


def is_in_a_slow_folder(path: Path) -> bool:
    return any(path.is_relative_to(TESTS / folder) for folder in SLOW_FOLDERS)


def unit_of(nodeid: str) -> str:
    """Return the unit of a test, whose tests run in one process: its file, or its folder."""
    return next((folder for folder in TOGETHER if nodeid.startswith(folder)), nodeid.partition("::")[0])


def seconds_of(unit: str) -> int:
    return SECONDS.get(unit, 0)


def scheduler(config: Any, log: Any) -> Any:
    """Return a pytest-xdist scheduler that runs each unit in one process, in the order of collection."""
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    config.option.loadscopereorder = False
    return Units(config, log)
