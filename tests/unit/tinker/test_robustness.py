import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import tinker
from nemo_rl_cpp.tinker import app
from nemo_rl_cpp.tinker.app import make_app
from starlette.testclient import TestClient
from test_sdk import ADAM, datum
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker_server import KEY, make_model, serving

PROTO = "application/x-protobuf"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("tinker")) as found:
        yield found


def post(url: str, route: str, body: object, content_type: str = "application/json") -> tuple[int, dict]:
    """Send a request without the SDK, and return (status, response body)."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": content_type, "x-api-key": KEY}
    answer = httpx.post(f"{url}/api/v1/{route}", content=data, headers=headers, timeout=60)
    is_json = answer.headers.get("content-type") == "application/json"  # no test reads a result in protobuf
    return answer.status_code, answer.json() if is_json else {}


def result(url: str, request_id: str) -> dict:
    return post(url, "retrieve_future", {"request_id": request_id})[1]


def forward_backward(
    model: str, seq: int, data: list[types.Datum], loss: str = "cross_entropy", **config: float
) -> bytes:
    inner = types.ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=config or None)
    request = types.ForwardBackwardRequest(forward_backward_input=inner, model_id=model, seq_id=seq)
    return forward_backward_request_to_proto(request).SerializeToString()


def new_model(url: str, **lora: object) -> str:
    session = post(url, "create_session", {"tags": [], "user_metadata": None, "sdk_version": "0"})[1]["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2, **lora}}
    return post(url, "create_model", body)[1]["request_id"].removesuffix(":0")


def test_duplicate_tinker_request_runs_once_and_waits_for_the_preceding_request(served):
    url, service = served
    model = new_model(url)
    step = {"model_id": model, "adam_params": {"learning_rate": 0.1}}
    early = post(url, "optim_step", step | {"seq_id": 2})[1]["request_id"]
    body = forward_backward(model, 1, [datum([3, 4, 5], 1)])
    assert post(url, "forward_backward", body, PROTO) == post(url, "forward_backward", body, PROTO)
    assert result(url, early)["metrics"]["unclipped_grad_l2:mean"] > 0
    assert post(url, "optim_step", step | {"seq_id": 2})[1]["request_id"] == early
    result(url, post(url, "optim_step", step | {"seq_id": 3})[1]["request_id"])
    assert service.models[model].state.optimizer_steps == 2


def test_tinker_request_is_an_error_if_the_preceding_request_never_arrives(served, monkeypatch):
    url, service = served
    monkeypatch.setattr(service.worker, "gap_seconds", 0.1)
    model = new_model(url)
    body = {"model_id": model, "seq_id": 7, "adam_params": {}}
    assert "request 7" in result(url, post(url, "optim_step", body)[1]["request_id"])["error"]


def test_client_of_an_unfinished_tinker_request_is_told_to_try_again(served, monkeypatch):
    monkeypatch.setattr(app, "_POLL_SECONDS", 0.05)
    url, _ = served
    body = {"model_id": new_model(url), "seq_id": 7, "adam_params": {}}
    waiting = post(url, "optim_step", body)[1]["request_id"]
    status, told = post(url, "retrieve_future", {"request_id": waiting})
    assert status == 200 and told["type"] == "try_again" and told["request_id"] == waiting


def test_tinker_requests_after_an_invalid_one_of_the_same_model_do_not_wait_for_it(served):
    url, _ = served
    model = new_model(url)
    step = {"model_id": model, "adam_params": {}}
    invalid = [
        ("optim_step", step | {"adam_params": {"learning_rate": None}}),
        ("load_weights", {"model_id": model, "path": "no path", "optimizer": True}),
        ("save_weights", {"model_id": model, "path": 3}),
    ]
    for seq, (route, body) in enumerate(invalid, 1):
        assert post(url, route, body | {"seq_id": seq})[0] == 422
    last = post(url, "optim_step", step | {"seq_id": len(invalid) + 1})[1]["request_id"]
    assert "unclipped_grad_l2:mean" in result(url, last)["metrics"]


GOOD = datum([3, 4, 5], 1)
BAD_INPUTS = [
    ({"weights": [1.0, 1.0]}, "no target_tokens"), ({"target_tokens": [4, 99999], "weights": [1.0, 1.0]}, "vocabulary"),
    ({"target_tokens": [4, 5], "weights": [1.0]}, "shape"), ({"target_tokens": [4, 5], "weights": [[1.0], [1.0]]}, "shape"),
    ({"target_tokens": [4, 5], "weights": [float("nan")] * 2}, "finite"),
    ({"target_tokens": [4, 5], "weights": [1.0] * 2, "logprobs": [0.0] * 2}, "does not read"),
]  # fmt: skip
IMAGE = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png")])
BAD_DATA = [
    ([], "no datum"), ([datum([3], 1)], "no token"), ([datum([3, 99999], 1)], "vocabulary"), ([datum([3] * 600, 1)], "at most"),
    *(([types.Datum(GOOD.model_input, inputs)], why) for inputs, why in BAD_INPUTS),
    ([types.Datum(IMAGE, {"target_tokens": [4]})], "images"),
]  # fmt: skip


def test_invalid_tinker_training_data_is_a_user_error_and_leaves_gradients_unchanged(served):
    url, service = served
    model = new_model(url)
    bodies = [(forward_backward(model, 1 + i, data), why) for i, (data, why) in enumerate(BAD_DATA)]
    bodies += [
        (forward_backward(model, len(bodies) + 1, [GOOD], "stable_reinforce"), "stable_reinforce"),
        (forward_backward(model, len(bodies) + 2, [GOOD], "ppo", beta=1.0), "beta"),
    ]
    for body, why in bodies:
        failed = result(url, post(url, "forward_backward", body, PROTO)[1]["request_id"])
        assert why in failed["error"] and failed["category"] == "user"
    service.models[model].adapted.put_down()
    assert service.models[model].state.grads is None


HOSTILE = [
    ("create_session", b"{", 400), ("create_session", b"[]", 422), ("create_session", b"\xff" * 100, 400),
    ("forward_backward", b"\xff\xff", 422), ("optim_step", {"model_id": "nobody", "seq_id": 1, "adam_params": {}}, 404),
    ("optim_step", {"model_id": "../../etc:train:0", "seq_id": 1, "adam_params": {}}, 404),
    ("optim_step", {"model_id": "MODEL", "seq_id": -1, "adam_params": {}}, 422),
    ("optim_step", {"model_id": "MODEL", "seq_id": 1, "adam_params": {"learning_rate": "much"}}, 422),
    ("asample", {"prompt": {"chunks": []}, "sampling_params": {}, "sampling_session_id": "none", "seq_id": 0}, 404),
    ("asample", {"prompt": {"chunks": []}, "sampling_params": {}, "num_samples": 10**9, "seq_id": 0}, 422),
    ("retrieve_future", {"request_id": "none"}, 410), ("weights_info", {"tinker_path": "tinker://../weights/x"}, 422),
    ("weights_info", {"tinker_path": 3}, 422),
    ("load_weights", {"model_id": "MODEL", "seq_id": 1, "path": "tinker://a/b/../../c", "optimizer": True}, 422),
    ("create_sampling_session", {"session_id": "s", "sampling_session_seq_id": 0, "base_model": "other"}, 422),
    ("create_model", {"session_id": "../s", "model_seq_id": 0, "base_model": "tiny"}, 422),
]  # fmt: skip


@pytest.mark.parametrize(("route", "body", "status"), HOSTILE)
def test_malformed_tinker_requests_are_rejected_with_an_error_that_states_the_reason(served, route, body, status):
    url = served[0]
    if isinstance(body, dict) and body.get("model_id") == "MODEL":
        body = body | {"model_id": new_model(url)}
    answered, told = post(url, route, body, PROTO if route == "forward_backward" else "application/json")
    assert answered == status and told["detail"]


def test_tinker_server_requires_its_api_key_for_every_route_except_health(served):
    client = TestClient(make_app(served[1], "tml-key"))
    assert client.get("/api/v1/healthz").status_code == 200
    for headers, status in (({}, 401), ({"x-api-key": "tml-other"}, 401), ({"x-api-key": "tml-key"}, 200)):
        assert client.get("/api/v1/get_server_capabilities", headers=headers).status_code == status


@pytest.mark.parametrize("body", [
    {"base_model": "other"},
    {"lora_config": {"rank": 0}},
    {"lora_config": {"rank": 2, "train_mlp": False, "train_attn": False}},
])  # fmt: skip
def test_invalid_tinker_request_to_create_a_model_is_a_user_error(served, body):
    url = served[0]
    base = {"session_id": f"s{id(body)}", "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2}}
    failed = result(url, post(url, "create_model", base | body)[1]["request_id"])
    assert failed["category"] == "user" and failed["error"]


def test_tinker_sampler_works_after_a_cancelled_request_and_rejects_invalid_requests(served):
    url, service = served
    sdk = tinker.ServiceClient(base_url=url, api_key=KEY)
    sampler = sdk.create_sampling_client(base_model="tiny").result()
    params = types.SamplingParams(max_tokens=500, stop=[])
    sampler.sample(types.ModelInput.from_ints([3]), 16, params).future().cancel()
    short = types.SamplingParams(max_tokens=2, stop=[])
    assert sampler.sample(types.ModelInput.from_ints([3]), 1, short).result().sequences
    with pytest.raises(tinker.RequestFailedError, match="prompt"):
        sampler.sample(types.ModelInput.from_ints([3] * 600), 1, short).result()
    with pytest.raises(tinker.RequestFailedError, match="temperature"):
        sampler.sample(types.ModelInput.from_ints([3]), 1, types.SamplingParams(max_tokens=2, temperature=-1)).result()


def start(folder: Path, port: int = 0) -> tuple[subprocess.Popen, str]:
    command = "import sys; from nemo_rl_cpp.cli import main; sys.exit(main())"
    words = ["serve", "--model", str(folder / "model"), "--served-model-name", "tiny", "--precision", "float32"]
    words += ["--kv-cache-gb", "0.05", "--port", str(port), "--tinker", str(folder / "saved")]
    server = subprocess.Popen([sys.executable, "-c", command, *words], stdout=subprocess.PIPE, text=True)
    line = server.stdout.readline()
    return server, line.split(" at ")[1].split(",")[0]


def test_restarted_tinker_server_restores_its_models(tmp_path):
    make_model(tmp_path / "model")
    data = [datum([3, 4, 5, 6], 1)]

    def train(client: tinker.TrainingClient) -> float:
        loss = client.forward_backward(data, "cross_entropy").result().metrics["loss:sum"]
        client.optim_step(ADAM).result()
        return loss

    server, url = start(tmp_path)
    try:
        sdk = tinker.ServiceClient(base_url=url, api_key=KEY)
        kept, undisturbed = (sdk.create_lora_training_client("tiny", rank=2, seed=1).result() for _ in range(2))
        for client in (kept, undisturbed):
            train(client)
        kept.save_state("saved").result()
        path = undisturbed.save_state("other").result().path
        expected = [train(undisturbed) for _ in range(2)]  # lost by the kill
        server.send_signal(signal.SIGKILL)
        server.wait()
        server, _ = start(tmp_path, int(url.rpartition(":")[2]))
        assert [train(kept) for _ in range(2)] == expected  # the same client goes on
        again = sdk.create_training_client_from_state_with_optimizer(path).result()
        assert [train(again) for _ in range(2)] == expected
    finally:
        os.kill(server.pid, signal.SIGTERM)
        assert server.wait(20) == 0
