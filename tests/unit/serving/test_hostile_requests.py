import contextlib
import json
import re
import socket
import threading

import httpx
import pytest
from nemo_rl_cpp.serving.bodies import ChatBody, CompletionBody, RequestError, read_body
from nemo_rl_cpp.serving.engine import Progress, ServingError
from served import make_folder, serving

KEY = "a key"
HEADERS = {"authorization": f"Bearer {KEY}"}
GOOD = {"prompt": "Hello", "max_tokens": 2, "temperature": 0}
DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = make_folder(tmp_path_factory.mktemp("hostile") / "model")
    with serving(folder, api_key=KEY, max_queue=8, max_body_bytes=200_000, body_timeout_s=600) as running:
        yield running


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=60, headers=HEADERS) as client:
        yield client


@pytest.fixture(autouse=True)
def still_serving(http):
    yield
    answer = http.post("/v1/completions", json=GOOD)
    assert answer.status_code == 200 and answer.json()["choices"][0]["finish_reason"]


COMPLETIONS = {
    "prompt": [None, 5, [], ["a", 5], [[1], "b"], [-1], [10**6], [1.5], {"a": 1}, "", "x" * 5000, [[]], [True]],
    "max_tokens": [0, -1, 1.5, "5", 10**400], "temperature": [-1, "hot", 1e9, [1]], "top_p": [0, 1.1, -1],
    "top_k": [-2, 1.5], "n": [0, 129, -1], "seed": [-1, 2**64, "x"], "stop": ["", [""], [1], ["x"] * 17, "x" * 2000],
    "stop_token_ids": [[-1], ["a"], [2**40]], "logprobs": [21, -1, True], "presence_penalty": [0.5],
    "logit_bias": [{"5": 1}], "echo": [3], "best_of": [3], "suffix": ["x"], "model": ["other", 5],
    "stream": ["maybe"], "no_such_field": [1], "priority": [1], "detokenize": [False],
    "spaces_between_special_tokens": [False], "rollout_key": ["", "k" * 300],
}  # fmt: skip
CHATS = [
    {}, {"messages": []}, {"messages": "hi"}, {"messages": [{"role": "king", "content": "x"}]}, {"messages": [{"content": "x"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    {"messages": [{"role": "user", "content": "x", "extra": 1}]}, {"messages": [{"role": "user", "content": "x"}], "tools": "x"},
    {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 1}, {"messages": [{"role": "user", "content": "x" * 5000}]},
    {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}},
]  # fmt: skip
GENERATES = [
    {}, {"token_ids": []}, {"token_ids": [1], "sampling_params": {"logprobs": 21}}, {"token_ids": [999]}, {"token_ids": "x"},
    {"token_ids": [1], "features": {}}, {"token_ids": [1], "output_mode": "text"},
]  # fmt: skip


@pytest.mark.parametrize("field", COMPLETIONS)
def test_error_for_an_invalid_field_of_a_completion_request_names_the_field(http, field):
    for value in COMPLETIONS[field]:
        answer = http.post("/v1/completions", json=GOOD | {field: value})
        assert answer.status_code == (404 if (field, value) == ("model", "other") else 400), (value, answer.text)
        error = answer.json()["error"]
        assert error["message"] and field in f"{error['message']} {error['param']}", error


@pytest.mark.parametrize("kind, field, said", [
    (CompletionBody, {"prompt": "x", "stop": ""}, "stop.0: String should have at least 1 character, not ''"),
    (CompletionBody, {"prompt": "x", "stop": ["x", 1]}, "stop.1: Input should be a valid string, not 1"),
    (CompletionBody, {"prompt": "x", "stop": ["x"] * 17}, "stop: List should have at most 16 items"),
    (ChatBody, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}]},
     "messages.0.content.1.type: Input should be 'text', not 'image_url'"),
    (ChatBody, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content: Input should be a valid string, not 5"),
    (ChatBody, {"messages": []}, "messages: List should have at least 1 item after validation, not 0"),
    (CompletionBody, {"prompt": "x", "max_new_tokens": 3}, "max_new_tokens is not known here: did you mean max_tokens?"),
    (CompletionBody, {"prompt": "x", "features": 3}, "features is not known here: leave it out, or see docs/serving.md"),
    (CompletionBody, {"prompt": [3, -1]}, "prompt.1: Input should be greater than or equal to 0, not -1"),
])  # fmt: skip
def test_error_for_a_request_field_of_several_types_names_the_invalid_element(kind, field, said):
    with pytest.raises(RequestError, match=re.escape(said)):
        read_body(kind, field)


def test_unsupported_chat_fields_that_would_change_the_response_are_rejected(http):
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    for more, said in (
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"prompt_logprobs": 0}, "prompt_logprobs is not known here"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs is given without logprobs: true"),
        ({"max_completion_tokens": 3}, "max_tokens is 2 and max_completion_tokens 3"),
    ):
        answer = http.post("/v1/chat/completions", json=chat | more)
        assert answer.status_code == 400 and said in answer.json()["error"]["message"], answer.text
    same = {
        "max_completion_tokens": 2, "parallel_tool_calls": True, "priority": 0, "logprobs": True, "top_logprobs": 20,
    }  # fmt: skip
    assert http.post("/v1/chat/completions", json=chat | same).status_code == 200


def test_http_requests_with_an_invalid_body_are_rejected(http):
    odd = (b"\xff\xfe", DEEP.encode(), b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b"1" * 5000)
    for body in (b"", b"{", b"null", b"[]", b'"x"', *odd):
        answer = http.post("/v1/completions", content=body)
        assert answer.status_code == 400, (body[:40], answer.text)
    for body in CHATS:
        assert http.post("/v1/chat/completions", json=body).status_code == 400, body
    for body in GENERATES:
        assert http.post("/inference/v1/generate", json=body).status_code == 400, body
    assert http.post("/v1/completions", content=json.dumps(GOOD | {"user": "x" * 300_000}).encode()).status_code == 413
    assert http.get("/v1/completions").status_code == 405
    assert "v1/models" in http.get("/v2/anything").json()["error"]["message"]


def test_server_requires_its_api_key_for_every_route_except_health(server):
    with httpx.Client(base_url=server.url) as stranger:
        assert stranger.get("/health").status_code == 200
        for headers in ({}, *({"authorization": key} for key in ("Bearer wrong", KEY, "Bearer \u00e9".encode()))):
            assert stranger.get("/v1/models", headers=headers).status_code == 401
            assert stranger.post("/v1/completions", json=GOOD, headers=headers).status_code == 401


def test_request_gets_status_503_if_the_queue_is_full_and_400_if_the_request_is_too_large(http):
    endless = GOOD | {"n": 8, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=endless) as answer:
        begun = answer.iter_raw()  # the stream ends with the iterator
        next(begun)
        refused = http.post("/v1/completions", json=GOOD)
    assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
    for more, param in (({"n": 9}, "n"), ({"prompt": ["x"] * 9}, "prompt")):
        refused = http.post("/v1/completions", json=GOOD | more)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param
    assert refused.json()["error"]["message"].startswith("n is 1 for 9 prompts: the server takes at most 8 answers")


def test_rejected_request_does_not_change_the_samples_of_a_later_valid_request(server, http):

    def ask(key):
        body = {"prompt": "Hello", "max_tokens": 12, "temperature": 1, "rollout_key": key, "ignore_eos": True}
        return [http.post("/v1/completions", json=body | {"n": n}) for n in (9, 1)]

    (refused, answer), rollouts = ask("again"), server.model.rollouts
    assert refused.status_code == 400 and answer.status_code == 200
    assert list(rollouts.find("again").drawn.values()) == [{0}]
    engine = server.model.engine
    submit = engine.submit

    def fails(ticket):
        ticket.tell(Progress(error=ServingError("the weights changed")))

    engine.submit = fails
    try:
        assert http.post("/v1/completions", json=GOOD | {"rollout_key": "fails"}).status_code == 503
    finally:
        engine.submit = submit
    assert list(rollouts.find("fails").drawn.values()) == [set()]


BROKEN = [
    b"\x00" * 200 + b"\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 30_000,
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n",
]  # fmt: skip


def test_malformed_and_slow_http_requests_are_rejected(tmp_path):
    folder = make_folder(tmp_path / "model")
    late = b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n{"prompt":'
    with serving(folder, body_timeout_s=0.4) as server:
        for sent in (*BROKEN, late):
            with socket.create_connection((server.host, server.port), timeout=20) as raw:
                with contextlib.suppress(OSError):  # it is cut while it sends
                    raw.sendall(sent)
                    assert raw.recv(65536).startswith(b"HTTP/1.1 408" if sent is late else b"HTTP/1.1 40")
        for cut in range(0, 60, 7):  # a request that ends in its middle
            with socket.create_connection((server.host, server.port)) as raw:
                raw.sendall(late[:cut])
        assert httpx.post(f"{server.url}/v1/completions", json=GOOD).status_code == 200


@pytest.mark.slow
def test_response_that_exceeds_the_request_timeout_ends_with_status_504(tmp_path):
    folder = make_folder(tmp_path / "model")
    with serving(folder, request_timeout_s=0.05) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        engine, over = server.model.engine, threading.Event()
        step = engine._step
        engine._step = lambda: (step(), over.wait(60))  # the second step is made when the time is over
        late = http.post("/v1/completions", json=GOOD | {"max_tokens": 500, "ignore_eos": True, "n": 16})
        over.set()
        assert late.status_code == 504 and "0.05 s" in late.json()["error"]["message"]
        with engine._changed:
            assert engine._changed.wait_for(lambda: not engine._running, 30)
        assert engine.state.used_blocks == 0
