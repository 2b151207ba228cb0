"""`nemo-rl-cpp doctor`: what this machine and this installation are, and whether three tiny steps train exactly."""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from nemo_rl_cpp import __version__
from nemo_rl_cpp._torch_version import check_torch_version
from nemo_rl_cpp.command_line import command_parser
from nemo_rl_cpp.config.locate import source_tree
from nemo_rl_cpp.files.durable import json_rows
from nemo_rl_cpp.models.memory import machine_memory, size_text

_EXAMPLES = """examples:
  nemo-rl-cpp doctor
  nemo-rl-cpp doctor --no-train     # the facts alone, within a second or two

The output names no file of yours: it may go into a bug report as it is."""


class Fact(NamedTuple):
    """A line: ✓ good, · for your information, ! worth a look, ✗ wrong; with advice where there is any."""

    mark: str
    name: str
    value: str
    advice: str = ""


class Exactness(NamedTuple):
    """What a self-test found: steps, the largest gap between trainer and generator, the tokens that differed, digests of the
    weights after each step, and its seconds."""

    steps: int
    largest_gap: float
    mismatched_tokens: int
    digests: list[str]
    seconds: float


def main(arguments: Sequence[str]) -> int:
    """Print the facts and the self-test; return 1 where something is wrong."""
    parser = command_parser(
        "doctor", "Look at this machine and this installation, and train three tiny steps.", _EXAMPLES
    )
    parser.add_argument("--no-train", action="store_true", help="leave the self-test out")
    parser.add_argument("--seconds", type=float, default=60.0, help="what the self-test may take (default: 60)")
    known = parser.parse_args(arguments)
    wrong = 0
    for title, rows in facts():
        print(title)
        width = max((len(row.name) for row in rows), default=0) + 2
        for row in rows:
            print(f"  {row.mark} {row.name:<{width}}{row.value}")
            if row.advice:
                print(f"    {'':<{width}}{row.advice}")
            wrong += row.mark == "✗"
        print()
    if not known.no_train:
        wrong += _self_test(known.seconds)
    many = f"{wrong} thing{'s are' if wrong > 1 else ' is'} wrong: see the lines with ✗."
    print(many if wrong else "Nothing is wrong.")
    return 1 if wrong else 0


def facts() -> Iterator[tuple[str, list[Fact]]]:
    """Yield headings with their lines, so that those before one that fails are printed."""
    yield "machine", _machine()
    yield "installation", _installation()
    yield "GPU", _gpu()
    yield "optional packages", _extras()


def _machine() -> list[Fact]:
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    busy = "other programs are running: timings will be poor, and fewer threads may be faster (OMP_NUM_THREADS)"
    threads = os.environ.get("OMP_NUM_THREADS", "")
    too_many = threads.isdigit() and int(threads) > cores
    disk = shutil.disk_usage(".").free
    rows = [
        Fact("·", "system", f"{platform.system()} {platform.release()}, {platform.machine()}"),
        Fact("·", "processor", _processor()),
        Fact("✓", "cores", f"{cores} for this process, load {load:.1f}"),
        Fact(
            "·", "threads", f"OMP_NUM_THREADS={threads}" if threads else "OMP_NUM_THREADS is not set: one thread a core"
        ),
        Fact("✓", "disk", f"{size_text(disk)} free in this folder"),
    ]
    if load > 1.5 * cores:
        rows[2] = rows[2]._replace(mark="!", advice=busy)
    if too_many:
        advice = f"more threads than the {cores} cores of this process: they wait for one another"
        rows[3] = rows[3]._replace(mark="!", advice=advice)
    if disk < 5e9:
        rows[4] = rows[4]._replace(mark="!", advice="a checkpoint takes 14 bytes a parameter")
    if (memory := machine_memory()) is not None:
        rows.append(Fact("✓", "memory", size_text(memory)))
    return rows


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or "not known"
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.+)$", text, re.MULTILINE)
    known = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flags and flag in flags[1].split()]
    return f"{name[1] if name else 'not known'} ({', '.join(known) or 'none of avx2, avx512'})"


def _installation() -> list[Fact]:
    kind = "a checkout" if source_tree() is not None else "a wheel"
    rows = [
        Fact("✓", "nemo_rl_cpp", f"{__version__}, from {kind}"),
        Fact("✓" if (3, 11) <= sys.version_info < (3, 15) else "!", "Python", platform.python_version()),
    ]
    try:
        version = metadata.version("torch")
        check_torch_version(version)
    except metadata.PackageNotFoundError:
        return [*rows, Fact("✗", "torch", "is not installed", "pip install torch")]
    except ImportError as error:
        return [*rows, Fact("✗", "torch", str(error))]
    return [*rows, Fact("✓", "torch", version), _core()]


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
    why = "torch has no CUDA" if torch.version.cuda is None else f"torch is for CUDA {torch.version.cuda}"
    if shutil.which("nvidia-smi"):
        return [Fact("!", "torch sees none", why, "the driver, which is there, may be too old for it")]
    return [Fact("·", "none", "training and generation run on the CPU")]


def _extras() -> list[Fact]:
    """Return the packages of the extras that the installed package declares."""
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


# ---- the self-test


def _self_test(seconds: float) -> int:
    """Train twice, and return the number of things that are wrong."""
    cores = len(os.sched_getaffinity(0))
    print(
        f"self-test: three steps of grpo_tiny.yaml, {'first with one thread, then with all' if cores > 1 else 'with one thread'}"
    )
    found: list[Exactness] = []
    for threads, name in ((1, "one thread"), (cores, f"{cores} threads"))[: 2 if cores > 1 else 1]:
        result = train_tiny(threads, seconds - sum(one.seconds for one in found))
        if result is None:
            return _out_of_time(name, seconds, is_first=not found)
        if isinstance(result, str):
            print(f"  ✗ {name}: {result}\n")
            return 1
        found.append(result)
        exact = result.steps == 3 and result.largest_gap == 0 and result.mismatched_tokens == 0
        print(
            f"  {'✓' if exact else '✗'} {name}: {result.steps} steps in {result.seconds:.1f} s, start included; largest "
            f"log-probability gap between trainer and generator {result.largest_gap:.3g}, tokens that differ {result.mismatched_tokens}"
        )
        if not exact:
            return 1
    if len(found) == 1:
        print("  · this process has one core: whether more threads give the same weights was not tested\n")
        return 0
    same = found[0].digests == found[1].digests
    print(f"  {'✓ the same' if same else '✗ other'} weights, bit for bit, with one thread and with all\n")
    return 0 if same else 1


def _out_of_time(name: str, seconds: float, is_first: bool) -> int:
    """Print that the time is over, and return 1 for one thread, which is enough to know whether the arithmetic is right."""
    print(
        f"  {'✗' if is_first else '!'} {name}: no end within the {seconds:g} s of the whole test. Where the machine is busy, give it"
    )
    print(
        "    more (--seconds 300); where it is not, threads wait for one another: fewer may be faster (OMP_NUM_THREADS)\n"
    )
    return 1 if is_first else 0


def train_tiny(threads: int, seconds: float) -> Exactness | str | None:
    """Train three steps in another process. Return a text about what went wrong, and None if there was not enough time."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="nemo_rl_doctor") as folder:
        command = [
            sys.executable, "-m", "nemo_rl_cpp.cli", "train", "--config", "grpo_tiny.yaml", "grpo.max_num_steps=3", "grpo.val_at_end=false",
            "checkpointing.enabled=false", "logger.log_dir=logs", "logger.report=false", "grpo.num_prompts_per_step=8",
            "policy.train_global_batch_size=64", "policy.train_micro_batch_size=64",
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=max(seconds, 1.0),
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return None
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            return f"it ended with status {done.returncode}: {lines[-1] if lines else 'without a word'}"
        return _read(folder, time.monotonic() - began)


def _read(folder: str, seconds: float) -> Exactness | str:
    with open(Path(folder) / "logs" / "exp_001" / "metrics.jsonl", encoding="utf-8") as file:
        rows = [row for row in json_rows(file) if "train/loss" in row]
    if not all("train/max_logprob_gap" in row and "train/logprob_mismatched_tokens" in row for row in rows):
        return "its metrics do not say whether trainer and generator agree"
    if not all(isinstance(row.get("train/weights/digest"), str) for row in rows):
        return "its metrics do not hold a digest of the weights after each step"
    return Exactness(
        steps=len(rows),
        largest_gap=max((float(str(row["train/max_logprob_gap"])) for row in rows), default=0.0),
        mismatched_tokens=sum(int(float(str(row["train/logprob_mismatched_tokens"]))) for row in rows),
        digests=[str(row["train/weights/digest"]) for row in rows],
        seconds=seconds,
    )
