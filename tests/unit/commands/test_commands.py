import subprocess
import sys

import pytest
from nemo_rl_cpp import cli
from nemo_rl_cpp.commands import runs
from nemo_rl_cpp.config.loader import shipped_configs


def test_error_for_an_unknown_command_suggests_the_nearest_command(capsys):
    assert cli.main(["trian"]) == 2 and "unknown command trian; did you mean train?" in capsys.readouterr().err
    assert cli.main(["--verbose"]) == 2 and "unknown option --verbose" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(set(cli.COMMANDS) - {"train", "eval"}))
def test_every_command_has_a_help_with_examples(name, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and "examples:" in shown and f"nemo-rl-cpp {name}" in shown


def test_every_shipped_configuration_has_a_description(capsys):
    texts = runs.descriptions()
    assert list(texts) == list(shipped_configs()) and not [name for name, text in texts.items() if len(text) < 20]
    assert cli.main(["configs", "vapo_tiny"]) == 0
    assert capsys.readouterr().out.startswith("vapo_tiny.yaml  VAPO on the task of ppo_tiny.yaml: returns")
    assert cli.main(["configs", "nothing-like-it"]) == 1


def test_files_with_the_names_of_shipped_configurations_are_read_only_if_they_are_given(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("grpo_tiny.yaml", "ppo_tiny.yaml"):
        (tmp_path / name).write_text("# mine\ndefaults: nothing.yaml\n")
    assert "mine" not in runs.descriptions().values()
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    assert "  grpo_tiny.yaml" in capsys.readouterr().out
    assert cli.main(["check", "--config", "grpo_tiny.yaml"]) == 2
    assert "grpo_tiny.yaml:2: the configuration file nothing.yaml does not exist" in capsys.readouterr().err


@pytest.mark.slow
def test_commands_that_do_not_need_torch_do_not_import_torch(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/reward": 0.5}\n')
    for words in (["configs"], ["report", str(tmp_path)], ["--help"], ["models"]):
        program = f"import sys; from nemo_rl_cpp import cli\ntry: cli.main({words!r})\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert done.returncode == 0, (words, done.stderr)


def test_check_command_prints_the_command_that_starts_a_vllm_server(capsys):
    words = ["--config", "grpo_tiny.yaml", "policy.generation.backend=vllm"]
    assert cli.main(["check", *words, "policy.generation.vllm_cfg.server_url=http://127.0.0.1:8123"]) == 0
    shown = capsys.readouterr().out
    assert "the server is started like this:\n  VLLM_SERVER_DEV_MODE=1 PYTHONPATH=" in shown and "--port 8123" in shown
    assert cli.main(["check", *words]) == 0 and "VLLM_SERVER" not in capsys.readouterr().out
