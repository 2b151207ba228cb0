"""The CUDA kernels compiled for the CPU, once per session, and again only after a source has changed."""

from pathlib import Path

import pytest
from cuda_emulation import build


@pytest.fixture(scope="session")
def objects(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    cache = getattr(pytestconfig, "cache", None)  # None under -p no:cacheprovider
    return build.build(Path(cache.mkdir("cuda_emulation")) if cache else tmp_path_factory.mktemp("cuda_emulation"))


@pytest.fixture(scope="session")
def kernels(objects: list[Path], tmp_path_factory: pytest.TempPathFactory) -> build.Kernels:
    return build.Kernels(build.link(objects, tmp_path_factory.mktemp("cuda_emulation") / "kernels.so"))
