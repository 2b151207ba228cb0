"""Writes docs/command-line.md from the help of every command: `python docs/site/command_line.py --write`."""

import argparse
import contextlib
import io
import os
import re
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "command-line.md"
INTRODUCTION = """# Command line

`nemo-rl-cpp COMMAND --help` prints the text of this page, with examples. The page is made from the commands' own help
(`python docs/site/command_line.py --write`).

In a source tree write `uv run nemo-rl-cpp ...`. The scripts of the guides are the same commands: `examples/run_eval.py` (or `python -m nemo_rl_cpp.run_eval`) is
`nemo-rl-cpp eval`; `run_grpo_math`, `run_ppo`, `run_distillation` and `run_sft` are `nemo-rl-cpp train`, whose file names the algorithm. `train`, `eval` and `check` also take
[overrides](configuration.md#overrides) of keys.

| exit status | meaning |
|---|---|
| 0 | done; a run reached its end, or stopped with a checkpoint |
| 1 | an error; one sentence says which |
| 2 | the command line or the configuration has a mistake |
| 130, 143 | Ctrl-C or SIGTERM ended the command at once |
| 141 | nobody read its output any more: it went through a pipe to `head`, say |

Every command also takes `--debug` (the traceback of an error) and `--version`. [configs/README.md](../configs/README.md) lists the
shipped configurations.

## The commands

| command | what it does |
|---|---|
"""


def help_of(words: list[str]) -> tuple[str, argparse.ArgumentParser | None]:
    """What `nemo-rl-cpp WORDS --help` prints, and the parser that printed it, if one did."""
    from nemo_rl_cpp import cli

    parsers: list[argparse.ArgumentParser] = []
    plain = argparse.ArgumentParser.print_help

    def note(self: argparse.ArgumentParser, file: object = None) -> None:
        parsers.append(self)
        plain(self, file)

    printed, said, before = io.StringIO(), io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "500"  # nothing is broken into lines
    argparse.ArgumentParser.print_help = note
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
            cli.main([*words, "--help"])
    finally:
        argparse.ArgumentParser.print_help = plain
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before
    return printed.getvalue() or said.getvalue(), parsers[-1] if parsers else None


def commands() -> dict[str, str]:
    """Name of each command -> what the list of commands says about it."""
    text, _ = help_of([])
    listed = re.split(r"^(?:commands|positional arguments):\n", text, flags=re.M)[1].partition("\n\n")[0]
    return dict(re.findall(r"^ {2,4}([a-z][\w-]*)  +(\S.*)$", listed, re.M))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<")


def _option(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    """An option with its value, as one writes it."""
    formatter = parser.formatter_class(prog="")
    if not action.option_strings:
        return f"`{formatter._metavar_formatter(action, action.dest)(1)[0]}`"
    if action.nargs == 0:
        return ", ".join(f"`{name}`" for name in action.option_strings)
    value = formatter._format_args(action, action.dest.upper())
    return ", ".join(f"`{name} {value}`" for name in action.option_strings)


def section(name: str) -> str:
    """Return the part of the page about a command: its arguments, and what its help says besides examples and overrides."""
    _, parser = help_of([name])
    assert parser is not None, name
    lines = [f"## `nemo-rl-cpp {name}`", ""]
    lines += ["| argument | default | meaning |", "|---|---|---|"]
    for action in parser._actions:
        if action.dest in ("help", "version", "debug") or action.help == argparse.SUPPRESS:
            continue
        shown = action.default not in (None, False, [], argparse.SUPPRESS) and "%(default)" not in (action.help or "")
        said = (action.help or "") % {**vars(action), "prog": f"nemo-rl-cpp {name}"}
        lines.append(f"| {_option(action, parser)} | {f'`{action.default}`' if shown else ''} | {_cell(said)} |")
    for more in (parser.epilog or "").split("\n\n"):
        if more.strip() and not more.strip().startswith(("examples:", "Everything else", "shipped configurations:")):
            lines += ["", more.strip() % {"prog": f"nemo-rl-cpp {name}"}]
    return "\n".join([*lines, ""])


def page() -> str:
    listed = commands()
    rows = [f"| [`{name}`](#nemo-rl-cpp-{name}) | {_cell(said)} |" for name, said in listed.items()]
    return INTRODUCTION + "\n".join(rows) + "\n\n" + "\n".join(section(name) for name in listed)


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page())
    else:
        print(page(), end="")
