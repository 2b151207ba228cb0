"""Compiles the CUDA kernels for the CPU (see cuda_runtime_api.h) into a shared library, and calls its functions."""

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cuda_emulation.rewrite import rewrite

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
# fortification would reject jumps between stacks; unique symbols would share variables between two libraries
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-Wno-unknown-pragmas", "-U_FORTIFY_SOURCE", "-fno-gnu-unique"]
INCLUDES = [f"-I{HERE}", f"-I{CSRC}"]
JOBS = 2


class Kernels:
    """The functions of entry_points_*.cpp, called as `kernels.name(...)`.

    Arguments are tensors (passed as addresses), None, ints and floats."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.take_error.restype = ctypes.c_char_p

    def __getattr__(self, name: str):
        function = getattr(self._library, name)
        function.restype = ctypes.c_int64

        def call(*arguments) -> int:
            result = function(*map(argument, arguments))
            if error := self._library.take_error():
                raise RuntimeError(f"{name}: {error.decode()}")
            return result

        return call


def argument(value):
    if value is None:
        return ctypes.c_void_p(None)
    if isinstance(value, torch.Tensor):
        assert value.device.type == "cpu"
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_double(value) if isinstance(value, float) else ctypes.c_int64(int(value))


def core_folder() -> Path:
    """Return the folder of the installed core library, which contains the arithmetic that CPU and CUDA share."""
    from nemo_rl_cpp._native import C

    return Path(C.__file__).parent


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.fail(f"{' '.join(command)}\n{done.stderr[-4000:]}")


def compile_object(source: Path, folder: Path, *options: str) -> Path:
    target = folder / f"{source.stem}.o"
    run(["g++", *FLAGS, *INCLUDES, *options, "-c", str(source), "-o", str(target)])
    return target


def link(objects: list[Path], target: Path, *more: str) -> Path:
    core = core_folder()
    libraries = [f"-L{core}", "-lnemo_rl_core", f"-Wl,-rpath,{core}", *more]
    run(["g++", "-shared", "-o", str(target), *map(str, objects), *libraries])
    return target


def rewritten(source: Path, folder: Path, change=None) -> Path:
    """Write `source` as C++ into `folder`. `change` is (old, new), a mistake to insert."""
    text = source.read_text()
    if change is not None:
        assert text.count(change[0]) == 1, change[0]
        text = text.replace(*change)
    target = folder / f"{source.stem}.cpp"
    target.write_text(rewrite(text))
    return target


def fingerprint() -> str:
    """Return a digest of everything that a build depends on."""
    files = [
        *sorted(HERE.rglob("*.*")),
        *sorted((CSRC / "kernels").rglob("*.*")),
        *sorted((CSRC / "common").glob("*.h")),
    ]
    digest = hashlib.sha256(f"{FLAGS} {core_folder()}".encode())
    for path in files:
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def compile_all(folder: Path) -> None:
    kernels = [*sorted((CSRC / "kernels/cuda").glob("*.cu")), *sorted(HERE.glob("*.cu"))]
    sources = [rewritten(p, folder) for p in kernels] + sorted(HERE.glob("entry_points_*.cpp"))
    header = folder / "cuda_runtime_api.h"  # compiled once, since it is more than half of most sources
    run(["g++", *FLAGS, *INCLUDES, "-x", "c++-header", str(HERE / header.name), "-o", f"{header}.gch"])
    with ThreadPoolExecutor(JOBS) as pool:
        list(pool.map(lambda source: compile_object(source, folder, "-include", str(header)), sources))


def build(cache: Path) -> list[Path]:
    """Return the object files of all kernels and entry points, from `cache` if nothing has changed since."""
    if shutil.which("g++") is None:
        pytest.fail("g++ is not installed, with which the CUDA kernels are compiled for the CPU: `apt-get install g++`")
    folder = cache / f"kernels-{fingerprint()}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(prefix="building-", dir=cache) as unfinished:
            compile_all(Path(unfinished))
            for older in cache.glob("kernels-*"):
                shutil.rmtree(older, ignore_errors=True)
            finished = Path(unfinished) / "finished"
            finished.mkdir()
            for p in Path(unfinished).glob("*.o"):
                p.rename(finished / p.name)
            finished.rename(folder)  # atomically, because another test run may look for it
    return sorted(folder.glob("*.o"))


def with_mistake(objects: list[Path], file: str, old: str, new: str, folder: Path) -> Kernels:
    """Return the kernels with `old` replaced by `new` in csrc/kernels/cuda/`file`."""
    wrong = compile_object(rewritten(CSRC / "kernels/cuda" / file, folder, (old, new)), folder)
    others = [p for p in objects if p.name != wrong.name]
    return Kernels(link([wrong, *others], folder / "wrong.so"))


def build_device(objects: list[Path], folder: Path) -> Path:
    """Compile the emulated device of torch, and this package's operators on it, which launch the kernels in `objects`.
    Return the shared library, in `folder`."""
    device, torch_folder = HERE / "device", Path(torch.__file__).parent
    headers = (
        f"-I{device}",
        f"-I{torch_folder / 'include'}",
        f"-I{torch_folder / 'include/torch/csrc/api/include'}",
        "-w",
    )
    sources = [*sorted((CSRC / "ops").glob("*_cuda.cpp")), *sorted(device.glob("*.cpp"))]
    with ThreadPoolExecutor(JOBS) as pool:
        made = list(pool.map(lambda source: compile_object(source, folder, *headers), sources))
    return link([*objects, *made], folder / "device.so", f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10")
