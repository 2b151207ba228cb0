"""What `nemo-rl-cpp doctor` tells: the machine, the versions, the optional packages."""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple


class Fact(NamedTuple):
    """A line: ✓ good, · for your information, ! worth a look, ✗ wrong; with advice where there is any."""

    mark: str
    name: str
    value: str
    advice: str = ""


def facts() -> Iterator[tuple[str, list[Fact]]]:
    """Headings with their lines, one after another: where one cannot be told, those before it have been."""
    groups = {"machine": _machine, "installation": _installation, "GPU": _gpu, "optional packages": _extras}
    for title, group in groups.items():
        yield title, group()


def _machine() -> list[Fact]:
    from nemo_rl_cpp.config.memory import machine_memory, size_text

    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    busy = load > 1.5 * cores
    rows = [
        Fact("·", "system", f"{_os_name()}, {platform.machine()}"),
        Fact("·", "processor", _processor()),
        Fact(
            "!" if busy else "✓", "cores", f"{cores} for this process, load {load:.1f}",
            "other programs are running: timings will be poor, and fewer threads may be faster (OMP_NUM_THREADS)" if busy else "",
        ),
        _threads(cores),
    ]  # fmt: skip
    memory, free = machine_memory(), _available_memory()
    if memory is not None:
        rows.append(Fact("✓", "memory", size_text(memory) + (f", {size_text(free)} of it free" if free else "")))
    disk = shutil.disk_usage(".").free
    rows.append(
        Fact(
            "!" if disk < 5e9 else "✓",
            "disk",
            f"{size_text(disk)} free in this folder",
            "a checkpoint takes 14 bytes a parameter" if disk < 5e9 else "",
        )
    )
    return rows


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return f"{platform.system()} {platform.release()}"


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or "not known"
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.+)$", text, re.MULTILINE)
    known = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flags and flag in flags[1].split()]
    return f"{name[1] if name else 'not known'} ({', '.join(known) or 'none of avx2, avx512'})"


def _threads(cores: int) -> Fact:
    given = {
        name: value
        for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
        if (value := os.environ.get(name))
    }
    told = (
        ", ".join(f"{name}={value}" for name, value in given.items()) or "OMP_NUM_THREADS is not set: one thread a core"
    )
    count = given.get("OMP_NUM_THREADS", "")
    if count.isdigit() and int(count) > cores:
        return Fact(
            "!", "threads", told, f"more threads than the {cores} cores of this process: they wait for one another"
        )
    return Fact("·", "threads", told)


def _available_memory() -> float | None:
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
    return float(found[1]) * 1024 if found else None


def _installation() -> list[Fact]:
    from nemo_rl_cpp import __version__
    from nemo_rl_cpp._torch_version import check_torch_version
    from nemo_rl_cpp.config.locate import source_tree

    kind = "a checkout" if source_tree() is not None else "a wheel"
    rows = [
        Fact("✓", "nemo_rl_cpp", f"{__version__}, from {kind}"),
        Fact("✓" if (3, 11) <= sys.version_info < (3, 15) else "!", "Python", platform.python_version()),
    ]
    try:
        version = metadata.version("torch")
        check_torch_version(version)
        rows.append(Fact("✓", "torch", version))
    except metadata.PackageNotFoundError:
        return [*rows, Fact("✗", "torch", "is not installed", "pip install torch")]
    except ImportError as error:
        return [*rows, Fact("✗", "torch", str(error))]
    rows.append(_core())
    compiler, ninja = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++"), shutil.which("ninja")
    rows.append(
        Fact(
            "·",
            "compiler",
            _first_line([compiler, "--version"]) if compiler else "none: only building the package needs one",
        )
    )
    if kind == "a checkout" and compiler and not ninja:
        rows.append(Fact("·", "ninja", "none on the path: `uv sync` brings its own"))
    return rows


def _core() -> Fact:
    try:
        from nemo_rl_cpp._native import C
    except (ImportError, OSError) as error:
        return Fact(
            "✗", "native core", str(error), "install the package again: uv sync --reinstall-package nemo-rl-cpp"
        )
    lowered = [
        f"{name}={value}"
        for name in ("NEMO_RL_CPU_CAPABILITY", "ATEN_CPU_CAPABILITY")
        if (value := os.environ.get(name))
    ]
    text = f"kernels for {C.cpu_capability()}" + (f" (lowered by {', '.join(lowered)})" if lowered else "")
    return Fact("✓", "native core", f"{text}, CUDA kernels {'compiled' if C.cuda_compiled else 'not compiled'}")


def _gpu() -> list[Fact]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return [Fact("!", "not known", f"torch cannot be imported, and says: {error}")]
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        return [Fact("✓", "torch sees", ", ".join(names))]
    if smi := shutil.which("nvidia-smi"):
        seen = _first_line([smi, "--query-gpu=name,driver_version", "--format=csv,noheader"])
        why = (
            "torch has no CUDA"
            if torch.version.cuda is None
            else f"torch is for CUDA {torch.version.cuda}: the driver may be too old for it"
        )
        return [Fact("!", "driver sees", seen, f"torch sees no GPU: {why}")]
    return [Fact("·", "none", "training and generation run on the CPU")]


def _first_line(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return next(iter(done.stdout.splitlines() or done.stderr.splitlines()), "says nothing")


def _extras() -> list[Fact]:
    """The packages of the extras that the installed package declares."""
    try:
        needs = metadata.requires("nemo-rl-cpp") or []
    except metadata.PackageNotFoundError:
        return []
    groups: dict[str, list[str]] = {}
    for need in needs:
        found = re.match(r"([\w.-]+).*;.*extra\s*==\s*['\"]([\w-]+)['\"]", need)
        if found:
            groups.setdefault(found[2], []).append(found[1])
    return [_extra(extra, packages) for extra, packages in sorted(groups.items())]


def _extra(extra: str, packages: Sequence[str]) -> Fact:
    there, missing = [], []
    for package in packages:
        try:
            there.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            missing.append(package)
    if not missing:
        return Fact("✓", extra, ", ".join(there))
    return Fact("·", extra, f"not installed: {', '.join(missing)} (pip install 'nemo-rl-cpp[{extra}]')")
