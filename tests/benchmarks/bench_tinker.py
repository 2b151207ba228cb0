"""Tinker's API: an RL step by HTTP against the same step in process, and eight tenants against one after the other.

    uv run python tests/benchmarks/bench_tinker.py [--rounds 5] [--steps 3] [--tenants 8] [--model smollm2-135m-instruct]

A step has the sizes of the quickstart: 8 samples to each of 16 prompts of three solved sums, 6 tokens at most, one forward_backward and one
step of AdamW, LoRA of rank 8. By HTTP the client is Tinker's SDK, and the server a process of its own. Both sides do the same step in turn,
and sample the same tokens. Tenants are clients in threads of one process. Memory is a process's peak, in processes of their own.
"""

import argparse
import json
import multiprocessing
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from harness import peak_mb

PROMPTS, GROUP, NEW_TOKENS, RANK = 16, 8, 6, 8


def prompts(tokenizer: Callable[[str], dict], seed: int) -> list[list[int]]:
    """Tokens of sums with three solved examples."""
    draw, texts = random.Random(seed), []
    for _ in range(PROMPTS):
        sums = [(draw.randint(0, 50), draw.randint(0, 50)) for _ in range(4)]
        solved = "".join(f"{a} + {b} = {a + b}\n" for a, b in sums[:3])
        texts.append(f"{solved}{sums[3][0]} + {sums[3][1]} =")
    return [tokenizer(text)["input_ids"] for text in texts]


def rl_step(client, questions: list[list[int]], seed: int) -> list[list[int]]:
    """One step with either client. Returns the sampled tokens."""
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
    """Seconds of a step by HTTP and in process, and the ratio of each pair."""
    import tinker

    with tempfile.TemporaryDirectory() as folder:
        words = [
            "serve",
            "--model",
            arguments.model,
            "--port",
            "0",
            "--kv-cache-gb",
            "0.5",
            "--threads",
            str(arguments.threads),
        ]
        start = "import sys; from nemo_rl_cpp.cli import main; sys.exit(main())"
        line = [sys.executable, "-c", start, *words, "--tinker", f"{folder}/served"]
        server = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
        try:
            url = re.search(r"http://[\d.]+:\d+", server.stdout.readline())[0]
            remote = tinker.ServiceClient(base_url=url, api_key="tml-none")
            with service(arguments, f"{folder}/own") as local:
                sides = {
                    "http": remote.create_lora_training_client(arguments.model, rank=RANK, seed=1).result(),
                    "process": local.create_lora_training_client(rank=RANK, seed=1).result(),
                }
                tokenizer, seconds = sides["process"].get_tokenizer(), {name: [] for name in sides}
                for number in range(arguments.rounds + 1):
                    questions, answers = prompts(tokenizer, number), []
                    order = list(sides) if number % 2 else list(reversed(sides))
                    for name in order:
                        begin = time.perf_counter()
                        answers.append(rl_step(sides[name], questions, number))
                        taken = time.perf_counter() - begin
                        print(f"{name} {number}: {taken:.2f} s", file=sys.stderr, flush=True)
                        if number:  # the first warms up
                            seconds[name].append(taken)
                    assert answers[0] == answers[1]
        finally:
            server.terminate()
            server.wait()
    ratios = [a / b for a, b in zip(seconds["http"], seconds["process"])]
    return {
        "http_over_process": [round(f(ratios), 3) for f in (statistics.median, min, max)],
        **{f"{name}_s": round(statistics.median(values), 3) for name, values in seconds.items()},
    }


def tenants(connection: Connection, arguments: argparse.Namespace, count: int) -> None:
    """In a process: seconds of each round, one tenant after the other and all at once, and the peak memory."""
    with tempfile.TemporaryDirectory() as folder, service(arguments, folder) as local:
        clients = [local.create_lora_training_client(rank=RANK, seed=n).result() for n in range(count)]
        questions = [prompts(clients[0].get_tokenizer(), number) for number in range(arguments.steps)]

        def run(client) -> None:
            for step, asked in enumerate(questions):
                rl_step(client, asked, step)

        def together() -> None:
            threads = [threading.Thread(target=run, args=(client,)) for client in clients]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        def alternately() -> None:
            for client in clients:
                run(client)

        seconds = {"together": [], "alternately": []}
        rl_step(clients[0], questions[0], 0)
        for _ in range(arguments.rounds if count > 1 else 1):
            for name, side in (("together", together), ("alternately", alternately)):
                begin = time.perf_counter()
                side()
                seconds[name].append(time.perf_counter() - begin)
    connection.send((seconds, peak_mb()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--only", choices=["overhead", "tenants"])
    arguments = parser.parse_args()
    result: dict[str, object] = {"model": Path(arguments.model).name, "threads": arguments.threads}
    if arguments.only != "tenants":
        result |= overhead(arguments)
        print(json.dumps(result), flush=True)
    if arguments.only != "overhead":
        context, found = multiprocessing.get_context("spawn"), []
        for count in (1, arguments.tenants):
            end, theirs = context.Pipe()
            process = context.Process(target=tenants, args=(theirs, arguments, count))
            process.start()
            found.append(end.recv())
            process.join()
        (_, one), (seconds, several) = found
        ratios = [a / b for a, b in zip(seconds["alternately"], seconds["together"])]
        result |= {
            "tenants": arguments.tenants, "throughput_together": [round(f(ratios), 3) for f in (statistics.median, min, max)],
            "memory": round(several / one, 3), "peak_mb_of_one": round(one), "peak_mb_together": round(several),
        }  # fmt: skip
        print(json.dumps(result))


if __name__ == "__main__":
    main()
