import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from nemo_rl_cpp import cli
from nemo_rl_cpp.cli import COMMANDS
from nemo_rl_cpp.commands import completion
from nemo_rl_cpp.commands.completion import bash_candidates, candidates


@pytest.fixture(autouse=True)
def in_a_folder_with_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "logs" / "exp_001").mkdir(parents=True)


def at(text):
    """The candidates with the cursor at the end of a line."""
    current = "" if text.endswith(" ") else text.split(" ")[-1]
    return candidates(text.split(), current)


def test_words_that_fit():
    assert at("nemo-rl-cpp ") == [*COMMANDS, "--help", "--version"] and at("nemo-rl-cpp co") == [
        "configs",
        "compare",
        "completion",
    ]
    assert at("nemo-rl-cpp train --con") == ["--config"]
    assert at("nemo-rl-cpp train --config grpo_t") == ["grpo_tiny.yaml"] and "my.yaml" in at(
        "nemo-rl-cpp train --config "
    )
    assert "notes.txt" not in at("nemo-rl-cpp train --config ") and at("nemo-rl-cpp compare logs/") == ["logs/exp_001/"]
    assert at("nemo-rl-cpp check --kind p") == ["ppo"] and at("nemo-rl-cpp completion ") == ["bash", "zsh", "fish"]
    assert at("nemo-rl-cpp chat --model Qwen/Qwen3-0") == ["Qwen/Qwen3-0.6B"] and at("nemo-rl-cpp nothing x") == []


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_option_of_a_commands_help_is_offered(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    usage = capsys.readouterr().out.partition("\n\n")[0]
    assert set(re.findall(r"(?<!\w)--[a-z][\w-]*", usage)) - {"--version"} <= set(at(f"nemo-rl-cpp {command} --"))


def test_keys_of_the_configurations_kind_come_section_by_section():
    assert {"grpo.", "policy.", "loss_fn."} <= set(at("nemo-rl-cpp train ")) and "ppo." not in at("nemo-rl-cpp train ")
    assert "ppo." in at("nemo-rl-cpp train --config ppo_tiny.yaml p") and "eval." in at("nemo-rl-cpp eval e")
    assert at("nemo-rl-cpp train grpo.num_gen") == ["grpo.num_generations_per_prompt="]
    assert at("nemo-rl-cpp train grpo.use_dynamic_sampling=") == [
        "grpo.use_dynamic_sampling=true",
        "grpo.use_dynamic_sampling=false",
    ]


@pytest.mark.parametrize(
    ("typed", "replaced", "expected"),
    [  # what stands in the line, the part of it that bash replaces, and by what
        ("m", "m", ["my\\ logs/"]),
        (r"my\ l", r"my\ l", ["my\\ logs/"]),
        (r"my\ logs/", r"my\ logs/", ["my\\ logs/it\\'s\\ \\$1/"]),
        ('"my l', '"my l', ["my logs/"]),
        ('"my logs/', '"my logs/', ["my logs/it's \\$1/"]),
        ("'my l", "'my l", ["my logs/"]),
        ("'my logs/", "'my logs/", []),  # its name has the quote that is open
        ("my' 'l", "my' 'l", ["my\\ logs/"]),
    ],
)
def test_bash_gets_words_with_spaces_in_quotes(typed, replaced, expected, tmp_path):
    (tmp_path / "my logs" / "it's $1").mkdir(parents=True)
    assert bash_candidates(f"nemo-rl-cpp  report {typed}", replaced) == expected


def test_a_name_of_several_lines_is_left_out(tmp_path, capsys):
    (tmp_path / "a\nb").mkdir()
    (tmp_path / "ab").mkdir()
    assert completion.main(["--words", "nemo-rl-cpp", "report", "a", "|a"]) == 0
    assert capsys.readouterr().out == "ab/\n"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("line", "words", "expected"),
    [
        ("nemo-rl-cpp trai", ["nemo-rl-cpp", "trai"], ["train"]),
        ("nemo-rl-cpp train --config my", ["nemo-rl-cpp", "train", "--config", "my"], ["my.yaml"]),
        ("nemo-rl-cpp report our\\ l", ["nemo-rl-cpp", "report", "our\\ l"], ["our\\ logs/"]),
        # bash cuts words at "="
        ("nemo-rl-cpp train grpo.val_at_end=t", ["nemo-rl-cpp", "train", "grpo.val_at_end", "=", "t"], ["true"]),
        ("nemo-rl-cpp train grpo.val_at_end=", ["nemo-rl-cpp", "train", "grpo.val_at_end", "="], ["true", "false"]),
    ],
)
def test_bash_completes(line, words, expected, capsys, tmp_path):
    (tmp_path / "our logs").mkdir()
    assert completion.main(["bash"]) == 0
    script = capsys.readouterr().out
    listed = " ".join(f"'{word}'" for word in words)
    program = (
        f"{script}\nCOMP_LINE='{line}' COMP_POINT={len(line)} COMP_WORDS=({listed}) COMP_CWORD={len(words) - 1}\n_nemo_rl_cpp\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    place = str(Path(sys.executable).parent)
    done = subprocess.run(
        ["bash", "-c", program], capture_output=True, text=True, env={"PATH": f"{place}:/usr/bin:/bin"}, check=True
    )
    assert done.stdout.splitlines() == expected, done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_scripts_are_grammatical(shell, capsys):
    assert completion.main([shell]) == 0
    script = capsys.readouterr().out
    assert "completion --words" in script
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n"], input=script, text=True, check=True)
