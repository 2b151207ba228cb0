import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from nemo_rl_cpp.generate import TextGenerator

LONG = {"prompt": "Hello there, what", "ignore_eos": True, "max_tokens": 400, "temperature": 1}


@pytest.fixture(scope="module")
def library(folder):
    return TextGenerator(str(folder), precision="float32")


def post(http, route, **body):
    answer = http.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(http, route, **body):
    """Return the events of a streamed response."""
    with http.stream("POST", route, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def idle(server):
    engine = server.model.engine
    with engine._changed:
        return engine._changed.wait_for(lambda: not engine._running and not engine._new, 30)


@pytest.mark.parametrize(
    "rule",
    [{"temperature": 0}, {"temperature": 1, "seed": 5}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 6}],
)
def test_http_server_generates_the_same_texts_as_the_python_api(http, library, rule):
    mine = library.generate("what is 12 plus", max_new_tokens=30, **rule)
    ask = {"model": "tiny", "prompt": "what is 12 plus", "max_tokens": 30, "return_token_ids": True} | rule
    answer = post(http, "/v1/completions", **ask)
    (choice,) = answer["choices"]
    assert choice["text"] == mine.text and choice["token_ids"] == mine.token_ids
    assert choice["finish_reason"] == mine.finish_reason
    assert answer["usage"]["completion_tokens"] == len(mine.token_ids)
    assert answer["weight_version"] == 0 and answer["system_fingerprint"] == "weights-0"

    messages = [{"role": "user", "content": "Hello! It is a fine day"}]
    mine = library.generate(messages, max_new_tokens=30, **rule)
    (choice,) = post(http, "/v1/chat/completions", messages=messages, max_tokens=30, **rule)["choices"]
    assert choice["message"] == {"role": "assistant", "content": mine.text}


def test_response_has_the_id_of_its_request_which_must_fit_in_a_header(http):
    asked = {
        "/v1/completions": ("cmpl-", {"prompt": "x", "max_tokens": 1}),
        "/v1/chat/completions": ("chatcmpl-", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
        "/inference/v1/generate": ("", {"token_ids": [5], "sampling_params": {"max_tokens": 1}}),
    }
    for route, (before, body) in asked.items():
        assert http.post(route, json=body | {"request_id": "mine"}).headers["x-request-id"] == f"{before}mine"
        for wrong in ("two\nlines", "漢字", ""):
            answer = http.post(route, json=body | {"request_id": wrong})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "request_id"


def test_streamed_pieces_of_a_served_response_concatenate_to_the_whole_response(http):
    ask = {"prompt": "Hello there", "max_tokens": 40, "temperature": 1, "seed": 1, "n": 2, "logprobs": 0}
    whole = post(http, "/v1/completions", **ask)
    parts = events(http, "/v1/completions", **ask, stream_options={"include_usage": True})
    assert parts[-1]["choices"] == [] and parts[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [c for part in parts for c in part["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"] and len(mine) > 2
        assert sum((c["logprobs"]["token_logprobs"] for c in mine), []) == choice["logprobs"]["token_logprobs"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
    assert whole["choices"][0]["text"] != whole["choices"][1]["text"]

    ask = {"messages": [{"role": "user", "content": "day?"}], "max_tokens": 25, "temperature": 1, "seed": 2}
    ask["logprobs"] = True
    (choice,) = post(http, "/v1/chat/completions", **ask)["choices"]
    deltas = [part["choices"][0] for part in events(http, "/v1/chat/completions", **ask)]
    assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(d["delta"].get("content", "") for d in deltas) == choice["message"]["content"]
    assert deltas[-1]["finish_reason"] == choice["finish_reason"]


def test_served_response_omits_the_stop_string_unless_include_stop_str_in_output_is_set(http):
    ask = {"prompt": "Hello there", "max_tokens": 60, "temperature": 1, "seed": 3}
    text = post(http, "/v1/completions", **ask)["choices"][0]["text"]
    stop = text[6:9]
    (choice,) = post(http, "/v1/completions", **ask, stop=[stop])["choices"]
    assert choice["text"] == text[: text.index(stop)] and choice["finish_reason"] == "stop"
    parts = events(http, "/v1/completions", **ask, stop=[stop])
    assert "".join(c["text"] for part in parts for c in part["choices"]) == choice["text"]
    kept = post(http, "/v1/completions", **ask, stop=stop, include_stop_str_in_output=True)["choices"][0]["text"]
    assert kept == choice["text"] + stop


def test_generate_route_of_the_server_accepts_and_returns_token_ids(http, server, library):
    ids = server.model.tokenizer("The answer is", add_special_tokens=False)["input_ids"]
    params = {"max_tokens": 20, "temperature": 1.0, "seed": 9, "logprobs": 1, "skip_special_tokens": False}
    answer = post(http, "/inference/v1/generate", model="tiny", token_ids=list(ids), sampling_params=params)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == library.generate("The answer is", max_new_tokens=20, seed=9).token_ids
    entries = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in entries] == choice["token_ids"]
    assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(-50 < entry["logprob"] <= 0 for entry in entries)
    text = post(http, "/v1/completions", prompt=list(ids), max_tokens=20, temperature=1.0, seed=9, logprobs=1)
    assert text["choices"][0]["logprobs"]["token_logprobs"] == [entry["logprob"] for entry in entries]
    (card, _) = http.get("/v1/models").json()["data"]
    assert card["id"] == "tiny" and card["max_model_len"] == 512
    assert http.get("/v1/models/tiny").json() == card and http.get("/v1/models/other").status_code == 404


def generated(http, server, **params):
    """Return (the response, the events of the streamed response) of vLLM's route /inference/v1/generate."""
    ids = server.model.tokenizer("The answer is", add_special_tokens=False)["input_ids"]
    ask = {"token_ids": list(ids), "return_token_ids": True, "sampling_params": {"max_tokens": 20, "seed": 9, **params}}
    answer = post(http, "/inference/v1/generate", **ask)
    parts = events(http, "/inference/v1/generate", **ask, stream_options={"include_usage": True})
    assert answer["prompt_token_ids"] == ask["token_ids"] == parts[0]["prompt_token_ids"]
    assert "prompt_token_ids" not in parts[1]
    assert parts[-1]["choices"] == [] and parts[-1]["usage"] == answer["usage"]
    assert len({part["request_id"] for part in parts}) == 1 and parts[0]["weight_version"] == 0
    return answer, parts


def test_streamed_token_ids_of_the_generate_route_concatenate_to_the_whole_response(http, server):
    answer, parts = generated(http, server, n=2, temperature=1.0, logprobs=1)
    for choice in answer["choices"]:
        mine = [c for part in parts for c in part["choices"] if c["index"] == choice["index"]]
        assert [token for c in mine for token in c["token_ids"]] == choice["token_ids"] and len(mine) > 2
        assert [entry for c in mine for entry in c["logprobs"]["content"]] == choice["logprobs"]["content"]
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]


def test_logprobs_of_the_generate_route_list_the_sampled_token_before_the_top_tokens(http, server):
    (choice,) = generated(http, server, temperature=1.0, top_k=4, logprobs=3)[0]["choices"]
    ranks = set()
    for entry in choice["logprobs"]["content"]:
        first, *others = entry["top_logprobs"]
        assert first == {name: entry[name] for name in first} and len(others) == 2
        assert [other["rank"] for other in others] == [rank for rank in (1, 2, 3) if rank != entry["rank"]][:2]
        assert first["logprob"] <= others[0]["logprob"] or entry["rank"] == 1
        assert entry["token_id"] not in [other["token_id"] for other in others]
        ranks.add(entry["rank"])
    assert None in ranks and len(ranks) > 2
    greedy = generated(http, server, temperature=0, logprobs=2)[0]["choices"][0]["logprobs"]["content"]
    assert all(entry["rank"] == entry["top_logprobs"][0]["rank"] == 1 for entry in greedy)
    for count in (0, 1):
        bare = generated(http, server, temperature=0, logprobs=count)[0]["choices"][0]["logprobs"]["content"]
        assert [entry["logprob"] for entry in bare] == [entry["logprob"] for entry in greedy]
        assert all([e["token_id"] for e in entry["top_logprobs"]] == [entry["token_id"]] for entry in bare)


def test_served_response_does_not_depend_on_concurrent_requests(http, server):
    asks = [
        {"prompt": f"Hello {i}" * (1 + i % 5), "max_tokens": 5 + i, "temperature": i % 2, "seed": i} for i in range(24)
    ]
    alone = [post(http, "/v1/completions", logprobs=1, **ask)["choices"] for ask in asks]
    with ThreadPoolExecutor(24) as pool:
        together = list(pool.map(lambda ask: post(http, "/v1/completions", logprobs=1, **ask)["choices"], asks))
    assert together == alone
    assert idle(server) and server.model.engine.state.used_blocks == 0


@pytest.mark.parametrize("stream", [False, True])
def test_server_frees_the_kv_cache_blocks_of_a_disconnected_client(http, server, stream):
    engine = server.model.engine
    body = json.dumps(LONG | {"n": 4, "stream": stream}).encode()
    before = engine.state.generated_tokens
    with engine.model_lock:  # so that the answers do not end before the client goes
        with socket.create_connection((server.host, server.port)) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            with engine._changed:
                assert engine._changed.wait_for(lambda: engine._running, 30)
        with engine._changed:
            assert engine._changed.wait_for(lambda: engine._leaving, 30)
    assert idle(server) and engine.state.used_blocks == 0
    assert engine.state.generated_tokens - before < 4 * LONG["max_tokens"] / 10
    assert http.get("/health").json()["answers_under_way"] == 0
