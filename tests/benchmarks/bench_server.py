"""Our server beside vLLM's own, under one load: requests and tokens a second, and how long an answer takes.

    uv run python tests/benchmarks/bench_server.py [--requests 256] [--clients 64] [--max-tokens 64] [--rounds 2] [--vllm-python PATH]

Each server runs alone, in a process of its own; they take turns, and each turn starts a new process, whose first requests do not count.
The load is the official `openai` client's, in this process, with the same prompts in the same order for both. No answer ends early.
`--vllm-python` (or the variable NEMO_RL_VLLM_PYTHON) is an interpreter with vLLM; without it uv makes an environment. Needs the extra
`[serve]` and the package openai.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
from bench_generation_engines import environment_of
from openai import AsyncOpenAI

WORDS = "the answer is plus minus twelve thirty hello there where what day fine of a in to and it not".split()
WARM_UP = 32
START_SECONDS = 600.0


@dataclass
class Load:
    """What a turn came to: seconds of the whole, and of each answer; tokens of all answers."""

    seconds: float
    answers: list[float]
    tokens: int

    @property
    def requests_per_second(self) -> float:
        return len(self.answers) / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def row(self, side: str) -> dict[str, object]:
        """For the table."""
        ranks = statistics.quantiles(self.answers, n=100) if len(self.answers) > 1 else self.answers * 99
        return {
            "side": side, "requests_s": round(self.requests_per_second, 2), "tokens_s": round(self.tokens_per_second, 1),
            "median_s": round(statistics.median(self.answers), 3), "p99_s": round(ranks[98], 3), "seconds": round(self.seconds, 2),
        }  # fmt: skip


def prompts(count: int, seed: int) -> list[str]:
    """`count` prompts of 10 to 60 words, no two alike."""
    draw = random.Random(seed)
    return [f"{i}: " + " ".join(draw.choices(WORDS, k=draw.randint(10, 60))) for i in range(count)]


async def load(url: str, texts: list[str], arguments: argparse.Namespace) -> Load:
    """Every client asks as soon as it has its answer, until all prompts are asked."""
    left, seconds, tokens = iter(texts), [], 0
    beside = {"ignore_eos": True} | ({} if arguments.temperature == 0 else {"top_k": -1})

    async def client_of_many(client: AsyncOpenAI) -> None:
        nonlocal tokens
        for text in left:
            start = time.perf_counter()
            given = {
                "model": "served",
                "prompt": text,
                "max_tokens": arguments.max_tokens,
                "temperature": arguments.temperature,
            }
            if arguments.stream:
                made, beside_usage = 0, {"include_usage": True}
                async for part in await client.completions.create(
                    **given, stream=True, stream_options=beside_usage, extra_body=beside
                ):
                    made = part.usage.completion_tokens if part.usage else made
            else:
                made = (await client.completions.create(**given, extra_body=beside)).usage.completion_tokens
            seconds.append(time.perf_counter() - start)
            if made != arguments.max_tokens:
                raise SystemExit(f"{url} gave {made} tokens, and {arguments.max_tokens} were asked for")
            tokens += made

    start = time.perf_counter()
    async with contextlib.AsyncExitStack() as clients:
        options = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "timeout": 600}
        all_of_them = [await clients.enter_async_context(AsyncOpenAI(**options)) for _ in range(arguments.clients)]
        start = time.perf_counter()
        await asyncio.gather(*map(client_of_many, all_of_them))
        took = time.perf_counter() - start
    return Load(took, seconds, tokens)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def command_of(side: str, model: str, port: int, arguments: argparse.Namespace) -> list[str]:
    """What starts a server."""
    if side == "ours":
        return [
            sys.executable, "-m", "nemo_rl_cpp.cli", "serve", "--model", model, "--served-model-name", "served", "--port", str(port),
            "--precision", arguments.precision, "--threads", str(arguments.threads), "--max-batch-size", str(arguments.clients),
            "--max-model-len", str(arguments.max_model_len), "--kv-cache-gb", "2",
        ]  # fmt: skip
    words = [
        arguments.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "served", "--port", str(port),
        "--dtype", arguments.precision, "--max-num-seqs", str(arguments.clients), "--max-model-len", str(arguments.max_model_len),
        "--generation-config", "vllm", "--disable-uvicorn-access-log",
    ]  # fmt: skip
    return words if arguments.compiled else [*words, "--enforce-eager"]


@contextlib.contextmanager
def running(side: str, model: str, arguments: argparse.Namespace, log: Path):
    """A server that answers; it and what it started are gone afterwards."""
    port = free_port()
    url, environment = f"http://127.0.0.1:{port}", dict(os.environ)
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(arguments.threads)}
    if side == "vllm":
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": arguments.bind, "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"
        }  # fmt: skip
        for name in ("PYTHONPATH", "VIRTUAL_ENV"):
            environment.pop(name, None)
    start = time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen(
            command_of(side, model, port, arguments), stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True, cwd=log.parent
        )  # fmt: skip
        try:
            while time.perf_counter() - start < START_SECONDS:
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                        break
                if process.poll() is not None:
                    raise SystemExit(f"{side} ended:\n{log.read_text()[-3000:]}")
                time.sleep(0.2)
            yield url, time.perf_counter() - start
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait(30)


def turn(side: str, model: str, texts: list[str], arguments: argparse.Namespace, log: Path) -> Load:
    """One server, alone."""
    with running(side, model, arguments, log) as (url, startup):
        asyncio.run(load(url, prompts(WARM_UP, 0), arguments))
        found = asyncio.run(load(url, texts, arguments))
    print({**found.row(side), "ready_after_s": round(startup, 1)}, flush=True)
    return found


def machine() -> dict[str, object]:
    """What ran it, and how busy others kept it."""
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return {
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "torch": torch.__version__,
    }


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the servers, too
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--compiled", action="store_true", help="vLLM compiles the model first")
    parser.add_argument("--bind", default="nobind", help="VLLM_CPU_OMP_THREADS_BIND")
    parser.add_argument("--sides", nargs="+", default=["ours", "vllm"], choices=["ours", "vllm"])
    parser.add_argument("--vllm-python", default=os.environ.get("NEMO_RL_VLLM_PYTHON"))
    arguments = parser.parse_args()
    from nemo_rl_cpp.hub.sources import resolve_model

    model, texts = str(resolve_model("smollm2-135m-instruct")), prompts(arguments.requests, 1)
    about = machine() | {"options": {name: value for name, value in vars(arguments).items() if name != "vllm_python"}}
    print(about, flush=True)
    found: dict[str, list[Load]] = {side: [] for side in arguments.sides}
    with tempfile.TemporaryDirectory() as folder:
        if "vllm" in arguments.sides and not arguments.vllm_python:
            arguments.vllm_python = environment_of("vllm", Path(folder))
        for _ in range(arguments.rounds):
            for side in arguments.sides:
                found[side].append(turn(side, model, texts, arguments, Path(folder, f"{side}.log")))
    rows = [each.row(side) for side, loads in found.items() for each in loads]
    result = about | {"rows": rows, "load_after": os.getloadavg()[0]}
    if set(found) >= {"ours", "vllm"}:
        ratios = [a.tokens_per_second / b.tokens_per_second for a, b in zip(found["ours"], found["vllm"], strict=True)]
        result["ours_by_vllm"] = [round(of(ratios), 2) for of in (min, statistics.median, max)]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
