import json

import httpx
import pytest
import tokenizer_folders
import torch
from nemo_rl_cpp.config.policy import PolicyConfig
from nemo_rl_cpp.data.tokenizer import Tokenizer
from nemo_rl_cpp.models.policy.lm_policy import Policy
from served import serving

PROMPT = "what is 12"


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.from_pretrained(folder, section="")


def scores(folder, tokenizer, before, temperature):
    """Return the log-probability of every token of the vocabulary after `before`, as training computes it, [V]."""
    generation = {"max_new_tokens": 16, "temperature": temperature}
    config = PolicyConfig(
        model_name=str(folder), precision="float32", max_total_sequence_length=512, generation=generation
    )
    config.fill_defaults()
    policy = Policy(None, config, tokenizer, seed=0, init_reference_model=False)
    V = len(tokenizer)
    rows = torch.cat([torch.tensor(before).expand(V, -1), torch.arange(V)[:, None]], 1)
    data = {"input_ids": rows, "input_lengths": torch.full((V,), rows.shape[1]), "token_mask": torch.ones_like(rows)}
    return policy.get_logprobs(data | {"sample_mask": torch.ones(V)})["logprobs"][:, -1]


def post(http, route, **body):
    answer = http.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_served_top_logprobs_are_the_largest_logprobs_of_the_whole_vocabulary(http, folder, tokenizer, temperature):
    ask = {"prompt": PROMPT, "max_tokens": 3, "temperature": temperature, "seed": 7, "return_token_ids": True}
    choice = post(http, "/v1/completions", logprobs=4, ignore_eos=True, **ask)
    before = list(tokenizer(PROMPT, add_special_tokens=False)["input_ids"])
    beside = choice["logprobs"]["top_logprobs"]
    assert len(beside) == 3
    told = choice["logprobs"]
    for token, logprob, found, sampled in zip(choice["token_ids"], told["token_logprobs"], beside, told["tokens"]):
        every = scores(folder, tokenizer, before, temperature)
        assert every[token].item() == logprob
        values, ids = every.topk(4)
        assert found[sampled] == logprob and len(found) == len({*ids.tolist(), token})
        for v, value in zip(ids.tolist(), values.tolist()):
            name = sampled if v == token else tokenizer.decode([v], skip_special_tokens=False)
            assert found.get(f"token_id:{v}", found.get(name)) == value  # by its number where another is spelled alike
        before.append(token)


@pytest.mark.parametrize("stream", [False, True])
def test_echoed_prompt_has_its_tokens_logprobs_and_most_likely_tokens(http, folder, tokenizer, stream):
    ask = {"prompt": [PROMPT], "max_tokens": 1, "temperature": 0, "echo": True, "n": 2}  # as lm-eval asks, but n
    if stream:
        lines = http.post("/v1/completions", json={**ask, "logprobs": 2, "stream": True}).text.splitlines()
        choice = next(json.loads(line.removeprefix("data: "))["choices"][0] for line in lines if line)
    else:
        choice = post(http, "/v1/completions", logprobs=2, **ask)
        assert post(http, "/v1/completions", **ask) == choice | {"logprobs": None}
    told, ids = choice["logprobs"], list(tokenizer(PROMPT, add_special_tokens=False)["input_ids"])
    assert "".join(told["tokens"]) == choice["text"] and choice["text"].startswith(PROMPT)
    assert len(told["tokens"]) == len(ids) + 1 == len(told["text_offset"])
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    for i in range(1, len(ids)):
        every = scores(folder, tokenizer, ids[:i], 1.0)
        assert told["token_logprobs"][i] == every[ids[i]].item()
        found = {*told["top_logprobs"][i].values()}
        assert found == {*every.topk(2).values.tolist(), told["token_logprobs"][i]}


def test_echoed_prompt_is_the_text_of_the_request_also_if_the_tokenizer_normalises_it(tmp_path):
    prompt = "cafe\u0301"  # which Qwen's tokenizer composes
    with serving(tokenizer_folders.write(tokenizer_folders.KINDS["qwen"], tmp_path)) as server:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "echo": True}
        choice = httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]
    assert choice["text"].startswith(prompt)


def test_served_top_logprobs_contain_only_tokens_that_can_be_sampled(http):
    ask = {"prompt": PROMPT, "max_tokens": 6, "seed": 3, "ignore_eos": True}
    for choice in (
        post(http, "/v1/completions", logprobs=9, top_k=2, temperature=1, **ask),
        post(http, "/v1/completions", logprobs=1, temperature=0, **ask),
    ):
        for beside, logprob in zip(choice["logprobs"]["top_logprobs"], choice["logprobs"]["token_logprobs"]):
            assert logprob in beside.values() and 1 <= len(beside) <= 2
    assert all(len(beside) == 1 for beside in choice["logprobs"]["top_logprobs"])
    assert post(http, "/v1/completions", logprobs=0, **ask)["logprobs"]["top_logprobs"] is None


def test_chat_top_logprobs_are_sorted_and_equal_in_whole_and_streamed_responses(http):
    messages = [{"role": "user", "content": "what"}]
    ask = {"messages": messages, "max_tokens": 5, "seed": 2, "temperature": 1, "logprobs": True, "top_logprobs": 3}
    content = post(http, "/v1/chat/completions", **ask)["logprobs"]["content"]
    for entry in content:
        found = [other["logprob"] for other in entry["top_logprobs"]]
        assert len(found) == 3 and found == sorted(found, reverse=True) and found[0] >= entry["logprob"]
        assert all(other["token"] and other["bytes"] for other in entry["top_logprobs"])
    with http.stream("POST", "/v1/chat/completions", json=ask | {"stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    parts = [json.loads(line)["choices"][0]["logprobs"] for line in lines]
    assert [entry for part in parts if part for entry in part["content"]] == content
