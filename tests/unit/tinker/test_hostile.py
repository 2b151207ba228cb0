import json
import random
import socket
from collections.abc import Iterator

import torch
from test_robustness import PROTO, forward_backward, new_model, post, result
from test_sdk import datum
from tinker_server import KEY, serving

NASTY = [
    None, True, -1, 0, 3.5, 1 << 31, 1 << 63, 10**30, -(10**30), 1e308, "", "x" * 5000, "\0", "../../etc/passwd", "tinker://a/weights/b",
    [], {}, [[]], [None], {"a": {"b": []}}, -1e308, 1e-320, -5, 1024, 65536, [7] * 600, [-1, 1 << 40],
]  # fmt: skip


def templates(model: str, seq: int) -> dict[str, dict]:
    """Return a valid request body for each route."""
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
    """Return a copy of a body in which one value is missing or replaced."""
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
    """Return a forward_backward message with some bytes changed or cut off."""
    body = bytearray(forward_backward(model, seq, [datum([3, 4, 5, 6], 1), datum([7, 8, 9], 1)]))
    for _ in range(rng.randint(1, 6)):
        body[rng.randrange(len(body))] = rng.randrange(256)
    return bytes(body[: rng.randrange(len(body))] if rng.random() < 0.3 else body)


def leave(url: str, route: str, body: bytes, keep: int) -> None:
    """Begin a request, send `keep` bytes of its body, and disconnect without reading the response."""
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


def test_two_hundred_invalid_tinker_requests_do_not_change_other_models(tmp_path):
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
        assert len(asked) > 20 and len(failed) >= 5
        assert all(told["category"] == "user" for told in failed), [t for t in failed if t["category"] != "user"]
        assert post(url, "weights_info", {"tinker_path": "tinker://a/weights/b"})[0] == 422
        train(url, alone, iter(range(5, 9)))
        states = [service.models[model].state for model in (alone, among)]
        assert torch.equal(states[0].adapter, states[1].adapter) and states[0].optimizer_steps == 4
