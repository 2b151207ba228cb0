import argparse

import pytest
from nemo_rl_cpp.commands.chat import Conversation
from nemo_rl_cpp.generate import GeneratedText


class Echo:
    """Says the last message back, a letter at a time; `stop_at` raises there what Ctrl-C does."""

    max_length = 30

    def __init__(self):
        self.asked, self.stop_at, self.seeds = [], None, []

    def count_tokens(self, messages):
        return sum(len(message["content"]) for message in messages)

    def generate(self, messages, *, on_text, seed, **options):
        self.asked.append([dict(message) for message in messages])
        self.seeds.append(seed)
        text = messages[-1]["content"]
        if text == "refused":
            raise ValueError("the prompt is too long")
        for place, letter in enumerate(text):
            if place == self.stop_at:
                raise KeyboardInterrupt
            on_text(letter)
        return GeneratedText(text, [0] * len(text), "stop")


@pytest.fixture
def model():
    return Echo()


def conversation(model, system=None):
    return Conversation(model, argparse.Namespace(system=system, max_new_tokens=5, temperature=0.7, top_p=0.9, seed=7))


def test_the_history_goes_along_and_can_be_dropped(model, capsys):
    talk = conversation(model, system="s")
    talk.take("ab")
    talk.take("cd")
    roles = [message["role"] for message in model.asked[1]]
    assert roles == ["system", "user", "assistant", "user"] and capsys.readouterr().out == "ab\ncd\n"
    talk.take("/reset")
    assert talk.messages == [{"role": "system", "content": "s"}]
    talk.take("/system other")
    assert talk.messages == [{"role": "system", "content": "other"}]
    talk.take("/retry")
    talk.take("/nothing")
    shown = capsys.readouterr().out
    assert "nothing was asked" in shown and "/nothing is no command" in shown and model.seeds == [7, 8]


def test_another_answer_takes_the_place_of_the_last(model, capsys):
    talk = conversation(model)
    talk.take("ab")
    talk.take("/retry")
    assert model.asked[0] == model.asked[1] and [m["role"] for m in talk.messages] == ["user", "assistant"]


def test_a_stopped_answer_stays_as_far_as_it_came(model, capsys):
    talk = conversation(model)
    model.stop_at = 2
    talk.take("abcd")
    assert talk.messages[-1] == {"role": "assistant", "content": "ab"} and "ab [stopped]" in capsys.readouterr().out


def test_the_oldest_exchanges_leave_a_full_context(model, capsys):
    talk = conversation(model, system="s")
    for text in ("a" * 6, "b" * 6, "c" * 6):
        talk.take(text)
    assert [m["content"][0] for m in model.asked[-1]] == ["s", "b", "b", "c"]
    assert "the oldest exchange left the model's 30 positions" in capsys.readouterr().out


def test_a_message_that_cannot_be_answered_is_forgotten(model, capsys):
    talk = conversation(model)
    talk.take("ab")
    talk.take("refused")
    assert "(the prompt is too long)" in capsys.readouterr().out and talk.messages[-1]["content"] == "ab"
    with pytest.raises(ValueError, match="too long"):
        conversation(model).take("refused")


def test_lines_are_read_until_the_end(model, monkeypatch, capsys):
    lines = iter(["ab", KeyboardInterrupt(), "", "/exit", "never"])

    def read(prompt):
        line = next(lines)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    conversation(model).run("> ")
    assert len(model.asked) == 1 and next(lines) == "never"
