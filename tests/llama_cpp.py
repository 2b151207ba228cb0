"""Runs llama.cpp on GGUF files in a separate process, because llama.cpp itself writes to stdout and stderr.

`answers(jobs)` runs the jobs. As a script, this file reads jobs from stdin and writes the results to the file that its
argument names."""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any


def answers(jobs: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Run the jobs {"file", "prompt" (ids), "texts"}. Return for each {"ids", "logprobs"} of the greedy continuation,
    the "count" of its tokens, and the "tokens" of each text."""
    out = folder / "llama_cpp.json"
    done = subprocess.run(
        [sys.executable, __file__, str(out)], input=json.dumps(jobs), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(out.read_text())


def answer(job: dict[str, Any]) -> dict[str, Any]:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = job["file"], 256, 1, False
    params.cpuparams.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    # flash attention computes in half precision
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    asked = {"n_predict": job.get("count", 16), "temperature": 0.0, "n_probs": 1, "cache_prompt": False}
    done = server.handle_completions({"prompt": job["prompt"], **asked})
    given = done["choices"][0]["logprobs"]["content"] if "choices" in done else done["completion_probabilities"]
    return {
        "ids": [each["id"] for each in given],
        "logprobs": [each["logprob"] for each in given],
        "count": done["usage"]["completion_tokens"] if "usage" in done else done["tokens_predicted"],
        "tokens": [tokens(server.listening_address, text) for text in job.get("texts", ())],
    }


def tokens(address: str, text: str) -> list[int]:
    body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
    request = urllib.request.Request(f"{address}/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)["tokens"]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps([answer(job) for job in json.load(sys.stdin)]))
