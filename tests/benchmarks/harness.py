"""Common parts of the benchmarks of single ops: sides that take turns in one run, the machine's limits, a table and
JSON.
"""

import argparse
import ctypes
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from nemo_rl_cpp._native import C


@dataclass(frozen=True)
class Times:
    """The seconds of one side: median and quartiles."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(seconds: list[float]) -> "Times":
        quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
        return Times(statistics.median(seconds), quartiles[0], quartiles[2])

    def __str__(self) -> str:
        return f"{self.median * 1e3:10.3f} ms  [{self.low * 1e3:.3f}, {self.high * 1e3:.3f}]"


def spread(ratios: list[float]) -> list[float]:
    """Return median and quartiles."""
    low, median, high = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
    return [round(ratio, 3) for ratio in (median, low, high)]


def peak_mb() -> float:
    """Return this process's peak memory in MB (ru_maxrss would include the parent's)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def wait_for_device() -> None:
    """Wait until the GPU has finished all launched work, if a GPU is used."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def alternate(sides: dict[str, Callable[[], object]], repeats: int, warmup: int = 2) -> dict[str, Times]:
    """Run every side in turn, `repeats` times, and return the times."""
    for side in sides.values():
        for _ in range(warmup):
            side()
    wait_for_device()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            wait_for_device()
            seconds[name].append(time.perf_counter() - start)
    return {name: Times.of(values) for name, values in seconds.items()}


def tune_malloc() -> None:
    """Make glibc keep large blocks. Otherwise it returns them to the system, and each new tensor costs page faults."""
    libc = ctypes.CDLL(None)
    m_trim_threshold, m_mmap_threshold = -1, -3
    libc.mallopt(m_mmap_threshold, 1 << 30)
    libc.mallopt(m_trim_threshold, (1 << 31) - 1)


def copy_bandwidth(device: str = "cpu", megabytes: int = 256) -> float:
    """Return the bytes per second, read plus written, of a copy that fits in no cache."""
    source = torch.ones(megabytes * 2**18 * (1 if device == "cpu" else 8), device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / alternate({"copy": lambda: target.copy_(source)}, 7)["copy"].median


@dataclass
class Report:
    """A collection of rows. Each row is printed when it is added, and all rows are written at the end."""

    args: argparse.Namespace
    rows: list[dict] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        return self.args.device != "cpu"

    @property
    def header(self) -> dict:
        cpu = next(
            (
                line.split(":", 1)[1].strip()
                for line in Path("/proc/cpuinfo").read_text().splitlines()
                if "model name" in line
            ),
            platform.machine(),
        )
        return {"device": torch.cuda.get_device_name() if self.on_gpu else "cpu", "cpu": cpu, "capability": C.cpu_capability(), "threads": torch.get_num_threads(), "torch": torch.__version__,
                "python": platform.python_version(), "repeats": self.args.repeats}  # fmt: skip

    def add(self, what: str, side: str, times: Times, **figures: float) -> None:
        self.rows.append(
            {"what": what, "side": side, "median_s": times.median, "low_s": times.low, "high_s": times.high, **figures}
        )
        notes = "  ".join(f"{name} {value:.3g}" for name, value in figures.items())
        print(f"{what:34} {side:28} {times}  {notes}", flush=True)

    def finish(self) -> None:
        if self.args.json:
            Path(self.args.json).write_text(json.dumps({**self.header, "rows": self.rows}, indent=1) + "\n")


def begin(description: str, repeats: int = 15, device: str = "cpu", **options: dict) -> Report:
    """Read --threads, --repeats, --json, --device and `options` (name: arguments of add_argument), and print the
    header.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--json")
    parser.add_argument("--device", default=device)
    for name, settings in options.items():
        parser.add_argument(f"--{name}", **settings)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    report = Report(args)
    print(report.header)
    print(f"{'what':34} {'side':28} {'median':>13}  [quartiles]  figures")
    return report
