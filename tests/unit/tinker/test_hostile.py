"""Two hundred hostile or broken requests, clients that go away, and a server that is killed at twenty moments."""

import json
import multiprocessing
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path

import nemo_rl_cpp
import pytest
import torch
from nemo_rl_cpp.tinker.types import AdamParams, Datum
from test_robustness import PROTO, forward_backward, new_model, post, result
from test_sdk import datum
from tinker_server import KEY, make_model, serving

NASTY = [
    None, True, -1, 0, 3.5, 1 << 31, 1 << 63, 10**30, -(10**30), 1e308, "", "x" * 5000, "\0", "../../etc/passwd", "tinker://a/weights/b",
    [], {}, [[]], [None], {"a": {"b": []}}, -1e308, 1e-320, -5, 1024, 65536, [7] * 600, [-1, 1 << 40],
]  # fmt: skip


def templates(model: str, seq: int) -> dict[str, dict]:
    """A valid body for each route."""
    session = model.partition(":")[0]
    of_model = {"model_id": model, "seq_id": seq}
    sampled = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [3, 4, 5]}]}, "num_samples": 2, "seq_id": seq}
    return {
        "create_session": {"tags": [], "user_metadata": {"a": "b"}, "sdk_version": "0"},
        "session_heartbeat": {"session_id": session},
        "create_model": {"session_id": session, "model_seq_id": 7, "base_model": "tiny", "lora_config": {"rank": 2, "seed": 1}},
        "get_info": {"model_id": model},
        "optim_step": {**of_model, "adam_params": {"learning_rate": 1e-3, "beta1": 0.9, "grad_clip_norm": 1.0}},
        "save_weights": {**of_model, "path": "s", "overwrite": True, "ttl_seconds": 60, "user_metadata": {"a": "b"}},
        "save_weights_for_sampler": {**of_model, "path": "t", "ttl_seconds": 60},
        "load_weights": {**of_model, "path": f"tinker://{model}/weights/s", "optimizer": True},
        "create_sampling_session": {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"},
        "asample": {
            **sampled, "sampling_session_id": f"{session}:sample:0", "topk_sample_logprobs": 2, "prompt_logprobs": True,
            "sampling_params": {"max_tokens": 4, "temperature": 1.0, "top_k": 5, "top_p": 0.9, "seed": 1, "stop": ["a"]},
        },
        "retrieve_future": {"request_id": f"{model}:0"},
        "cancel_future": {"request_id": f"{model}:0"},
        "weights_info": {"tinker_path": f"tinker://{model}/weights/s"},
    }  # fmt: skip


def broken(body: dict, rng: random.Random) -> dict:
    """A copy of a body in which one value, somewhere inside, is missing or something else."""
    body = json.loads(json.dumps(body))
    holder, key = body, rng.choice(list(body))
    while isinstance(holder[key], (dict, list)) and holder[key] and rng.random() < 0.8:
        holder = holder[key]
        key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
    if rng.random() < 0.1:
        del holder[key]
    else:
        alike = [value for value in NASTY if type(value) is type(holder[key])]
        holder[key] = rng.choice(alike if alike and rng.random() < 0.7 else NASTY)
    return body


def broken_message(model: str, seq: int, rng: random.Random) -> bytes:
    """A forward_backward message with some bytes changed, or cut off."""
    body = bytearray(forward_backward(model, seq, [datum([3, 4, 5, 6], 1), datum([7, 8, 9], 1)]))
    for _ in range(rng.randint(1, 6)):
        body[rng.randrange(len(body))] = rng.randrange(256)
    return bytes(body[: rng.randrange(len(body))] if rng.random() < 0.3 else body)


def leave(url: str, route: str, body: bytes, keep: int) -> None:
    """Begin a request, send `keep` bytes of its body, and go away without reading an answer."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /api/v1/{route} HTTP/1.1\r\nhost: x\r\nx-api-key: {KEY}\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body[:keep])


def train(url: str, model: str, seqs: Iterator[int]) -> None:
    for _ in range(2):
        body = forward_backward(model, next(seqs), [datum([3, 4, 5, 6], 1)])
        post(url, "forward_backward", body, PROTO)
        step = {"model_id": model, "seq_id": next(seqs), "adam_params": {"learning_rate": 1e-2}}
        assert result(url, post(url, "optim_step", step)[1]["request_id"])["metrics"]


def test_two_hundred_invalid_tinker_requests_do_not_change_other_models(tmp_path: Path) -> None:
    rng = random.Random(0)
    with serving(tmp_path) as (url, service):
        service.worker.gap_seconds = 0.0
        alone, among, victim = (new_model(url, seed=3) for _ in range(3))
        train(url, alone, iter(range(1, 9)))
        seqs, asked = iter(range(1, 9)), []
        train(url, among, seqs)
        post(url, "create_sampling_session", templates(victim, 0)["create_sampling_session"])
        for number in range(200):
            seq = service.models[victim].next_seq
            route, body = rng.choice(list(templates(victim, seq).items()))
            if number % 10 == 0:
                raw = json.dumps(body).encode()
                leave(url, route, raw, rng.randrange(len(raw) + 1))
                continue
            if number % 10 in (1, 2):
                status, told = post(url, "forward_backward", broken_message(victim, seq, rng), PROTO)
            else:
                status, told = post(url, route, broken(body, rng))
            assert 200 <= status < 300 or 400 <= status < 500, (number, status, told)
            asked += [told["request_id"]] if "request_id" in told else []
        train(url, among, seqs)
        failed = [told for told in (result(url, request) for request in asked) if "error" in told]
        print(len(asked), len(failed))
        assert len(asked) > 20 and len(failed) >= 5
        assert all(told["category"] == "user" for told in failed), [t for t in failed if t["category"] != "user"]
        assert post(url, "weights_info", {"tinker_path": "tinker://a/weights/b"})[0] == 422
        train(url, alone, iter(range(5, 9)))
        states = [service.models[model].state for model in (alone, among)]
        assert torch.equal(states[0].adapter, states[1].adapter) and states[0].optimizer_steps == 4


# ---- kills

TOKENS = [3, 4, 5, 6, 7]


def expected_losses(folder: Path, steps: int) -> list[float]:
    """The loss before each step of a run that is never disturbed."""
    data = [Datum(TOKENS[:-1], {"target_tokens": TOKENS[1:], "weights": [1.0] * 4})]
    with nemo_rl_cpp.ServiceClient(folder / "model", folder / "own", precision="float32", cache_gb=0.05) as service:
        client, losses = service.create_lora_training_client(rank=2, seed=1).result(), []
        for _ in range(steps):
            losses.append(client.forward_backward(data, "cross_entropy").result().metrics["loss:sum"])
            client.optim_step(AdamParams(learning_rate=1e-3)).result()
    return losses


def serve(folder: Path, port: int) -> None:
    from nemo_rl_cpp.cli import main

    words = ["serve", "--model", str(folder / "model"), "--served-model-name", "tiny", "--precision", "float32"]
    os._exit(main([*words, "--kv-cache-gb", "0.05", "--port", str(port), "--tinker", str(folder / "saved")]))


class Victim:
    """A server in a process of its own, and a client that trains and saves until the server is gone."""

    def __init__(self, folder: Path, port: int, losses: list[float]) -> None:
        self.url, self.losses, self.saved = f"http://127.0.0.1:{port}", losses, {}
        self._start = lambda: multiprocessing.get_context("forkserver").Process(target=serve, args=(folder, port))

    def start(self) -> None:
        self.process = self._start()
        self.process.start()
        end = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(self.url.removeprefix("http://").split(":")).close()
                return
            except OSError:
                assert time.monotonic() < end and self.process.is_alive()
                time.sleep(0.01)

    def check(self) -> tuple[str, int]:
        """All that was acknowledged is there, and nothing else. Returns the newest path and its step."""
        listed = get(self.url, "checkpoints")["checkpoints"]
        steps = {each["tinker_path"]: int(each["user_metadata"]["step"]) for each in listed}
        for path, step in self.saved.items():
            assert steps[path] == step or (path.endswith("latest") and steps[path] == step + 1)
        return max(steps.items(), key=lambda item: item[1])

    def train(self, path: str | None, step: int, saves: Callable[[], None]) -> None:
        """Go on from a checkpoint until a request fails. `saves` is called before the first save."""
        session = post(self.url, "create_session", {"tags": [], "user_metadata": None, "sdk_version": "0"})[1]
        of_model = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": "tiny"}
        if path is None:
            made = self.ask("create_model", {**of_model, "lora_config": {"rank": 2, "seed": 1}})
        else:
            made = self.ask("load_weights", {**of_model, "path": path, "optimizer": True})
        model, seq = made["model_id"], 1
        while True:
            forward = self.ask("forward_backward", forward_backward(model, seq, [datum(TOKENS, 1)]), PROTO)
            assert forward["loss"] == self.losses[step]
            self.ask("optim_step", {"model_id": model, "seq_id": seq + 1, "adam_params": {"learning_rate": 1e-3}})
            step += 1
            saves()
            for number, name in enumerate(("latest", f"step-{step}")):
                save = {"model_id": model, "seq_id": seq + 2 + number, "path": name, "overwrite": True}
                save |= {"user_metadata": {"step": str(step)}}
                self.saved[self.ask("save_weights", save)["path"]] = step
            seq += 4

    def ask(self, route: str, body: dict | bytes, content_type: str = "application/json") -> dict:
        """The result of a request. Raises OSError, HTTPException or ValueError if the server is gone."""
        told = result(self.url, post(self.url, route, body, content_type)[1]["request_id"])
        assert "error" not in told and "detail" not in told, told
        return told


def get(url: str, route: str) -> dict:
    from urllib.request import Request, urlopen

    with urlopen(Request(f"{url}/api/v1/{route}", headers={"x-api-key": KEY}), timeout=60) as answer:
        return json.loads(answer.read())


@pytest.mark.slow
def test_tinker_server_killed_twenty_times_loses_no_saved_checkpoint(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    rng, losses = random.Random(1), expected_losses(tmp_path, 400)
    multiprocessing.get_context("forkserver").set_forkserver_preload(["nemo_rl_cpp.tinker.app"])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    victim = Victim(tmp_path, port, losses)
    try:
        for _ in range(20):
            kill_once(victim, rng.uniform(0.0, 0.15))
        victim.start()
        assert victim.check()[1] > 0
        children = Path(f"/proc/{victim.process.pid}/task/{victim.process.pid}/children").read_text()
        victim.process.terminate()
        victim.process.join(20)
        assert victim.process.exitcode == 0 and not children
    finally:
        victim.process.kill()


def kill_once(victim: Victim, seconds: float) -> None:
    """Start the server, go on from the newest checkpoint, and kill it so many seconds after the first save begins."""
    victim.start()
    path, step = victim.check() if victim.saved else (None, 0)
    clock = threading.Timer(seconds, victim.process.kill)
    with pytest.raises((OSError, HTTPException, ValueError)):
        victim.train(path, step, lambda: None if clock.is_alive() or clock.finished.is_set() else clock.start())
    clock.join()
    victim.process.join(20)
    assert victim.process.exitcode == -signal.SIGKILL
