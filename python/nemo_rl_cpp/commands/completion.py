"""`nemo-rl-cpp completion`: completion for bash, zsh and fish. The shells ask this module for the words that fit."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from nemo_rl_cpp.command_line import command_parser

_EXAMPLES = """examples:
  bash: source <(nemo-rl-cpp completion bash)              # for good: put this line into ~/.bashrc
  zsh:  source <(nemo-rl-cpp completion zsh)               # for good: into ~/.zshrc, behind compinit
  fish: nemo-rl-cpp completion fish | source               # for good: > ~/.config/fish/completions/nemo-rl-cpp.fish"""
_SCRIPTS = {shell: Path(__file__).parent / "completions" / f"nemo-rl-cpp.{shell}" for shell in ("bash", "zsh", "fish")}
_OPTIONS = {
    "train": ["--config", "--dry-run", "--help"],
    "eval": ["--config", "--dry-run", "--help"],
    "check": ["--config", "--kind", "--help"],
    "generate": ["--model", "--chat", "--system", "--max-new-tokens", "--temperature", "--top-p", "--top-k", "--greedy", "--seed", "--stop", "--precision", "--threads"],
    "chat": ["--model", "--system", "--max-new-tokens", "--temperature", "--top-p", "--seed", "--precision", "--threads"],
    "serve": ["--model", "--served-model-name", "--host", "--port", "--api-key", "--precision", "--threads", "--seed", "--max-model-len", "--kv-cache-gb", "--max-batch-size", "--max-queue", "--max-body-mb", "--request-timeout"],
    "models": ["--responses", "--tokens"],
    "compare": ["--out"],
    "doctor": ["--no-train", "--seconds"],
}  # fmt: skip
_WITH_KEYS = ("train", "eval", "check")
_WITH_FILES = ("report", "compare")


def main(arguments: Sequence[str]) -> int:
    """Prints a shell's script; with --words or --words-bash, which the scripts call, the words that fit."""
    if arguments and arguments[0] in ("--words", "--words-bash"):
        of_bash, begun = arguments[0] == "--words-bash", arguments[-1].removeprefix("|")
        found = bash_candidates(arguments[1], begun) if of_bash else candidates(arguments[1:-1], begun)
        sys.stdout.write("".join(f"{word}\n" for word in found if word.isprintable()))
        return 0
    parser = command_parser("completion", "Print the completion of a shell.", _EXAMPLES)
    parser.add_argument("shell", choices=tuple(_SCRIPTS))
    print(_SCRIPTS[parser.parse_args(arguments).shell].read_text(encoding="utf-8"), end="")
    return 0


def candidates(line: Sequence[str], current: str) -> list[str]:
    """The words that may stand at the cursor. `line`: the words of the command line with the program's name, perhaps with the
    begun one, `current`, at the end."""
    from nemo_rl_cpp.cli import COMMANDS

    words = [*line[1:-1]] if len(line) > 1 and current and line[-1] == current else [*line[1:]]
    if not words:
        return [name for name in [*COMMANDS, "--help", "--version"] if name.startswith(current)]
    command, before = words[0], words[-1]
    if before == "--config":
        from nemo_rl_cpp.config.locate import shipped_configs

        return _fitting(shipped_configs(), current) + _files(current, (".yaml", ".yml"))
    if before == "--model":
        from nemo_rl_cpp.config.known_models import KNOWN_MODELS

        names = ["smollm2-135m-instruct", *(model.name for model in KNOWN_MODELS)]
        return _fitting(names, current) + _files(current, None)
    if before == "--precision":
        return _fitting(["bfloat16", "float32"], current)
    if before == "--kind":
        return _fitting(["grpo", "ppo", "eval"], current)
    if current.startswith("-"):
        return _fitting([*_OPTIONS.get(command, []), "--debug", "--help"], current)
    if command == "completion":
        return _fitting([*_SCRIPTS], current)
    if command in _WITH_KEYS:
        return _overrides(command, words, current)
    return _files(current, None) if command in _WITH_FILES else []


class _Typed(NamedTuple):
    """A line of bash up to the cursor: its words without their quotes, the last one as it was typed, and the quote that is open in
    it ("" without one) with the place behind it."""

    words: list[str]
    last: str
    quote: str
    behind: int


def _typed(line: str) -> _Typed:
    words, start, quote, behind, escaped = [""], 0, "", 0, False
    for place, letter in enumerate(line):
        if escaped:
            words[-1] += letter if quote == "" or letter in '"\\$`' else "\\" + letter
            escaped = False
        elif letter == "\\" and quote != "'":
            escaped = True
        elif quote:
            quote, words[-1] = ("", words[-1]) if letter == quote else (quote, words[-1] + letter)
        elif letter in "'\"":
            quote, behind = letter, place + 1 - start
        elif letter.isspace():
            if place > start:
                words.append("")
            start = place + 1
        else:
            words[-1] += letter
    return _Typed(words, line[start:], quote, behind)


def bash_candidates(line: str, replaced: str) -> list[str]:
    """What bash may put in the place of `replaced`, its own last word of `line`, which ends at the cursor: quoted as the line needs it."""
    typed = _typed(line)
    found = candidates(typed.words, typed.words[-1])
    if typed.quote:  # bash replaces what is behind the opening quote
        kept = typed.last[: typed.behind]
    elif replaced in ("=", ":"):  # it replaces nothing
        kept = typed.last
    else:
        while not typed.last.endswith(replaced):  # only the part before the cursor is replaced
            replaced = replaced[:-1]
        kept = typed.last.removesuffix(replaced)
    before = _typed(kept).words[-1]
    return [_quoted(word.removeprefix(before), typed.quote) for word in found if typed.quote != "'" or "'" not in word]


def _quoted(word: str, quote: str) -> str:
    """A word as it stands in a line of bash, behind an open quote or without one."""
    if quote == "'":
        return word
    return re.sub(r'["\\$`]' if quote else r"[^\w@%+=:,./~-]", r"\\\g<0>", word)


def _fitting(words: Sequence[str], current: str) -> list[str]:
    return list(dict.fromkeys(word for word in words if word.startswith(current)))


def _files(current: str, endings: tuple[str, ...] | None) -> list[str]:
    """Folders and, with these endings, files that begin so; of folders alone where `endings` is None."""
    folder, _, start = current.rpartition("/")
    place = Path(folder or ("/" if current.startswith("/") else ".")).expanduser()
    try:
        entries = sorted(place.iterdir())
    except OSError:
        return []
    head = f"{folder}/" if "/" in current else ""
    shown = []
    for entry in entries:
        if not entry.name.startswith(start) or (entry.name.startswith(".") and not start.startswith(".")):
            continue
        if entry.is_dir():
            shown.append(f"{head}{entry.name}/")
        elif endings and entry.suffix in endings:
            shown.append(f"{head}{entry.name}")
    return shown


def _overrides(command: str, words: Sequence[str], current: str) -> list[str]:
    """`section.key=`, a section at a time as files complete; for a key that is true or false its values."""
    from nemo_rl_cpp.config.keys import section_at
    from nemo_rl_cpp.config.loader import kind_of
    from nemo_rl_cpp.config.master import EvalMasterConfig, GRPOMasterConfig, PPOMasterConfig
    from nemo_rl_cpp.config.messages import known_keys

    models = {"grpo": GRPOMasterConfig, "ppo": PPOMasterConfig, "eval": EvalMasterConfig}
    kind = "eval" if command == "eval" else "grpo"
    place = next((i for i, word in enumerate(words[:-1]) if word == "--config"), None)
    if place is not None:
        try:
            kind = kind_of(words[place + 1])
        except ValueError:
            pass
    model = models[kind]
    key, equals, value = current.partition("=")
    if equals:
        parent, _, name = key.rpartition(".")
        section = section_at(model, parent) if parent else model
        info = section.model_fields.get(name) if section is not None else None
        return [
            f"{key}={word}"
            for word in ("true", "false")
            if info is not None and info.annotation is bool and word.startswith(value)
        ]
    depth = current.count(".")
    found: dict[str, None] = {}
    for known in known_keys(model):
        if known.startswith(current):
            parts = known.split(".")
            found[".".join(parts[: depth + 1]) + ("." if len(parts) > depth + 1 else "=")] = None
    sections = {word[:-1] for word in found if word.endswith(".")}
    return [word for word in found if not (word.endswith("=") and word[:-1] in sections)]
