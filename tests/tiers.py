"""The fast tier, `pytest -m "not slow"`, is what is left without these folders and fixtures and without the tests marked `slow`."""

from pathlib import Path

TESTS = Path(__file__).parent
SLOW_FOLDERS = {
    "integration": "whole runs, from a configuration to a trained model",
    "parity": "models of transformers are built and compared with",
    "unit/cuda": "the CUDA kernels are compiled for the CPU",
}
SLOW_FIXTURES = {"hf_smollm2": "transformers is loaded, which takes seconds"}


def is_in_a_slow_folder(path: Path) -> bool:
    return any(path.is_relative_to(TESTS / folder) for folder in SLOW_FOLDERS)
