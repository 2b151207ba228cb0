"""The fast tier, `pytest -m "not slow"`, is what is left without these folders and fixtures and without the tests marked `slow`.

With several processes (`-n 2`) a unit of tests stays in one of them, and the longest units come first."""

from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
SLOW_FOLDERS = {
    "integration": "whole runs, from a configuration to a trained model",
    "parity": "models of transformers are built and compared with",
    "unit/cuda": "the CUDA kernels are compiled for the CPU",
}
SLOW_FIXTURES = {"hf_smollm2": "transformers is loaded, which takes seconds"}
TOGETHER = ("tests/unit/cuda/",)  # they share what is compiled
# about how many seconds a unit takes, of those that take long; the others come after them
SECONDS = {
    "tests/integration/test_modes_tiny.py": 120,
    "tests/integration/test_ppo_tiny.py": 100,
    "tests/integration/test_several_processes.py": 70,
    "tests/unit/cuda/": 60,
    "tests/unit/distributed/test_launch.py": 60,
    "tests/unit/distributed/test_two_nodes.py": 55,
    "tests/unit/environments/test_ray_environment.py": 50,
    "tests/integration/test_grpo_tiny.py": 50,
    "tests/unit/distributed/test_ray_workers.py": 50,
    "tests/integration/test_hf_tiny.py": 45,
    "tests/integration/test_resume.py": 45,
    "tests/documents/test_snippets.py": 45,
    "tests/integration/test_dedicated_engines.py": 40,
    "tests/unit/config/test_effective_keys.py": 40,
    "tests/integration/test_guides.py": 40,
    "tests/parity/test_model_folders.py": 40,
    "tests/unit/environments/test_end_with_the_trainer.py": 30,
    "tests/unit/models/test_hf_models.py": 30,
    "tests/unit/environments/test_sandbox_memory.py": 30,
}


def is_in_a_slow_folder(path: Path) -> bool:
    return any(path.is_relative_to(TESTS / folder) for folder in SLOW_FOLDERS)


def unit_of(nodeid: str) -> str:
    """What a test shares its process with: the tests of its file, or of its folder."""
    return next((folder for folder in TOGETHER if nodeid.startswith(folder)), nodeid.partition("::")[0])


def seconds_of(unit: str) -> int:
    return SECONDS.get(unit, 0)


def scheduler(config: Any, log: Any) -> Any:
    """Of pytest-xdist: a unit of tests in one process, units in the order of collection."""
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    config.option.loadscopereorder = False
    return Units(config, log)
