"""Tinker's API: an RL step by HTTP compared with the same step in process, and eight tenants at once or one by one.

    uv run python tests/benchmarks/bench_tinker.py [--rounds 4] [--tenants 8] [--tenant-rounds 3] [--model FOLDER]

A step has the sizes of the quickstart: 8 samples for each of 16 prompts with three solved sums, at most 6 tokens, one
forward_backward, and one AdamW step, with LoRA of rank 8. By HTTP the client is Tinker's SDK, and the server is a
separate process. Both sides take the same step in turn, and sample the same tokens.

Tenants are clients in threads of one process. In a round each takes one step, and the two ways take turns. Memory is
the peak of a process; one tenant and all tenants have separate processes. Ratios are given as the median and the
quartiles of the rounds."""

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from harness import peak_mb, spread
from sides import in_new_process, options

GROUP, NEW_TOKENS, RANK = 8, 6, 8


def prompts(tokenizer: Callable[[str], dict], seed: int, count: int) -> list[list[int]]:
    """Return the tokens of sums with three solved examples."""
    draw, texts = random.Random(seed), []
    for _ in range(count):
        sums = [(draw.randint(0, 50), draw.randint(0, 50)) for _ in range(4)]
        solved = "".join(f"{a} + {b} = {a + b}\n" for a, b in sums[:3])
        texts.append(f"{solved}{sums[3][0]} + {sums[3][1]} =")
    return [tokenizer(text)["input_ids"] for text in texts]


def rl_step(client, questions: list[list[int]], seed: int) -> list[list[int]]:
    """Take one step with either client. Return the sampled tokens."""
    from tinker import types

    sampler = client.save_weights_and_get_sampling_client().result()
    how = types.SamplingParams(max_tokens=NEW_TOKENS, seed=seed, stop=["\n"])
    asked = [sampler.sample(types.ModelInput.from_ints(ids), GROUP, how) for ids in questions]
    data, answers = [], []
    for ids, request in zip(questions, asked):
        for number, sequence in enumerate(request.result().sequences):
            tokens, empty = ids + sequence.tokens, [0.0] * (len(ids) - 1)
            advantages = empty + [number / GROUP - 0.5] * len(sequence.tokens)
            inputs = {"target_tokens": tokens[1:], "logprobs": empty + sequence.logprobs, "advantages": advantages}
            data.append(types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs))
            answers.append(sequence.tokens)
    forward = client.forward_backward(data, "importance_sampling")
    client.optim_step(types.AdamParams(learning_rate=1e-4)).result()
    forward.result()
    return answers


def service(arguments: argparse.Namespace, folder: str):
    import nemo_rl_cpp
    import torch

    torch.set_num_threads(arguments.threads)
    return nemo_rl_cpp.ServiceClient(arguments.model, folder, cache_gb=0.5)


def overhead(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the seconds of a step by HTTP and in process, and the ratio of each pair."""
    import tinker

    with tempfile.TemporaryDirectory() as folder:
        words = ["serve", "--model", arguments.model, "--port", "0", "--kv-cache-gb", "0.5"]
        words += ["--threads", str(arguments.threads), "--tinker", f"{folder}/served"]
        start = "import sys; from nemo_rl_cpp.cli import main; sys.exit(main())"
        server = subprocess.Popen([sys.executable, "-c", start, *words], stdout=subprocess.PIPE, text=True)
        try:
            url = re.search(r"http://[\d.]+:\d+", server.stdout.readline())[0]
            remote = tinker.ServiceClient(base_url=url, api_key="tml-none")
            with service(arguments, f"{folder}/own") as local:
                sides = {
                    "http": remote.create_lora_training_client(arguments.model, rank=RANK, seed=1).result(),
                    "process": local.create_lora_training_client(rank=RANK, seed=1).result(),
                }
                tokenizer, answers = sides["process"].get_tokenizer(), {name: [] for name in sides}

                def step(name: str, number: int) -> None:
                    questions = prompts(tokenizer, number, arguments.prompts)
                    answers[name].append(rl_step(sides[name], questions, number))

                seconds = alternated({name: partial(step, name) for name in sides}, range(arguments.rounds + 1))
                assert answers["http"] == answers["process"]
        finally:
            server.terminate()
            server.wait()
    return {
        "http_over_process": spread([a / b for a, b in zip(seconds["http"], seconds["process"])]),
        **{f"{name}_s": round(statistics.median(values), 3) for name, values in seconds.items()},
    }


def alternated(sides: dict[str, Callable[[int], None]], rounds: range) -> dict[str, list[float]]:
    """Return the seconds of each side in each round. The sides alternate in going first; round 0 is a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in rounds:
        for name in sorted(sides, reverse=number % 2 == 1):
            begin = time.perf_counter()
            sides[name](number)
            taken = time.perf_counter() - begin
            print(f"round {number}, {name}: {taken:.2f} s", file=sys.stderr, flush=True)
            if number:
                seconds[name].append(taken)
    return seconds


def tenants(arguments: argparse.Namespace, count: int) -> tuple[dict[str, list[float]], float]:
    """Return the seconds of each round, and the peak memory of this process.

    The tenants step one after the other ("in turn") and all at once ("together")."""
    with tempfile.TemporaryDirectory() as folder, service(arguments, folder) as local:
        clients = [local.create_lora_training_client(rank=RANK, seed=n).result() for n in range(count)]

        def step(client, number: int) -> None:
            rl_step(client, prompts(client.get_tokenizer(), number, arguments.prompts), number)

        def together(number: int) -> None:
            threads = [threading.Thread(target=step, args=(client, number)) for client in clients]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        def in_turn(number: int) -> None:
            for client in clients:
                step(client, number)

        seconds: dict[str, list[float]] = {}
        step(clients[0], 0)
        if count == 1:
            step(clients[0], 1)
        else:
            rounds = range(1, arguments.tenant_rounds + 1)
            seconds = alternated({"in turn": in_turn, "together": together}, rounds)
    return seconds, peak_mb()


def main() -> None:
    arguments = options(
        __doc__, rounds={"type": int, "default": 4, "help": "of HTTP and in process"}, tenant_rounds=3, tenants=8, prompts=16,
        threads=2, model="smollm2-135m-instruct",
    )  # fmt: skip
    result = {"model": Path(arguments.model).name, "threads": arguments.threads, **overhead(arguments)}
    print(json.dumps(result), flush=True)
    _, one = in_new_process(tenants, arguments, 1)
    seconds, several = in_new_process(tenants, arguments, arguments.tenants)
    result |= {
        "tenants": arguments.tenants, "tenant_rounds": len(seconds["together"]),
        "throughput_together": spread([a / b for a, b in zip(seconds["in turn"], seconds["together"])]),
        "memory": round(several / one, 3), "peak_mb_of_one": round(one), "peak_mb_together": round(several),
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
