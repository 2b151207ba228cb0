"""Chat templates of the kinds that users bring, each on conversations of every shape: as transformers renders them.

Where transformers refuses, so do we, and always by ChatTemplateError. A prompt that lost a message is refused, and a value
that is no template is never taken for one."""

import json

import pytest
from nemo_rl_cpp.data.chat_template import (
    PASSTHROUGH,
    ChatTemplateError,
    choose_template,
    render_chat_template,
    render_prompt,
)

KEY = "policy.tokenizer.chat_template"


def turns(before="<|{role}|>\n", after="</s>\n", content="message['content']", start="<|assistant|>\n", first=""):
    """A template that writes every message between two marks."""
    begin, end = before.split("{role}") if "{role}" in before else (before, None)
    opening = f"{{{{ '{begin}' }}}}" if end is None else f"{{{{ '{begin}' + message['role'] + '{end}' }}}}"
    opening, after, start = (text.replace("\n", "\\n") for text in (opening, after, start))
    return (
        f"{first}{{% for message in messages %}}{opening}{{{{ {content} }}}}{{{{ '{after}' }}}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ '{start}' }}}}{{% endif %}}"
    )


TOOL_CALLS = (
    "{%- if tools %}{{ '<tools>' + (tools | tojson) + '</tools>\n' }}{%- endif %}"
    "{%- for m in messages %}{{ '[' + m.role + ']' }}{% if m.content is defined %}{{ m.content }}{% endif %}"
    "{%- if m.tool_calls %}{% for call in m.tool_calls %}{{ '<call>' ~ call.function.name ~ (call.function.arguments | tojson) ~ '</call>' }}"
    "{% endfor %}{% endif %}\n{% endfor %}"
)
TEMPLATES = {
    "passthrough": PASSTHROUGH,
    "marks and line breaks": turns("<|start|>{role}\n", "<|end|>\n", start="<|start|>assistant\n"),
    "header ids with bos": turns(
        "<h>{role}</h>\n\n", "<eot>", "message['content'] | trim", "<h>assistant</h>\n\n", "{{ bos_token }}"
    ),
    "zephyr-like": turns("<|{role}|>\n", "{eos}").replace("'{eos}'", "eos_token"),
    "html escape": turns(content="message['content'] | e"),
    "tojson": turns(content="message['content'] | tojson"),
    "tilde": "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}",
    "system first or default": (
        "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% set rest = messages[1:] %}"
        "{% else %}{{ 'You help.' }}{% set rest = messages %}{% endif %}{% for m in rest %}{{ '\n' + m.role + '>' + m.content }}{% endfor %}"
    ),
    "system inside the user's turn": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}{% set lead = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}"
        "{% else %}{% set lead = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{{ '<turn>' + m.role + '\n' + (lead if loop.first else '') + m.content | trim + '</turn>\n' }}{% endfor %}"
    ),
    "refuses system": "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ m.content }}{% endfor %}",
    "skips system": "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}",
    "last message only": "Q: {{ messages[-1]['content'] }}\nA:",
    "first message only": "Q: {{ messages[0].content }}\nA:",
    "counts messages": "{{ messages | length }} messages",
    "misspelt key": "{% for m in messages %}{{ m.role }}: {{ m.contents }}\n{% endfor %}",
    "loop controls": "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}{{ m.content }};{% endfor %}",
    "stops at the tool": "{% for m in messages %}{% if m.role == 'tool' %}{% break %}{% endif %}{{ m.content }};{% endfor %}",
    "generation block": "{% for m in messages %}{{ m.role }}:{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}",
    "selected": "{% for m in messages | selectattr('role', 'equalto', 'user') %}{{ m.content }}{% endfor %}",
    "whitespace control": "{%- for m in messages -%}\n  {{- m.role }}: {{ m.content -}}\n  {%- if not loop.last %}\n{% endif -%}\n{%- endfor -%}",
    "string tests": "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}\n{% endfor %}",
    "first part": "{% for m in messages %}{{ m.role }}: {{ m.content[0].text }}\n{% endfor %}",
    "drops thoughts": "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}\n{% endfor %}",
    "reasoning": "{% for m in messages %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}\n{% endfor %}",
    "thinking": "{% for m in messages %}{% if m.thinking is defined %}({{ m.thinking }}){% endif %}{{ m.content or '' }}\n{% endfor %}",
    "tools": TOOL_CALLS,
    "whole messages": "{{ messages | tojson(indent=1) }}",
    "keys in order": "{% for m in messages %}{% for k, v in m.items() %}{{ k }}={{ v }};{% endfor %}\n{% endfor %}",
    "documents": "{% for d in documents or [] %}<{{ d.title }}>{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}",
    "variables": "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking is defined and not enable_thinking %}<no>{% endif %}",
    "month": "{{ strftime_now('%Y') | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "undefined function": "{{ messages[0].content }}{{ nothing() }}",
    "writes into messages": "{{ messages.append(1) }}{{ messages[0].content }}",
}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "é": "<&>"}}}
ASK = {"role": "user", "content": "What is <1 & 1>?"}
CONVERSATIONS = {
    "user": [ASK],
    "system": [{"role": "system", "content": "Be brief."}, ASK],
    "turns": [ASK, {"role": "assistant", "content": "Two."}, {"role": "user", "content": " And\n2 + 2? "}],
    "null beside tool calls": [
        ASK,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "3", "name": None},
    ],
    "thoughts": [ASK, {"role": "assistant", "content": "ok", "reasoning": "hm"}, {"role": "user", "content": "go"}],
    "ends with assistant": [ASK, {"role": "assistant", "content": "<think>a</think>b"}],
}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "é", "parameters": {"type": "object"}}}]


def outcome(render):
    try:
        return render()
    except Exception as error:  # noqa: BLE001 - transformers raises errors of many kinds
        return error


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_templates_are_rendered_or_rejected_exactly_as_in_transformers(name, smollm2, hf_smollm2):
    options = {"chat_template": TEMPLATES[name], "tokenize": False, "enable_thinking": False}
    for shape, messages in CONVERSATIONS.items():
        for more in ({"add_generation_prompt": True}, {"tools": TOOLS}, {"documents": [{"title": "t", "text": "x"}]}):
            theirs = outcome(lambda: hf_smollm2.apply_chat_template(messages, **options, **more))
            ours = outcome(lambda: smollm2.apply_chat_template(messages, **options, **more))
            if isinstance(theirs, Exception):
                assert type(ours) is ChatTemplateError, (shape, more, theirs, ours)
            else:
                assert ours == theirs, (shape, more)


LOSE = {  # template -> shapes of which it loses a message that it was given
    "skips system": {"system"},
    "last message only": {"system", "turns", "null beside tool calls", "thoughts", "ends with assistant"},
    "first message only": {"system", "turns", "null beside tool calls", "thoughts", "ends with assistant"},
    "counts messages": set(CONVERSATIONS),
    "misspelt key": set(CONVERSATIONS),
    "selected": {"system", "turns", "null beside tool calls", "thoughts", "ends with assistant"},
    "loop controls": {"null beside tool calls"},
    "stops at the tool": {"null beside tool calls"},
    "first part": set(CONVERSATIONS),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_template_that_drops_a_message_of_the_prompt_is_an_error(name, smollm2, monkeypatch):
    monkeypatch.setattr(smollm2, "chat_template", TEMPLATES[name])
    for shape, messages in CONVERSATIONS.items():
        plain = outcome(lambda: smollm2.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        checked = outcome(lambda: render_prompt(smollm2, messages))
        if isinstance(plain, Exception):
            assert type(checked) is ChatTemplateError and str(checked) == str(plain)
        elif shape in LOSE.get(name, ()):
            assert type(checked) is ChatTemplateError and "leaves out message" in str(checked), (shape, checked)
        else:
            assert checked == plain, shape


def test_dropped_message_is_detected_even_if_its_text_appears_elsewhere_in_the_prompt(smollm2, monkeypatch):
    monkeypatch.setattr(smollm2, "chat_template", TEMPLATES["misspelt key"])
    with pytest.raises(ChatTemplateError, match="leaves out message 0"):
        render_prompt(smollm2, [{"role": "user", "content": "user"}])
    # templates that change or inspect contents, but drop none
    refuses = "{% if '<' not in messages[0].content %}{{ raise_exception('no tag') }}{% endif %}"
    smollm2.chat_template = refuses + "{{ messages[0].content }}"
    assert render_prompt(smollm2, [{"role": "user", "content": "<a>"}]) == "<a>"
    smollm2.chat_template = TEMPLATES["tojson"]
    for content in ("中文", 'a"b', "<a>\n"):
        assert render_prompt(smollm2, [{"role": "user", "content": content}])


@pytest.mark.parametrize("value", ["my.j2", "my.jinja", "my.jinja2", "my.txt", "./my.txt", "no_ending"])
def test_chat_template_is_read_from_a_file_of_any_name(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    (tmp_path / value).write_text(TEMPLATES["tilde"], encoding="utf-8-sig")
    assert choose_template(value, None, KEY) == TEMPLATES["tilde"]
    (tmp_path / value).write_text("Question: {question}")
    with pytest.raises(ChatTemplateError, match="never uses `messages`"):
        choose_template(value, None, KEY)


def test_chat_template_is_read_from_the_chat_template_key_of_a_json_file(tmp_path):
    file = tmp_path / "chat_template.json"
    file.write_text(json.dumps({"chat_template": PASSTHROUGH}))
    assert choose_template(str(file), None, KEY) == PASSTHROUGH
    for text in ("[]", "{", '{"chat_template": 1}'):
        file.write_text(text)
        with pytest.raises(ChatTemplateError, match="chat_template.json"):
            choose_template(str(file), None, KEY)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ChatTemplateError, match="not UTF-8"):
        choose_template(str(file), None, KEY)


@pytest.mark.parametrize("value", ["gone.j2", "gone.jinja", "folder/gone", "gone.txt"])
def test_missing_chat_template_file_is_an_error(value):
    with pytest.raises(FileNotFoundError, match="policy.tokenizer.chat_template names the file '.*gone"):
        choose_template(value, None, KEY)


def test_chat_template_setting_can_select_a_named_template_of_the_tokenizer():
    own = {"default": TEMPLATES["tilde"], "tool_use": TOOL_CALLS, "broken": "D"}
    assert choose_template("tool_use", own, KEY) == TOOL_CALLS
    assert choose_template("default", own, KEY) == own and choose_template(None, own, KEY) == PASSTHROUGH
    with pytest.raises(ChatTemplateError, match="'broken' never uses"):
        choose_template("broken", own, KEY)
    with pytest.raises(ChatTemplateError, match="named templates are broken, default, tool_use"):
        choose_template("chatml", own, KEY)


@pytest.mark.parametrize(
    "value", ["chatml", "tool_use", "", " ", "Question: {question}", "{}", "messages", "User: x\nAssistant:"]
)
def test_chat_template_value_that_is_neither_a_template_nor_a_path_is_an_error(value):
    with pytest.raises(ChatTemplateError, match="policy.tokenizer.chat_template is .*neither a template"):
        choose_template(value, None, KEY)


@pytest.mark.parametrize(
    "value",
    ["{{ bos_token }}", "{{ message }}", "{% set messages = [] %}{{ x }}", "{# messages #}{{ 1 }}", "{{ prompt }}"],
)
def test_chat_template_that_never_uses_the_messages_is_an_error(value):
    with pytest.raises(ChatTemplateError, match="never uses `messages`, so every prompt would lose its question"):
        choose_template(value, None, KEY)
    with pytest.raises(ChatTemplateError, match="must be a text"):
        choose_template(["x"], None, KEY)


@pytest.mark.parametrize("template", [
    "{{ messages[0].content + 1 }}", "{{ 1 / 0 }}", "{{ messages[9].content.x }}", "{{ {}[1].x }}", "{{ strftime_now(1) }}",
    "{{ messages.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}", "{% for %}",
])  # fmt: skip
def test_any_error_inside_a_chat_template_is_raised_as_chat_template_error(template):
    messages = [ASK, ASK]
    with pytest.raises(ChatTemplateError, match="chat template (failed on these messages|does not compile)"):
        render_chat_template(template, messages)
    assert len(messages) == 2


@pytest.mark.parametrize("messages", ["text", None, 5, {"role": "user", "content": "x"}, ["text"], [None]])
def test_invalid_conversation_for_a_chat_template_is_an_error_with_the_reason(messages):
    with pytest.raises(ChatTemplateError, match="conversation is a list|message is a mapping"):
        render_chat_template(PASSTHROUGH, messages)
    with pytest.raises(ChatTemplateError, match="JSON schemas"):
        render_chat_template("", [], tools=[len])


def test_chat_template_cannot_call_methods_of_python_objects():
    class Secret:
        def content(self):
            return "called"

    text = render_chat_template(
        "{{ messages[0].content }}|{{ messages[0].x.content }}|{{ x }}",
        [{"content": "a", "x": Secret()}],
        variables={"x": Secret()},
    )
    assert text == "a||<Secret>"
