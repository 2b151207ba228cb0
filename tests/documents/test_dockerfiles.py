"""The Dockerfiles of examples/docker against the tree: what they copy is there, what they install is what pyproject.toml asks for, what
they start exists."""

import re
import subprocess
import tomllib

import pytest
from dockerfiles import instructions, stages
from documents.snippets import ROOT

FILES = sorted((ROOT / "examples" / "docker").glob("Dockerfile.*"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)


def commands(path):
    return "\n".join(run.text for stage in stages(path) for run in stage.of("RUN"))


def test_both_are_there():
    assert [path.name for path in FILES] == ["Dockerfile.cpu", "Dockerfile.cuda"]


@each_file
def test_every_command_is_one_for_bash(path):
    for stage in stages(path):
        assert [shell.words()[0] for shell in stage.of("SHELL")] in ([], ["/bin/bash"])
        for run in stage.of("RUN"):
            checked = subprocess.run(["bash", "-n", "-c", run.text], capture_output=True, text=True)
            assert checked.returncode == 0, f"line {run.line}: {checked.stderr}"


@each_file
def test_what_is_copied_is_there(path):
    made: set[str] = set()
    for stage in stages(path):
        for copy in stage.of("COPY"):
            *sources, _ = copy.words()
            if "from" in copy.options:
                assert copy.options["from"] in made, f"line {copy.line}: no earlier stage has that name"
            else:
                assert all((ROOT / source).exists() for source in sources), f"line {copy.line}: {sources}"
        made.add(stage.name)


@each_file
def test_what_is_installed_is_what_the_project_asks_for(path):
    """Versions that stand in both are equal, and nothing that the build wants is missing."""
    installed = commands(path)
    asked = [*PROJECT["build-system"]["requires"], *PROJECT["project"]["dependencies"]]
    asked += PROJECT["project"]["optional-dependencies"]["smollm2"]
    asked = [line.partition(";")[0].strip() for line in asked]
    pins = dict(line.split("==") for line in asked if "==" in line)
    for name, version in re.findall(r"([\w-]+)==([\d.]+)", installed):
        assert pins[name] == version, f"{name} is {pins.get(name)} in pyproject.toml"
    wanted = [line.partition(";")[0].strip() for line in PROJECT["build-system"]["requires"]]
    missing = [line for line in wanted if line not in installed.replace('"', "")]
    assert missing == (["cuda-toolkit[nvcc]"] if path.suffix == ".cpu" else [])


@each_file
def test_the_image_starts_a_command_that_is_there(path):
    last = stages(path)[-1]
    [entry], command = (instruction.words() for name in ("ENTRYPOINT", "CMD") for instruction in last.of(name))
    assert entry in PROJECT["project"]["scripts"]
    assert (ROOT / "configs" / command[command.index("--config") + 1]).exists()
    assert [user.text for user in last.of("USER")] == ["1000"], "not as root"


def test_what_is_built_here_does_not_go_into_an_image():
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "build", "dist", "logs", "results"} <= set(ignored)


def test_the_reader_of_dockerfiles():
    first, second = instructions("# a\nFROM x AS y\nCOPY --from=y --chown=1:1 a \\\n# between\n  b /c\n")
    assert (first.name, first.text, first.line) == ("FROM", "x AS y", 2)
    assert (second.words(), second.options, second.line) == (["a", "b", "/c"], {"from": "y", "chown": "1:1"}, 3)
    assert instructions('ENV A=1 B="x y" C=')[0].pairs() == {"A": "1", "B": "x y", "C": ""}
    with pytest.raises(ValueError, match="line 2: VOLUME is not one of"):
        instructions("FROM x\nVOLUME /a")
    with pytest.raises(ValueError, match="line 1: the file ends"):
        instructions("RUN a \\")
