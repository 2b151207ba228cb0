import argparse

import pytest
from nemo_rl_cpp.commands.generate import talk
from nemo_rl_cpp.generate import GeneratedText


class Echo:
    """Says the last message back, a letter at a time; Ctrl-C comes at a letter "^"."""

    def __init__(self):
        self.asked, self.seeds = [], []

    def generate(self, messages, *, on_text, seed, **options):
        self.asked.append([f"{message['role']}: {message['content']}" for message in messages])
        self.seeds.append(seed)
        text = messages[-1]["content"]
        if text == "too long":
            raise ValueError("the prompt is too long")
        for letter in text:
            if letter == "^":
                raise KeyboardInterrupt
            on_text(letter)
        return GeneratedText(text, [0] * len(text), "stop")


@pytest.fixture
def asked(monkeypatch):
    """Answer the lines, and return what the model was asked and its seeds."""

    def run(*lines, system=None):
        left, model = iter(lines), Echo()

        def read(prompt):
            line = next(left, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", read)
        known = argparse.Namespace(system=system, max_new_tokens=5, temperature=0.7, top_p=0.9, seed=7)
        talk(model, known)
        return model.asked, model.seeds

    return run


def test_chat_command_sends_earlier_messages_until_the_user_resets_the_conversation(asked, capsys):
    messages, seeds = asked("ab", KeyboardInterrupt(), "", "cd", "/reset", "ef", system="s")
    assert messages[1] == ["system: s", "user: ab", "assistant: ab", "user: cd"]
    assert messages[2] == ["system: s", "user: ef"] and len(messages) == 3 and seeds == [7, 8, 9]
    assert capsys.readouterr().out.split() == ["ab", "cd", "ef"]


def test_chat_command_keeps_the_tokens_of_an_interrupted_response_in_the_history(asked, capsys):
    messages, _ = asked("ab^cd", "more")
    assert messages[1] == ["user: ab^cd", "assistant: ab", "user: more"]
    assert "ab [stopped]" in capsys.readouterr().out


def test_chat_command_drops_a_message_that_makes_the_prompt_too_long(asked, capsys):
    messages, _ = asked("ab", "too long", "cd")
    assert messages[2] == ["user: ab", "assistant: ab", "user: cd"]
    assert "(the prompt is too long; /reset begins a new conversation)" in capsys.readouterr().out
