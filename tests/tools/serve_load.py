"""A load on `nemo-rl-cpp serve` by the official OpenAI client: every answer is compared with the library's.

    python tests/tools/serve_load.py --model FOLDER [--requests 1000] [--clients 64] [--hostile 200]

Prints requests and tokens a second, the wrong answers (exit status 1 if there are any), and what the server says of its health after
hostile requests. Greedy and seeded requests, streams and whole answers take turns.
"""

import argparse
import asyncio
import json
import random
import re
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

import httpx
from nemo_rl_cpp.generate import TextGenerator
from openai import AsyncOpenAI

WORDS = "the answer is plus minus twelve thirty hello there where what day fine of a in to and it not".split()


@dataclass
class Ask:
    """A request, and the text that the library gives."""

    prompt: str
    max_tokens: int
    seed: int
    greedy: bool
    stream: bool
    expected: str = ""


def make_asks(count: int, library: TextGenerator, longest: int, distinct: int) -> list[Ask]:
    """`count` requests, of which `distinct` differ; the library answers each once."""
    draw = random.Random(1)
    asks = []
    for i in range(distinct):
        prompt = " ".join(draw.choices(WORDS, k=draw.randint(3, 60)))
        asks.append(Ask(prompt, draw.randint(1, longest), i, i % 2 == 0, i % 3 == 0))
    for ask in asks:
        ask.expected = library.generate(
            ask.prompt, max_new_tokens=ask.max_tokens, temperature=0 if ask.greedy else 1, seed=ask.seed
        ).text
    return [asks[i % distinct] for i in range(count)]


async def one(client: AsyncOpenAI, ask: Ask) -> str:
    """The server's text."""
    given = {
        "model": "served", "prompt": ask.prompt, "max_tokens": ask.max_tokens, "temperature": 0 if ask.greedy else 1, "seed": ask.seed
    }  # fmt: skip
    if not ask.stream:
        return (await client.completions.create(**given)).choices[0].text
    pieces = [part.choices[0].text async for part in await client.completions.create(**given, stream=True)]
    return "".join(pieces)


async def load(url: str, asks: list[Ask], clients: int) -> tuple[int, float]:
    """(wrong answers, seconds)."""
    left, wrong = iter(asks), 0

    async def worker() -> None:
        nonlocal wrong
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=600) as client:
            for ask in left:
                text = await one(client, ask)
                if text != ask.expected:
                    wrong += 1
                    print(f"wrong: {ask} gave {text!r}")

    start = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(clients)))
    return wrong, time.perf_counter() - start


def hostile(host: str, port: int, count: int) -> dict[str, int]:
    """Huge, malformed, slow and cut-off requests; how many got which status (cut: none)."""
    draw, seen = random.Random(2), {}
    good = json.dumps({"prompt": "hello", "max_tokens": 4000, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    for i in range(count):
        kind = i % 8
        body = [
            b"x" * draw.randint(1, 20_000_000), bytes(draw.randbytes(500)), good, good[:-10], b"[" * 50_000,
            json.dumps({"prompt": "a " * 200_000}).encode(), json.dumps({"prompt": [10**9], "max_tokens": -1}).encode(), b"",
        ][kind]  # fmt: skip
        claimed = len(body) + (100 if kind in (3, 7) else 0)
        answer = b""
        with socket.create_connection((host, port), timeout=30) as raw:
            try:
                raw.sendall(
                    head + b"content-length: %d\r\n\r\n" % claimed + body if i % 16 != 7 else draw.randbytes(300)
                )
                if kind not in (2, 3, 7):  # the others go away at once
                    answer = raw.recv(64)
            except OSError:
                pass
        found = re.match(rb"HTTP/1.1 (\d+)", answer)
        status = found[1].decode() if found else "cut"
        seen[status] = seen.get(status, 0) + 1
    return seen


def main() -> int:
    """Runs the load; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--distinct", type=int, default=100)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--hostile", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--precision", default="float32")
    given = parser.parse_args()
    library = TextGenerator(given.model, precision=given.precision)
    asks = make_asks(given.requests, library, given.max_tokens, given.distinct)
    del library
    command = [
        sys.executable,
        "-m",
        "nemo_rl_cpp.cli",
        "serve",
        "--model",
        given.model,
        "--served-model-name",
        "served",
        "--port",
        "0",
    ]
    process = subprocess.Popen([*command, "--precision", given.precision], stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        print(line.strip())
        url = re.search(r"http://[^/]+", line)[0]
        wrong, seconds = asyncio.run(load(f"{url}/v1", asks, given.clients))
        tokens = httpx.get(f"{url}/health").json()["generated_tokens"]
        print(
            f"{given.requests} requests by {given.clients} clients: {wrong} wrong; {seconds:.1f} s, {given.requests / seconds:.1f} requests/s, "
            f"{tokens / seconds:.0f} tokens/s"
        )
        host, port = url.removeprefix("http://").split(":")
        print(f"{given.hostile} hostile requests:", hostile(host, int(port), given.hostile))
        again, _ = asyncio.run(load(f"{url}/v1", asks[: given.clients], given.clients))
        health = httpx.get(f"{url}/health").json()
        print(f"after them: {again} wrong;", health)
        return int(wrong + again > 0 or health["cache_blocks_used"] > 0 or health["answers_under_way"] > 0)
    finally:
        process.terminate()
        process.wait(30)


if __name__ == "__main__":
    sys.exit(main())
