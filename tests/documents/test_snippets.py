"""Every command and program that a document prints is run, checked, or marked as needing what a test machine lacks."""

import re
import shlex
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import tiny
from documents.snippets import KINDS, NEEDS, ROOT, SHOWN, Command, Snippet, all_snippets, commands, lines_of
from nemo_rl_cpp import cli
from nemo_rl_cpp.config.loader import LOADERS, kind_of

SNIPPETS = all_snippets()
DEFAULTS = {"run_ppo": "ppo_math_1B.yaml", "run_eval": "evals/eval.yaml", "eval": "evals/eval.yaml"}
RUN = ("run", "file", "check", "loads")


def complaint(snippet: Snippet) -> str | None:
    """What is wrong with a block's language or mark; None if nothing is."""
    if not snippet.language:
        return "the fence has no language: write ```text for output"
    if snippet.language in SHOWN:
        return None
    if snippet.kind not in KINDS:
        return f"no mark above the fence: <!-- run -->, <!-- check -->, ... (tests/documents/snippets.py); it has {snippet.kind!r}"
    if snippet.kind == "needs" and snippet.value not in NEEDS:
        return f"needs one of {', '.join(NEEDS)}, not {snippet.value!r}"
    if snippet.kind == "check" and not list(commands(snippet.text)):
        return "has no command with a configuration to check"
    if snippet.kind == "tested by":
        file, _, test = snippet.value.partition("::")
        if not (ROOT / file).is_file() or not re.search(rf"def {test}\b", (ROOT / file).read_text()):
            return f"there is no test {snippet.value}"
    return None


def test_every_code_block_of_the_documents_has_a_comment_that_defines_its_test():
    assert len(SNIPPETS) > 40
    assert [f"{s}: {message}" for s in SNIPPETS if (message := complaint(s))] == []


def test_every_test_named_on_the_troubleshooting_page_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "troubleshooting.md").read_text())
    assert len(named) > 10
    assert [(file, test) for file, test in named if not re.search(rf"def {test}\(", (ROOT / file).read_text())] == []


def loads(command: Command) -> None:
    config = command.config or DEFAULTS.get(command.script, "grpo_math_1B.yaml")
    LOADERS[kind_of(config)](config, list(command.overrides))


PRINTED = [(s, command) for s in SNIPPETS if s.language == "bash" and s.kind != "check" for command in commands(s.text)]


@pytest.mark.parametrize(
    "snippet, command", [p for p in PRINTED if p[0].kind not in RUN], ids=lambda value: str(value)[:60]
)
def test_configuration_of_every_documented_command_loads(snippet, command):
    loads(command)


def run_command(words: list[str]) -> int:
    """Runs one command of a bash block; this package's own, and Python files, in this process."""
    while words and (words[0] == "uv" or words[0] == "run" or re.fullmatch(r"\w+=.*", words[0])):
        words = words[1:]
    if words[0] == "nemo-rl-cpp":
        return cli.main(words[1:])
    if script := re.fullmatch(r"examples/run_(\w+)\.py", words[0]):
        return cli.main(["eval" if script[1] == "eval" else "train", *words[1:]])
    if words[0] == "python":
        words[0] = sys.executable
    return subprocess.run(["bash", "-c", shlex.join(words)], timeout=120).returncode


def file_name(snippet: Snippet) -> str:
    return snippet.value or snippet.text.partition("\n")[0].lstrip("# ").strip()


def do(snippet: Snippet, folder: Path, names: dict[str, object]) -> None:
    """Does what the mark of a block says, within `folder`."""
    text = snippet.text
    if snippet.kind == "file":
        path = folder / file_name(snippet)
        path.parent.mkdir(parents=True, exist_ok=True)
        named = snippet.language == "text" and not snippet.value  # its first line is the name and no comment
        path.write_text(text.partition("\n")[2] if named else text)
    elif snippet.kind == "loads":
        (folder / "fragment.yaml").write_text(f"defaults: {snippet.value}\n{text}")
        LOADERS[kind_of(str(folder / "fragment.yaml"))](str(folder / "fragment.yaml"))
    elif snippet.kind == "check":
        for command in commands(text):
            config = command.config or DEFAULTS.get(command.script, "grpo_math_1B.yaml")
            assert cli.main(["check", "--config", config, *command.overrides]) == 0
    elif snippet.kind == "run":
        for change in snippet.value.split("; ") if snippet.value else ():
            long, _, short = change.partition(" as ")
            assert long in text, f"{snippet}: {long!r} is not in the block"
            text = text.replace(long, short)
        if snippet.language == "python":
            exec(compile(text, str(snippet), "exec"), names)  # noqa: S102 - our own documents
        else:
            for words in lines_of(text):
                assert run_command(words) == 0, words


OF_DOCUMENT: dict[str, list[Snippet]] = defaultdict(list)
for _snippet in SNIPPETS:
    if _snippet.kind in RUN:
        OF_DOCUMENT[_snippet.document].append(_snippet)


@pytest.mark.slow
@pytest.mark.parametrize("document", OF_DOCUMENT)
def test_code_blocks_marked_as_runnable_run_without_errors(document, tmp_path, monkeypatch, capfd):
    tiny.one_thread()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    modules = set(sys.modules)
    names: dict[str, object] = {"__name__": "__document__"}
    try:
        for snippet in OF_DOCUMENT[document]:
            try:
                do(snippet, tmp_path, names)
            except BaseException as error:
                error.add_note(f"at {snippet}")
                raise
        for path in tmp_path.rglob("*.yaml"):  # when the files that they name are there, too
            LOADERS[kind_of(str(path))](str(path))
    finally:
        for name in set(sys.modules) - modules:  # those of the document's files: another has files of the same names
            if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(tmp_path):
                del sys.modules[name]
