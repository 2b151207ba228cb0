import base64
import hashlib
import importlib.util
import re
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "cmake" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "x-1-1torch2.15.0-cp311-cp311-linux_x86_64.whl"
    metadata = "Name: x\nRequires-Dist: torch==2.15.0\nRequires-Dist: numpy\n\nText: Requires-Dist: torch==2.15.0\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/_C.so", b"\0\1")
        archive.writestr("x-1.dist-info/METADATA", metadata)
        archive.writestr(
            "x-1.dist-info/RECORD",
            "x/_C.so,sha256=abc,2\nx-1.dist-info/METADATA,sha256=old,1\nx-1.dist-info/RECORD,,\n",
        )
    return path


def test_wheel_built_for_another_torch_version_requires_that_torch_version(wheel):
    load("wheel_requires").replace_requirement(wheel, "torch==2.15.0", "torch==2.14.1")
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    text = files["x-1.dist-info/METADATA"].decode()
    assert text == "Name: x\nRequires-Dist: torch==2.14.1\nRequires-Dist: numpy\n\nText: Requires-Dist: torch==2.15.0\n"
    digest = base64.urlsafe_b64encode(hashlib.sha256(files["x-1.dist-info/METADATA"]).digest()).decode().rstrip("=")
    assert files["x-1.dist-info/RECORD"].decode().splitlines() == [
        "x/_C.so,sha256=abc,2", f"x-1.dist-info/METADATA,sha256={digest},{len(text)}", "x-1.dist-info/RECORD,,",
    ]  # fmt: skip
    assert files["x/_C.so"] == b"\0\1"


def test_replacing_a_requirement_that_is_missing_in_the_wheel_is_an_error(wheel):
    with pytest.raises(ValueError, match="0 lines of .* require torch==2.9.0, expected one"):
        load("wheel_requires").replace_requirement(wheel, "torch==2.9.0", "torch==2.14.1")


class Asked(Exception):
    pass


def test_wheel_build_creates_an_environment_only_if_build_tools_are_missing(monkeypatch):
    backend = load("nemo_rl_build")
    asked = []

    def environment(folder, compiles):
        asked.append(compiles)
        raise Asked

    monkeypatch.setattr(backend, "_environment", environment)
    assert isinstance(backend.get_requires_for_build_sdist(), list) and asked == []  # scikit-build-core is here
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Asked):
        backend.build_sdist("dist")
    with pytest.raises(Asked):
        backend.build_wheel("dist")
    assert asked == [False, True]


def test_torch_version_is_equal_in_build_requirements_package_and_container_files():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    requirements = project["build-system"]["requires"] + project["project"]["dependencies"]
    found = [line for line in requirements if line.startswith("torch")]
    files = [path.read_text() for path in sorted((ROOT / "examples/docker").glob("Dockerfile.*"))]
    found += re.findall(r"torch==[\w.]+", "\n".join(files))
    assert len(found) >= 4 and len(set(found)) == 1


def test_every_declared_dependency_is_imported_by_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    named = {re.match(r"[\w.-]+", line)[0] for lines in (project["dependencies"], *extras) for line in lines}
    text = "\n".join(path.read_text() for path in (ROOT / "python").rglob("*.py"))

    def is_imported(name):
        module = name.replace("-", "_")
        return re.search(
            rf'^ *(import|from) {module}\b|(import_module|find_spec)\("{module}"\)|^    name, .* = "{module}",',
            text,
            re.M,
        )

    assert len(named) > 20
    assert [name for name in sorted(named) if not is_imported(name)] == ["cmeel-yaml-cpp"]  # the core links it
    assert "cmeel-yaml-cpp" in (ROOT / "cmake/deps.cmake").read_text()
