"""vLLM's own server, where NEMO_RL_VLLM_PYTHON names an interpreter with vLLM: joined, brought weights, and killed."""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import time

import pytest
from nemo_rl_cpp.distributed.worker_calls import WorkerLostError
from nemo_rl_cpp.models.generation.vllm.server import VllmError, server_command
from paired_prompts import prompts, texts
from vllm_policies import FUSED, MIXTURE, MODEL, RECURRENT, change, engine_of, greedy_texts, policy_of

REAL = os.environ.get("NEMO_RL_VLLM_PYTHON")


@contextlib.contextmanager
def vllm_itself(policy, folder):
    """vLLM's own server, started by the command that a refusal prints, for a model of random weights."""
    (folder / "config.json").write_text(json.dumps(policy.saved_config()))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    vllm = policy.config.generation.vllm_cfg
    vllm.server_url = f"http://127.0.0.1:{port}"
    command = server_command(policy.config.model_copy(update={"model_name": str(folder)}))
    dev, path, _, *words = shlex.split(command)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= dict(each.split("=", 1) for each in (dev, path)) | {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"
    }  # fmt: skip
    words = [REAL, *words, "--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager"]
    with open(folder / "log.txt", "wb") as log:
        process = subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True, cwd=folder)
    try:
        began = time.monotonic()
        while True:
            assert process.poll() is None and time.monotonic() - began < 600, (folder / "log.txt").read_text()[-3000:]
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="NEMO_RL_VLLM_PYTHON names no interpreter with vLLM")
@pytest.mark.parametrize(
    ("model", "precision", "gap"),
    [(MODEL, "float32", 1e-5), (RECURRENT, "bfloat16", 0.05), (MIXTURE, "bfloat16", 0.1), (FUSED, "bfloat16", 0.1)],
    ids=["attention", "recurrent", "mixture", "fused"],
)
def test_real_vllm_server_receives_weights_generates_expected_texts_and_may_be_killed(tmp_path, model, precision, gap):
    tied = model != FUSED  # vLLM's Qwen3-Next does not tie weights
    policy = policy_of(tied, {"server_url": "http://127.0.0.1:1"}, model, precision)
    with vllm_itself(policy, tmp_path) as process:
        engine, data, seen = engine_of(policy), prompts(), []
        for version in (1, 2):
            change(policy, version)
            moved = engine.update_weights(policy.state_dict(), version)
            assert moved.digest == engine.weight_digest()
            seen.append(greedy_texts(engine, policy, data, gap))
        assert seen[0] != seen[1]
        fill = engine._transport.fill
        engine._transport.fill = lambda weights: fill(weights)[::-1]  # another digest than the memory's
        with pytest.raises(VllmError, match="the weights that arrived are not the trainer's"):
            engine.update_weights(policy.state_dict(), 3)
        engine._transport.fill = fill
        engine.update_weights(policy.state_dict(), 3)  # vLLM has gone on
        assert texts(engine.generate(data, greedy=True), data) == seen[1]
        began = time.monotonic()

        def killed(rows, ids):
            os.killpg(process.pid, signal.SIGKILL)

        lengths = {**data, "stop_strings": [["1"], *[None] * 11]}
        with pytest.raises(WorkerLostError, match="it was doing: generate"):
            for _ in range(50):
                engine.generate(lengths, on_finished=killed)
        assert time.monotonic() - began < 60
        engine.shutdown()
