import json

import pytest
from nemo_rl_cpp.data.texts import TextStream
from nemo_rl_cpp.data.tokenizer import Tokenizer
from nemo_rl_cpp.serving.answers import ChatAnswer, CompletionAnswer, Header, Speller, completion_logprobs
from nemo_rl_cpp.serving.bodies import ChatBody, ChatMessage, CompletionBody, RequestError
from nemo_rl_cpp.serving.chat import MARKS, AssistantTurn, ParsedToolCalls, chat_prompt, find_calls, turn_of
from nemo_rl_cpp.serving.engine import LENGTH, STOP_STRING, Sample, Sampling
from nemo_rl_cpp.serving.model import ServedModel
from served import SPECIAL, TEMPLATE
from tokenizer_folders import byte_fallback, byte_level

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

WITH_TOOL = {"tools": [TOOL]}


def made_tokenizer(template=TEMPLATE, special=()):
    return Tokenizer(byte_level([*SPECIAL, *special]), {"eos_token": "<|im_end|>", "chat_template": template})


@pytest.fixture(scope="module")
def tokenizer():
    return made_tokenizer()


def ids_of(tokenizer, text):
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def pieces_of(tokenizer, ids, **how):
    """Return the pieces of text that a stream yields if it gets one token at a time."""
    stream = TextStream(tokenizer, **how)
    return [piece for n, token in enumerate(ids) for piece in stream.push([token], last=n == len(ids) - 1)]


def model_of(tokenizer, **more):
    return ServedModel(("m",), tokenizer, None, 999, 512, (tokenizer.eos_token_id,), None, **more)


def messages(*pairs):
    return [ChatMessage(role=role, content=content) for role, content in pairs]


def test_chat_prompt_of_a_later_turn_contains_the_sampled_token_ids_of_earlier_responses(tokenizer):
    """The response was sampled as other tokens than the tokenizer makes of its text."""
    user, answer, end = ("user", "what is"), "there", tokenizer.eos_token_id
    sampled = [i for letter in answer for i in ids_of(tokenizer, letter)]
    assert sampled != ids_of(tokenizer, answer)
    prompt = chat_prompt(tokenizer, messages(user), {}, [])
    conversation = messages(user, ("assistant", answer), ("user", "plus"))
    turns = (turn_of(*user), turn_of("assistant", answer))
    anew = chat_prompt(tokenizer, conversation, {}, [])
    for ids, stopped in (([*sampled, end], True), (sampled, False)):
        going_on = chat_prompt(tokenizer, conversation, {}, [AssistantTurn(turns, [*prompt, *ids], stopped)])
        assert going_on[: len(prompt) + len(ids)] == [*prompt, *ids]
        assert tokenizer.decode(going_on) == tokenizer.decode(anew)  # the same text, in other tokens
    other = messages(user, ("assistant", "another"), ("user", "plus"))
    found = chat_prompt(tokenizer, other, {}, [AssistantTurn(turns, [*prompt, *sampled], False)])
    assert found == chat_prompt(tokenizer, other, {}, [])


def test_streamed_response_withholds_text_that_may_be_the_start_of_a_stop_string(tokenizer):
    text = "the answer is 42. Hello! \u00e9\u4e2d"
    for stops, keep, expected in (
        ((), False, text), (("is 43", "Hello?"), False, text), (("is 42",), False, "the answer "), (("is 42", "answer"), True, "the answer"),
    ):  # fmt: skip
        pieces = pieces_of(tokenizer, ids_of(tokenizer, text), stops=stops, keep_stop=keep)
        assert "".join(pieces) == expected


def test_earlier_turns_are_retokenized_if_the_request_has_different_tools(tokenizer):
    conversation = messages(("user", "what is"), ("assistant", "there"), ("user", "plus"))
    turns = (turn_of("user", "what is"), turn_of("assistant", "there"))
    anew = chat_prompt(tokenizer, conversation, WITH_TOOL, [])
    assert chat_prompt(tokenizer, conversation, WITH_TOOL, [AssistantTurn(turns, [7, 8], False)]) == anew
    assert chat_prompt(tokenizer, conversation, {}, [AssistantTurn(turns, [7, 8], False, WITH_TOOL)])[:2] != [7, 8]
    assert chat_prompt(tokenizer, conversation, WITH_TOOL, [AssistantTurn(turns, [7, 8], False, WITH_TOOL)])[:2] == [
        7,
        8,
    ]


def test_reasoning_content_of_an_earlier_response_is_passed_to_the_chat_template():
    tokenizer = made_tokenizer(TEMPLATE.replace("{{ m.content }}", "{{ m.reasoning_content or '' }}{{ m.content }}"))
    conversation = messages(("user", "what is"), ("assistant", "there"), ("user", "plus"))
    conversation[1].reasoning_content = "is it not?"
    turns = (turn_of("user", "what is"), turn_of("assistant", "there"))
    ids = chat_prompt(tokenizer, conversation, {}, [AssistantTurn(turns, [7, 8], False)])
    assert "is it not?there" in tokenizer.decode(ids)


def test_chat_request_sets_variables_that_the_chat_template_reads_and_no_others():
    tokenizer = made_tokenizer(TEMPLATE + "{% if enable_thinking is false %}<think></think>{% endif %}")
    body = {"messages": [{"role": "user", "content": "what is"}]}

    def text(**variables):
        asked = ChatBody(**body, chat_template_kwargs=variables)
        return tokenizer.decode(ChatAnswer(model_of(tokenizer), asked, None, "1").prompts[0])

    assert text(enable_thinking=False) == text() + "<think></think>" and text(enable_thinking=True) == text()
    with pytest.raises(RequestError, match="does not read messages, thinking; it reads enable_thinking$"):
        text(thinking=False, messages=[])


def test_server_parses_tool_calls_in_responses_and_returns_malformed_tool_calls_as_text():
    good = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    spoken = find_calls(f"Let me see. {good}", "1")
    assert spoken.text == "Let me see." and [(c.name, c.arguments) for c in spoken.calls] == [("add", '{"a": 1}')]
    for inner in ("{</tool_call>", "[1]</tool_call>", '{"name": 5}</tool_call>', ""):
        broken = find_calls(f"<tool_call>{inner}", "1")
        assert broken.text == f"<tool_call>{inner}" and not broken.calls


TAGGED = """<tool_call>
<function=add>
<parameter=a>
7
</parameter>
<parameter=text>
7
 <b>
</parameter>
<parameter=exact>
True
</parameter>
</function>
</tool_call>"""


OF_GLM = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>7</arg_value>\n<arg_key>text</arg_key><arg_value>7\n <b></arg_value>\n<arg_key>exact</arg_key><arg_value>true</arg_value></tool_call>"


@pytest.mark.parametrize("tagged, end", [(TAGGED, "</function>"), (OF_GLM, "</tool_call>")])
def test_server_parses_tool_calls_that_are_written_with_tags(tagged, end):
    types = {
        "a": {"type": "integer"},
        "text": {"type": "string"},
        "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    }
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": types}}}
    found = find_calls(f"Two: {tagged}\n{tagged}", "1", tools=[tool])
    assert found.text == "Two:" and [call.id for call in found.calls] == ["call_1_0", "call_1_1"]
    assert [call.name for call in found.calls] == ["add", "add"]
    assert json.loads(found.calls[0].arguments) == {"a": 7, "text": "7\n <b>", "exact": True}
    (without_types,) = find_calls(tagged, "1").calls
    assert json.loads(without_types.arguments)["a"] == "7"
    cut = tagged.replace(end, "")
    assert find_calls(cut, "1") == ParsedToolCalls(cut)
    for without_arguments in ("<function=now></function>", "now\n"):
        (call,) = find_calls(f"<tool_call>{without_arguments}</tool_call>", "1").calls
        assert (call.name, call.arguments) == ("now", "{}")


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": "</tool_call><think>"}}\n</tool_call>'


@pytest.mark.parametrize(("text", "thinks", "rest"), [
    (f"<think>Perhaps {CALL}</think>No call is needed.", False, None),
    (f"<think>Perhaps {CALL}", False, None),
    (f"Perhaps {CALL}</think>No call is needed.", True, None),
    (f"Perhaps {CALL}", True, None),
    (f"<think>{CALL}</think>So: {CALL}", False, f"<think>{CALL}</think>So:"),
    (f"{CALL}</think>So: {CALL}", True, f"{CALL}</think>So:"),
    (f"{CALL}<think>{CALL}</think>", False, f"<think>{CALL}</think>"),
    (f"The mark is <tool_call>. <think>{CALL}{CALL}</think>No.", False, None),
])  # fmt: skip
@pytest.mark.parametrize("special", [(), MARKS])
def test_server_ignores_tool_calls_within_thinking_tags(text, thinks, rest, special):
    """`rest` is the text without the tool call; None if there is no call. The tags may be special tokens."""
    template = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}") if thinks else TEMPLATE
    made = made_tokenizer(template, special)
    model, ids = model_of(made), [*ids_of(made, text), made.eos_token_id]
    body = ChatBody(messages=[{"role": "user", "content": "<think>x"}], tools=[TOOL], logprobs=True)
    answer, header, sample = ChatAnswer(model, body, None, "1"), Header("1", "m", 0), Sample(ids, [-1.0] * len(ids), 1)
    (whole,) = answer.whole(header, [sample])["choices"]
    (streamed,) = next(answer.closing(header, [sample]))["choices"]
    assert whole["finish_reason"] == streamed["finish_reason"] == ("stop" if rest is None else "tool_calls")
    assert whole["message"]["content"] == streamed["delta"]["content"] == (rest or text)
    calls = [call["function"]["arguments"] for call in whole["message"].get("tool_calls", ())]
    assert calls == ([] if rest is None else ['{"a": "</tool_call><think>"}'])
    assert "".join(entry["token"] for entry in whole["logprobs"]["content"]) == text


@pytest.mark.parametrize("keep", [False, True])
def test_stop_strings_of_run_and_request_both_end_a_served_response(tokenizer, keep):
    model = model_of(tokenizer, default=Sampling(stop_strings=("###",)))
    for text, cut in (("Answer 42###", "Answer 42"), ("Answer 42 STOP", "Answer 42 "), ("Answer ##", "Answer ##")):
        ids = ids_of(tokenizer, text)
        body = CompletionBody(prompt="x", stop="STOP", include_stop_str_in_output=keep, logprobs=0)
        answer = CompletionAnswer(model, body, None, "1")
        assert set(answer.sampling.stop_strings) == {"###", "STOP"}
        sample = Sample(ids, [-1.0] * len(ids), STOP_STRING)
        (choice,) = answer.whole(Header("1", "m", 0), [sample])["choices"]
        assert choice["text"] == "".join(choice["logprobs"]["tokens"]) == (text if keep else cut)
        assert len(choice["logprobs"]["token_logprobs"]) == len(ids)


def test_served_top_logprobs_keep_different_tokens_that_decode_to_the_same_text():
    """Both a letter token and a byte token spell "t"; the mark of a word's beginning spells a space."""
    backend = byte_fallback()
    letter, byte, word = (backend.token_to_id(token) for token in ("t", "<0x74>", "\u2581t"))
    model = ServedModel(("m",), Tokenizer(backend, {}), None, 999, 512, (), None)
    likeliest = ((byte, -0.5), (letter, -1.0), (word, -2.0))
    sample = Sample([letter, word], [-1.0, -2.0], LENGTH, [likeliest, likeliest])
    before = backend.encode("the", add_special_tokens=False).ids
    spelled = Speller(TextStream(model.tokenizer, before)).take(sample)
    body, at = completion_logprobs(model.bytes_of_token, spelled, 5)
    assert body["tokens"] == ["t", " t"] and body["text_offset"] == [5, 6] and at == 8
    assert body["top_logprobs"] == [
        {f"token_id:{byte}": -0.5, "t": -1.0, " t": -2.0}, {"t": -0.5, f"token_id:{letter}": -1.0, " t": -2.0}
    ]  # fmt: skip


def test_chat_request_with_a_rollout_key_reuses_earlier_token_ids_and_renders_tools(server, http):
    def chat(conversation, **more):
        body = {"messages": conversation, "max_tokens": 12, "return_token_ids": True, **more}
        answer = http.post("/v1/chat/completions", json=body, headers={"X-Rollout-Key": "r"})
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
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    asked, answered = {"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": "1", "content": "5"}
    called = [asked, {"role": "assistant", "content": None, "tool_calls": [call]}, answered]
    assert "<tool_call>" in server.model.tokenizer.decode(chat(called, tools=[TOOL])["prompt_token_ids"])
