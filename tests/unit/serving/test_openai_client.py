import pytest

openai = pytest.importorskip("openai")
MESSAGES = [{"role": "user", "content": "what is"}]
SAME = {
    "completions": {
        "best_of": 1, "echo": False, "frequency_penalty": 0, "logit_bias": {}, "logprobs": 0, "n": 1, "presence_penalty": 0, "stop": [],
        "stream": False, "stream_options": {}, "suffix": None, "temperature": 1, "top_p": 1, "user": "me", "max_tokens": 16,
    },
    "chat": {
        "frequency_penalty": 0, "function_call": None, "logit_bias": {}, "logprobs": False, "max_completion_tokens": 12, "metadata": {},
        "modalities": ["text"], "n": 1, "parallel_tool_calls": True, "prediction": None, "presence_penalty": 0, "reasoning_effort": None,
        "prompt_cache_retention": "24h", "response_format": {"type": "text"}, "safety_identifier": "me", "service_tier": "auto",
        "stop": [], "store": False, "stream": False, "temperature": 1, "tools": None, "tool_choice": "auto", "top_logprobs": None,
        "top_p": 1, "verbosity": "medium",
    },
}  # fmt: skip
"""Optional fields by route, each with a value that changes nothing: 40 in all."""


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def answer(client, route, **fields):
    """Return the response to a request, without its id and time of creation."""
    if route == "chat":
        ask = {"model": "tiny", "messages": MESSAGES, "seed": 4, "max_tokens": 12} | fields
        if fields.get("max_completion_tokens"):
            del ask["max_tokens"]
        given = client.chat.completions.create(**ask)
    else:
        given = client.completions.create(**{"model": "tiny", "prompt": "what is", "seed": 4} | fields)
    return given.model_dump(exclude={"id", "created"})


def test_optional_fields_of_openai_requests_may_be_null_missing_or_set(client):
    assert sum(map(len, SAME.values())) == 40
    for route, fields in SAME.items():
        absent = answer(client, route)
        assert absent["usage"]["completion_tokens"] > 4
        for name, value in fields.items():
            assert answer(client, route, **{name: None}) == absent, name
            found = answer(client, route, **{name: value})
            if name == "logprobs" and value is not False:  # asked for, so they are there
                assert found["choices"][0].pop("logprobs")["tokens"] and absent["choices"][0]["logprobs"] is None
                found["choices"][0]["logprobs"] = None
            assert found == absent, name
        assert answer(client, route, **dict.fromkeys(fields)) == absent


def test_null_is_accepted_in_extension_fields_but_not_in_required_fields_of_requests(client):
    names = ("top_k", "min_p", "ignore_eos", "return_token_ids", "stop_token_ids", "rollout_key", "nobody_knows_it")
    extra = dict.fromkeys(names)
    for route in SAME:
        assert answer(client, route, extra_body=extra) == answer(client, route)
    with pytest.raises(openai.BadRequestError, match="prompt: Field required"):
        answer(client, "completions", prompt=None)
    with pytest.raises(openai.BadRequestError, match="messages.0.role: Field required"):
        answer(client, "chat", messages=[{"role": None, "content": "x"}])
    with pytest.raises(openai.BadRequestError, match="nobody_knows_it is not known"):
        answer(client, "chat", extra_body={"nobody_knows_it": 1})


def test_server_accepts_every_format_of_assistant_messages_sent_by_the_openai_client(client):
    first = client.chat.completions.create(model="tiny", messages=MESSAGES, seed=4, max_tokens=12).choices[0].message
    plain = {"role": "assistant", "content": first.content}
    as_openai = plain | {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    answers = [
        answer(client, "chat", messages=[*MESSAGES, said, {"role": "user", "content": "plus"}])
        for said in (plain, first, first.model_dump(), as_openai)
    ]
    assert answers[1:] == answers[:-1]


def test_completion_request_with_several_prompts_returns_the_choices_of_separate_requests(client):
    ask = {"n": 2, "max_tokens": 6, "logprobs": 1, "extra_body": {"return_token_ids": True}}
    prompts = ["what is 12", "Hello there", "what is 12"]
    alone = [answer(client, "completions", prompt=prompt, **ask)["choices"] for prompt in prompts]
    together = answer(client, "completions", prompt=prompts, **ask)
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2, 3, 4, 5]
    for number, choice in enumerate(together["choices"]):
        assert choice == alone[number // 2][number % 2] | {"index": number}
    assert together["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in together["choices"])
    ids = [alone[0][0]["prompt_token_ids"], alone[1][0]["prompt_token_ids"]]
    assert together["usage"]["prompt_tokens"] == 2 * len(ids[0]) + len(ids[1])
    assert answer(client, "completions", prompt=ids, **ask)["choices"] == together["choices"][:4]
    texts = dict.fromkeys(range(6), "")
    for part in client.completions.create(model="tiny", prompt=prompts, seed=4, stream=True, **ask):
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [choice["text"] for choice in together["choices"]]
    with pytest.raises(openai.BadRequestError, match="n is 1 for 2000 prompts: the server takes at most 1024"):
        answer(client, "completions", prompt=["x"] * 2000)
    with pytest.raises(openai.BadRequestError, match="no token"):
        answer(client, "completions", prompt=["x", ""])
