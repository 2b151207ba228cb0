"""docs/command-line.md says what the commands' own help says."""

import argparse
import sys

import pytest
from documents.snippets import ROOT

sys.path.insert(0, str(ROOT / "docs" / "site"))
import command_line  # noqa: E402


def test_the_page_is_current(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")  # of the terminal: makes no difference
    assert command_line.PAGE.read_text() == command_line.page(), "run: python docs/site/command_line.py --write"


def test_every_command_is_there():
    assert {"train", "eval", "check", "generate"} <= set(command_line.commands())
    assert "`--max-new-tokens MAX_NEW_TOKENS`" in command_line.section("generate", "")


@pytest.mark.parametrize(
    "options, row",
    [
        (
            {"name": "--top-k", "type": int, "default": 3, "help": "a | b <c>"},
            "| `--top-k TOP_K` | `3` | a \\| b \\<c> |",
        ),
        ({"name": "prompt", "nargs": "?", "help": "text"}, "| `prompt` |  | text |"),
        ({"name": "--chat", "action": "store_true", "help": "of %(prog)s"}, "| `--chat` |  | of nemo-rl-cpp x |"),
    ],
)
def test_an_option_becomes_a_row(monkeypatch, options, row):
    parser = argparse.ArgumentParser(description="says")
    parser.add_argument(options.pop("name"), **options)
    monkeypatch.setattr(command_line, "help_of", lambda words: ("", parser))
    lines = command_line.section("x", "").splitlines()
    assert "Says." in lines and row in lines
