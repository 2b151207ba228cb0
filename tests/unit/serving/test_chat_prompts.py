"""Conversations as token ids, text streams and tool calls."""

import httpx
import pytest
from nemo_rl_cpp.data.tokenizer import Tokenizer
from nemo_rl_cpp.serving.answers import Header, chat_logprobs
from nemo_rl_cpp.serving.bodies import ChatMessage, CompletionBody
from nemo_rl_cpp.serving.chat import Said, chat_prompt, turn_of
from nemo_rl_cpp.serving.kinds import CompletionAnswer
from nemo_rl_cpp.serving.model import ServedModel
from nemo_rl_cpp.serving.requests import Progress, Sample
from nemo_rl_cpp.serving.texts import TextStream
from nemo_rl_cpp.serving.tool_calls import find_calls
from served import SPECIAL, TEMPLATE, make_folder, serving
from tokenizer_folders import byte_level

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(byte_level(SPECIAL), {"eos_token": "<|im_end|>", "chat_template": TEMPLATE})


def messages(*pairs):
    return [ChatMessage(role=role, content=content) for role, content in pairs]


def test_a_later_turn_keeps_the_ids_that_were_sampled(tokenizer):
    """The answer was sampled in other pieces than the tokenizer makes of its text."""
    user, answer, end = ("user", "what is"), "there", tokenizer.eos_token_id
    sampled = [i for letter in answer for i in tokenizer(letter, add_special_tokens=False)["input_ids"]]
    assert sampled != list(tokenizer(answer, add_special_tokens=False)["input_ids"])
    prompt = chat_prompt(tokenizer, messages(user), None, [])
    conversation = messages(user, ("assistant", answer), ("user", "plus"))
    turns = (turn_of(*user), turn_of("assistant", answer))
    anew = chat_prompt(tokenizer, conversation, None, [])
    for ids, stopped in (([*sampled, end], True), (sampled, False)):
        going_on = chat_prompt(tokenizer, conversation, None, [Said(turns, [*prompt, *ids], stopped)])
        assert going_on[: len(prompt) + len(ids)] == [*prompt, *ids]
        assert tokenizer.decode(going_on) == tokenizer.decode(anew)  # the same text, in other tokens
    other = messages(user, ("assistant", "another"), ("user", "plus"))
    assert chat_prompt(tokenizer, other, None, [Said(turns, [*prompt, *sampled], False)]) == chat_prompt(
        tokenizer, other, None, []
    )


def test_pieces_of_a_stream_hold_back_what_may_be_a_stop_string(tokenizer):
    text = "the answer is 42. Hello! \u00e9\u4e2d"
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    for stops, keep, expected in (
        ((), False, text), (("is 43", "Hello?"), False, text), (("is 42",), False, "the answer "), (("is 42", "answer"), True, "the answer"),
    ):  # fmt: skip
        stream, pieces = TextStream(tokenizer, stops, keep), []
        for n, token in enumerate(ids):
            pieces.append(stream.push([token], last=n == len(ids) - 1))
            assert expected.startswith("".join(pieces))
        assert "".join(pieces) == expected


def test_a_turn_with_other_tools_is_written_anew(tokenizer):
    conversation = messages(("user", "what is"), ("assistant", "there"), ("user", "plus"))
    turns = (turn_of("user", "what is"), turn_of("assistant", "there"))
    anew = chat_prompt(tokenizer, conversation, [TOOL], [])
    assert chat_prompt(tokenizer, conversation, [TOOL], [Said(turns, [7, 8], False)]) == anew
    assert chat_prompt(tokenizer, conversation, None, [Said(turns, [7, 8], False, [TOOL])])[:2] != [7, 8]
    assert chat_prompt(tokenizer, conversation, [TOOL], [Said(turns, [7, 8], False, [TOOL])])[:2] == [7, 8]


def test_reasoning_of_an_earlier_answer_reaches_the_template():
    template = TEMPLATE.replace("{{ m.content }}", "{{ m.reasoning_content or '' }}{{ m.content }}")
    tokenizer = Tokenizer(byte_level(SPECIAL), {"eos_token": "<|im_end|>", "chat_template": template})
    conversation = messages(("user", "what is"), ("assistant", "there"), ("user", "plus"))
    conversation[1].reasoning_content = "is it not?"
    turns = (turn_of("user", "what is"), turn_of("assistant", "there"))
    ids = chat_prompt(tokenizer, conversation, None, [Said(turns, [7, 8], False)])
    assert "is it not?there" in tokenizer.decode(ids)


def test_an_answer_that_ends_within_a_character_keeps_its_end(tokenizer):
    ids = list(tokenizer("x\U0001f642", add_special_tokens=False)["input_ids"])[:-1]
    whole = tokenizer.decode(ids)
    assert whole == "x\ufffd"
    assert TextStream(tokenizer).push(ids, last=True) == whole
    stream = TextStream(tokenizer)
    assert "".join(stream.push([token], last=n == len(ids) - 1) for n, token in enumerate(ids)) == whole


def test_logprobs_hold_the_bytes_of_parts_of_a_character_and_offsets_go_on(tokenizer):
    ids = list(tokenizer("x\U0001f642", add_special_tokens=False)["input_ids"])
    model = ServedModel(("m",), tokenizer, None, 999, 512, (), None)
    content = chat_logprobs(tokenizer, model.bytes_of_token, Sample(ids, [-1.0] * len(ids)))["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "x\U0001f642" and len(content) > 2
    answer = CompletionAnswer(model, CompletionBody(prompt="x", logprobs=0, stream=True), None, "1")
    offsets = []
    for token in tokenizer("Hello there", add_special_tokens=False)["input_ids"]:
        (chunk,) = answer.chunk(Header("1", "m", 0), Progress(0, (token,), (-1.0,)))
        offsets.append((chunk["choices"][0]["logprobs"]["text_offset"], chunk["choices"][0]["logprobs"]["tokens"]))
    at = 0
    for (offset,), (text,) in offsets:
        assert offset == at
        at += len(text)
    assert at == len("Hello there") and len(offsets) > 1


def test_tool_calls_are_found_and_broken_ones_stay_text():
    good = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    spoken = find_calls(f"Let me see. {good}", "1")
    assert spoken.text == "Let me see." and [(c.name, c.arguments) for c in spoken.calls] == [("add", '{"a": 1}')]
    for broken in (
        "<tool_call>{</tool_call>",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": 5}</tool_call>',
        "<tool_call>",
    ):
        assert find_calls(broken, "1").text == broken and not find_calls(broken, "1").calls


def test_a_chat_by_key_goes_on_from_its_ids_and_tools_reach_the_template(tmp_path):
    with serving(make_folder(tmp_path / "m")) as server, httpx.Client(base_url=f"{server.url}/v1", timeout=60) as http:

        def chat(conversation, **more):
            body = {"messages": conversation, "max_tokens": 12, "return_token_ids": True, **more}
            answer = http.post("/chat/completions", json=body, headers={"X-Rollout-Key": "r"})
            assert answer.status_code == 200, answer.text
            return answer.json()

        conversation = [{"role": "user", "content": "Hello there"}]
        before: list[int] = []
        for _ in range(4):
            answer = chat(conversation)
            assert answer["prompt_token_ids"][: len(before)] == before
            before = answer["prompt_token_ids"] + answer["choices"][0]["token_ids"]
            conversation += [answer["choices"][0]["message"], {"role": "user", "content": "what is"}]
        with_tools = chat([{"role": "user", "content": "x"}], tools=[TOOL])
        assert '"add"' in server.model.tokenizer.decode(with_tools["prompt_token_ids"])
        called = [
            {"role": "user", "content": "x"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "5"},
        ]
        assert "<tool_call>" in server.model.tokenizer.decode(chat(called, tools=[TOOL])["prompt_token_ids"])
