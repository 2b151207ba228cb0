import pytest
from fakes import ByteTokenizer
from nemo_rl_cpp.data.chat_template import ChatTemplateError
from nemo_rl_cpp.data.interfaces import TaskDataSpec
from nemo_rl_cpp.data.processors import (
    agent_data_processor,
    math_data_processor,
    math_hf_data_processor,
    multichoice_qa_processor,
    raw_completion_data_processor,
    sft_processor,
)

BLOCKS = (  # one system block, a default one without a system message
    "{{ bos_token }}{% if messages[0].role != 'system' %}{{ '<system>default<end>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '<end>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
INSIDE = (  # no system role: its text opens the user's turn
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set lead = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set lead = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{{ '<' + m.role + '>' + (lead if loop.first else '') + m.content + '<end>\n' }}{% endfor %}<assistant>"
)
NEEDS_USER = (
    "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}{{ raise_exception('No user query found') }}{% endif %}"
    + BLOCKS
)
SKIPS = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture
def spec():
    spec = TaskDataSpec("t")
    spec.system_prompt = "Be brief.\n"
    return spec


@pytest.fixture
def chat(smollm2):
    own, bos = smollm2.chat_template, smollm2.bos_token
    yield smollm2
    smollm2.chat_template, smollm2.bos_token = own, bos


ROWS = [
    (math_data_processor, {"problem": "1+1?", "expected_answer": 2}, "1+1?"),
    (multichoice_qa_processor, {"question": "1+1?", "options": {"A": "2"}, "answer": "A"}, "1+1?"),
]


@pytest.mark.parametrize("process, row, question", ROWS)
@pytest.mark.parametrize("template, system, user", [
    (BLOCKS, "{bos}<system>Be brief.<end>\n", "<user>{q}<end>\n<assistant>"),
    (NEEDS_USER, "{bos}<system>Be brief.", "<end>\n<user>{q}<end>\n<assistant>"),
    (INSIDE, "{bos}<user>Be brief.", "\n\n{q}<end>\n<assistant>"),
])  # fmt: skip
def test_chat_template_is_applied_once_to_system_and_user(chat, spec, process, row, question, template, system, user):
    chat.chat_template = template
    log = process(row, spec, chat, None, 0)["message_log"]
    bos = chat.bos_token or ""
    parts = [("system", system.format(bos=bos)), ("user", user.format(q=question))]
    assert [(m["role"], m["content"]) for m in log] == parts
    messages = conversation(("system", "Be brief."), ("user", question))["messages"]
    whole = chat.apply_chat_template(messages, add_generation_prompt=True)
    assert [i for m in log for i in m["token_ids"].tolist()] == whole, "the ids are those of the whole prompt"
    assert all(len(m["token_ids"]) for m in log) and whole.count(chat.bos_token_id) == 1


def test_chat_template_that_drops_the_system_prompt_is_rejected(chat, spec):
    chat.chat_template = SKIPS
    words = r"row 8 of the data: .*leaves out message 0 \(system, 'Be brief.'\).*prompt_file"
    for process, row, _ in ROWS:
        with pytest.raises(ChatTemplateError, match=words):
            process(row, spec, chat, None, 7)


def test_token_that_spans_system_and_user_message_belongs_to_the_user_message(chat, spec):
    """ " counting" is one token, which the pieces "The count" and "ing" alone would not have: it goes to the user."""
    chat.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    spec.system_prompt = "The count"
    log = math_data_processor({"problem": "ing?", "expected_answer": ""}, spec, chat, None, 0)["message_log"]
    assert [chat.convert_ids_to_tokens(m["token_ids"]) for m in log] == [["The"], ["Ġcounting", "?"]]
    assert [m["content"] for m in log] == ["The count", "ing?"]


def test_trailing_newline_of_a_system_prompt_file_is_stripped(chat, tmp_path):
    (tmp_path / "s.txt").write_bytes(b"Numbers only.\r\n")
    spec = TaskDataSpec("t", system_prompt_file=tmp_path / "s.txt")
    chat.chat_template = BLOCKS
    row = conversation(("user", "q"), ("assistant", "a"))
    text = math_hf_data_processor(row, spec, chat, None, 0)["message_log"][0]["content"]
    assert "<system>Numbers only.<end>\n<user>q<end>" in text
    raw = raw_completion_data_processor(row, spec, chat, None, 0)["message_log"][0]["content"]
    assert raw == "Numbers only.\nq", "raw text is joined literally"


def conversation(*turns, **more):
    return {"messages": [{"role": role, "content": content} for role, content in turns], **more}


def test_system_message_and_earlier_turns_of_a_data_row_are_kept_in_the_prompt(chat):
    chat.chat_template = BLOCKS
    row = conversation(("system", "S"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    spec = TaskDataSpec("t")
    spec.prompt = "Q: {}"
    datum = math_hf_data_processor(row, spec, chat, None, 0)
    assert datum["message_log"][0]["content"].endswith(
        "<system>S<end>\n<user>a<end>\n<assistant>b<end>\n<user>Q: c<end>\n<assistant>"
    )
    assert datum["extra_env_info"] == {"ground_truth": "d"}


@pytest.mark.parametrize("process", [math_hf_data_processor, sft_processor, agent_data_processor])
def test_system_message_in_a_data_row_together_with_a_system_prompt_file_is_an_error(chat, spec, process):
    with pytest.raises(ValueError, match="system message of its own and system_prompt_file is set"):
        process(conversation(("system", "S"), ("user", "a"), ("assistant", "b")), spec, chat, None, 0)


def test_tool_definitions_of_a_data_row_are_passed_to_the_chat_template(chat):
    chat.chat_template = "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tools = [{"type": "function", "function": {"name": "add"}}]

    def text(given):
        row = conversation(("user", "q"), ("assistant", "a"), tools=given)
        return math_hf_data_processor(row, TaskDataSpec(), chat, None, 0)["message_log"][0]["content"]

    written = '[{"type": "function", "function": {"name": "add"}}]'
    assert text(tools) == text(written) == f"{written}q"
    for given in ("{", [1], 5):
        with pytest.raises(ValueError, match="'tools'"):
            text(given)
    chat.chat_template = SKIPS
    with pytest.raises(ValueError, match="row 1 of the data: the chat template leaves out the tools"):
        text(tools)


@pytest.mark.parametrize("process, row, message", [
    (math_data_processor, {"messages": []}, r"row 4 of the data: math_data_processor reads the key 'problem', but the row has \['messages'\]"),
    (math_data_processor, {"problem": "q"}, "'expected_answer'"),
    (math_data_processor, {"problem": None, "expected_answer": 1}, "'problem' must be a text that is not empty, but is None"),
    (math_data_processor, {"problem": " ", "expected_answer": 1}, "'problem' must be a text"),
    (multichoice_qa_processor, {"question": "q", "options": {}}, "'answer'"),
    (multichoice_qa_processor, {"question": ["q"], "answer": "A"}, "'question' must be a text"),
    (math_hf_data_processor, {"problem": "q"}, "reads the key 'messages'"),
    (math_hf_data_processor, conversation(("user", "q"), extra_env_info="{}"), "'extra_env_info' is '{}': expected a mapping"),
    (raw_completion_data_processor, conversation(("system", "s"), ("user", "q"), ("assistant", "a")), "roles system, user: .*math_hf_data_processor"),
])  # fmt: skip
def test_data_rows_with_malformed_messages_are_errors(process, row, message):
    with pytest.raises(ValueError, match=message):
        process(row, TaskDataSpec(), ByteTokenizer(), None, 3)


def test_multiple_choice_options_that_are_not_a_mapping_are_rejected():
    spec = TaskDataSpec()
    spec.prompt = "Choose."
    for options in (["x"], None, {}, {"A": None}):
        row = {"question": "q", "options": options, "answer": "A"}
        with pytest.raises(ValueError, match="'options' must be a mapping from letters to texts"):
            multichoice_qa_processor(row, spec, ByteTokenizer(), None, 0)


def test_chat_template_error_of_a_transformers_tokenizer_names_the_data_row(hf_smollm2, monkeypatch):
    monkeypatch.setattr(hf_smollm2, "chat_template", "{{ messages[0].content + 1 }}")
    words = "row 1 of the data: the chat template failed on these messages: TypeError"
    with pytest.raises(ChatTemplateError, match=words):
        math_hf_data_processor(conversation(("user", "q"), ("assistant", "a")), TaskDataSpec(), hf_smollm2, None, 0)
