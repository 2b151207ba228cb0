"""Common parts of the benchmarks of single ops: sides that take turns in one run, the machine's limits, a table and
JSON."""

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
from sides import memory_of, options


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

    def minus(self, other: "Times", parts: int) -> "Times":
        """Return the time of one of the `parts` equal parts that this side has more than `other`."""
        return Times(*((value - other.median) / parts for value in (self.median, self.low, self.high)))

    def __str__(self) -> str:
        return f"{self.median * 1e3:10.3f} ms  [{self.low * 1e3:.3f}, {self.high * 1e3:.3f}]"


def spread(ratios: list[float]) -> list[float]:
    """Return median and quartiles."""
    low, median, high = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
    return [round(ratio, 3) for ratio in (median, low, high)]


def peak_mb() -> float:
    """Return this process's peak memory in MB."""
    return memory_of("VmHWM") / 2**20


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


def smollm2() -> str:
    """Return the folder of SmolLM2-135M-Instruct."""
    from nemo_rl_cpp.hub.sources import resolve_model

    return str(resolve_model("smollm2-135m-instruct"))


def load_decoder(folder: str, precision: str, trainable: bool, quantization: str | None = None):
    """Return (model, its native configuration), with the weights in `folder`."""
    from dataclasses import replace

    from nemo_rl_cpp.models.model_folder import read_model_folder
    from nemo_rl_cpp.models.weights import load_weights

    config = replace(read_model_folder(Path(folder)), quantization=quantization).native()
    model = C.DecoderModel(config, getattr(torch, precision), trainable)
    load_weights(model, folder)
    return model, config


PROMPT, NEW = 40, 64


def native_generation(folder: str, precision: str, new: int = NEW):
    """Return a function that samples `new` tokens for each of its prompts [B, PROMPT], and returns their number.

    `precision` may be a format of `policy.quantization`.
    """
    from nemo_rl_cpp.config.policy import PolicyConfig
    from nemo_rl_cpp.data.tokenizer import Tokenizer
    from nemo_rl_cpp.models.generation.native import NativeGeneration, native_runner
    from nemo_rl_cpp.models.policy.lm_policy import Policy

    quantised = precision in ("q8_0", "q4_0")
    kind = {"precision": precision}
    if quantised:
        kind = {"precision": "bfloat16", "quantization": precision, "dtensor_cfg": {"lora_cfg": {"enabled": True}}}
    config = PolicyConfig(model_name=folder, max_total_sequence_length=PROMPT + NEW,
                          generation={"max_new_tokens": new, "stop_token_ids": []}, **kind)  # fmt: skip
    config.fill_defaults()
    tokenizer = Tokenizer.from_pretrained(folder)
    policy = Policy(None, config, tokenizer, init_reference_model=False)
    generation = policy.create_generation()
    if quantised:  # the base alone, as peers compute it
        runner = native_runner(policy.model.base(), config.generation)
        generation = NativeGeneration(runner, config.generation, tokenizer, max_model_len=PROMPT + NEW)

    def run(ids: torch.Tensor) -> int:
        out = generation.generate({"input_ids": ids, "input_lengths": torch.full((len(ids),), PROMPT)})
        return int(out["generation_lengths"].sum())

    return run


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
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), platform.machine())
        return {
            "device": torch.cuda.get_device_name() if self.on_gpu else "cpu", "cpu": cpu, "capability": C.cpu_capability(),
            "threads": torch.get_num_threads(), "torch": torch.__version__, "python": platform.python_version(),
            "repeats": self.args.repeats,
        }  # fmt: skip

    def add(self, what: str, side: str, times: Times, **figures: float) -> None:
        self.rows.append(
            {"what": what, "side": side, "median_s": times.median, "low_s": times.low, "high_s": times.high, **figures}
        )
        notes = "  ".join(f"{name} {value:.3g}" for name, value in figures.items())
        print(f"{what:34} {side:28} {times}  {notes}", flush=True)

    def compare(self, what: str, times: dict[str, Times], limit: float) -> None:
        """Add a row for each side: a peer's ratio to the side "ours", and the share of ours of `limit`, in seconds."""
        mine = times["ours"].median
        for side, own in times.items():
            if side != "ours":
                self.add(what, side, own, ratio=own.median / mine)
            else:
                self.add(what, side, own, of_limit=limit / mine, limit_ms=limit * 1e3)

    def finish(self) -> None:
        if self.args.json:
            Path(self.args.json).write_text(json.dumps({**self.header, "rows": self.rows}, indent=1) + "\n")


def begin(description: str, repeats: int = 15, device: str = "cpu", **more: object) -> Report:
    """Read --threads, --repeats, --json, --device and `more` (as in `sides.options`), and print the header."""
    threads = torch.get_num_threads()
    args = options(description, threads=threads, repeats=repeats, json={}, device=device, **more)
    torch.set_num_threads(args.threads)
    report = Report(args)
    print(report.header)
    print(f"{'what':34} {'side':28} {'median':>13}  [quartiles]  figures")
    return report
