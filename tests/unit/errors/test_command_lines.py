import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from nemo_rl_cpp import __version__, cli, run_eval, run_grpo_math, run_ppo
from nemo_rl_cpp.command_line import _plain_warnings, program, unknown_option

ROOT = Path(__file__).resolve().parents[3]
TINY = [
    "--config", "grpo_tiny.yaml", "grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4", "policy.train_global_batch_size=32",
    "grpo.val_period=0", "grpo.val_at_end=false", "checkpointing.enabled=false", "logger.tensorboard_enabled=false",
]  # fmt: skip

OPTIONS = ("--config", "--debug", "--help")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("nemo_rl_cpp.errors._folder", None)


def leaves_with(main, arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


@pytest.mark.parametrize("words, message", [
    (["--list"], "unknown option --list"),
    (["-x"], "unknown option -x"),
    (["--grpo.seed", "10"], "write grpo.seed=10"),
    (["--grpo.seed=10"], "write grpo.seed=10"),
    (["--grpo.seed", "a.b=1"], "write grpo.seed=VALUE"),
    (["--policy.generation.temperature", "-1"], "write policy.generation.temperature=-1"),
    (["grpo.seed=3", "--debugg"], "unknown option --debugg; did you mean --debug?"),
])  # fmt: skip
def test_unknown_command_line_option_is_reported_in_one_line(words, message, capsys):
    assert message in unknown_option(words, OPTIONS)
    for main in (run_grpo_math.main, run_ppo.main, run_eval.main):
        assert leaves_with(main, words) == 2
        shown = capsys.readouterr().err
        assert message in shown and shown.count("\n") == 1
    assert leaves_with(cli.main, ["check", "--config", "grpo_tiny.yaml", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words, message", [
    (["generate", "--model", "m", "--max-tokens", "5", "12"], "unknown option --max-tokens; did you mean --max-new-tokens?"),
    (["generate", "--model", "m", "-5+3="], "unknown option -5+3; --help lists the options, and a text that begins with a dash comes after --"),
    (["generate", "--modle", "m", "12"], "unknown option --modle; did you mean --model?"),
    (["generate", "-m", "m", "12"], "unknown option -m; the following arguments are required: --model"),
    (["generate", "-5+3="], "the following arguments are required: --model"),
    (["chat", "--model", "m", "--temp=1"], "unknown option --temp; did you mean --temperature?"),
    (["serve", "--model", "m", "--served-model-name", ""], "--served-model-name is empty: give one, or leave it out"),
    (["train", "grpo_tiny.yaml"], "grpo_tiny.yaml is not an override: a file is given by --config grpo_tiny.yaml"),
    (["check", "grpo_tiny.yaml"], "grpo_tiny.yaml is not an override: a file is given by --config grpo_tiny.yaml"),
    (["check", "grpo.seed=3"], "--config is missing: give a YAML file, or the name of a shipped one"),
])  # fmt: skip
def test_error_for_an_invalid_command_line_option_says_what_to_write_instead(words, message, capsys):
    assert leaves_with(cli.main, words) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_configuration_overrides_that_contain_dashes_are_not_parsed_as_options():
    assert unknown_option(["a.b=1", "+a.c=-2", "~a.d", "++x={y: --z}", "-"], OPTIONS) is None


@pytest.mark.parametrize("main", [run_grpo_math.main, run_ppo.main, run_eval.main, cli.main])
def test_every_command_prints_version_and_help(main, capsys):
    assert leaves_with(main, ["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"nemo_rl_cpp {__version__}"
    assert leaves_with(main, ["--help"]) == 0
    shown = capsys.readouterr().out
    if main is not cli.main:
        listed = shown.partition("shipped configurations:")[2].split()
        assert "examples:" in shown and len(listed) >= 3
        assert ("ppo_tiny.yaml" in listed) == (main is run_ppo.main)
        assert ("grpo_tiny.yaml" in listed) == (main is run_grpo_math.main)


def test_train_and_eval_commands_run_configurations_of_every_algorithm(capsys):
    """From a wheel there are no scripts: `nemo-rl-cpp train` and `eval` are the same runs."""
    for command, file in (("train", "grpo_tiny.yaml"), ("train", "ppo_tiny.yaml"), ("eval", "evals/eval.yaml")):
        assert cli.main([command, "--config", file, "--dry-run"]) == 0
        assert "model_name: " in capsys.readouterr().out
    assert cli.main(["configs"]) == 0 and "\ngrpo_tiny.yaml  " in capsys.readouterr().out
    assert cli.main(["train", "--config", "nowhere.yaml"]) == 2
    assert "nowhere.yaml does not exist" in capsys.readouterr().err
    assert cli.main(["report", "."]) == 2 and "holds no metrics.jsonl" in capsys.readouterr().err
    assert cli.main([]) == 2
    listed = capsys.readouterr().err
    assert all(name in listed for name in ("train", "eval", "check", "generate", "report", "configs"))


@pytest.mark.parametrize("main, config, words", [
    (run_eval.main, "grpo_tiny.yaml", "grpo makes the file a configuration of a GRPO run, not of an evaluation: it is run by examples/run_grpo_math.py"),
    (run_grpo_math.main, "evals/eval.yaml", "eval makes the file a configuration of an evaluation, not of a GRPO run: it is run by examples/run_eval.py"),
    (run_grpo_math.main, "ppo_tiny.yaml", "ppo makes the file a configuration of a PPO run"),
    (run_ppo.main, "grpo_tiny.yaml", "grpo makes the file a configuration of a GRPO run"),
])  # fmt: skip
def test_configuration_for_another_algorithm_is_an_error_that_names_the_right_script(main, config, words, capsys):
    assert main(["--config", config]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 2 and words in shown


def test_errors_of_an_evaluation_name_evaluation_keys_and_not_training_keys(capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", "empty")
    assert run_eval.main(["generation.model_name=nobody/has-this"]) == 1, "with a network it may succeed"
    shown = capsys.readouterr().err
    assert "generation.model_name" in shown and "policy.model_name" not in shown and "data.train." not in shown
    assert "configs/evals/arithmetic_smollm2.yaml" in shown


def test_commands_exit_with_status_2_for_user_mistakes_and_1_for_failures(capsys):
    missing = ["--model", "./nowhere"]
    for words in (
        ["generate", *missing, "text"], ["chat", *missing], ["serve", *missing, "--port", "0"],
        ["export", *missing, "--gguf", "f16", "--out", "model.gguf"], ["report", "nowhere"], ["compare", "a", "b"],
        ["chat", *missing, "--temperature", "-1"],
    ):  # fmt: skip
        assert cli.main(words) == 2, words
        shown = capsys.readouterr().err
        assert shown.startswith("error: ") and shown.count("\n") == 1
        assert "details" not in shown and "policy." not in shown
    assert shown.startswith("error: temperature = -1.0: expected a number"), "found before the model is loaded"
    with program() as outcome:
        raise ValueError("step 7 has no prompts")
    shown = capsys.readouterr().err
    assert outcome.status == 1 and "ValueError" in Path(re.search(r"\(details: (.*)\)", shown)[1]).read_text()


def test_warnings_are_printed_in_one_line_without_file_name_and_source_line():
    before = warnings.formatwarning
    with _plain_warnings():
        line = warnings.formatwarning(UserWarning("two\nlines"), UserWarning, "observe.py", 65)
        assert line == "warning: two lines\n"
    assert warnings.formatwarning is before


def test_dry_run_prints_the_memory_estimate_and_whether_the_run_fits_in_memory(capsys, monkeypatch):
    monkeypatch.setattr("nemo_rl_cpp.models.memory.machine_memory", lambda: 23e9)
    assert run_grpo_math.main(["--config", "grpo_tiny.yaml", "--dry-run"]) == 0
    shown, warned = capsys.readouterr()
    assert shown.startswith("Peak memory by phase") and "fits into this machine's 23 GB" in shown and not warned

    def dry_run(sizes, *overrides):
        heads = "num_attention_heads: 32, num_key_value_heads: 8"
        sizes = f"policy.hf_config_overrides={{{sizes}, {heads}}}"
        return run_grpo_math.main(["--config", "grpo_tiny.yaml", "--dry-run", sizes, *overrides])

    large = "hidden_size: 4096, intermediate_size: 14336, num_hidden_layers: 32, vocab_size: 128256"
    assert dry_run(large) == 2
    shown, refused = capsys.readouterr()
    assert "does not fit into this machine's 23 GB" in shown
    said = r"error: policy.model_name is tiny-random, whose .* alone take [\d.]+ GB, but this machine has [\d.]+ GB"
    assert re.match(said, refused)
    wide = "hidden_size: 2048, intermediate_size: 8192, num_hidden_layers: 16, vocab_size: 16, max_position_embeddings: 512"
    batch = "policy.train_micro_batch_size=64", "policy.max_total_sequence_length=400"
    assert dry_run(wide, *batch, "policy.generation.max_new_tokens=3") == 0
    assert capsys.readouterr().err.startswith("warning: the forecast of memory, ")


def started(*arguments, **environment):
    return subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


HANGING = """\
import time
def hangs(completions, **_):
    print("hanging", flush=True)
    while True:
        try:
            time.sleep(1000)
        except BaseException:
            pass
"""


@pytest.mark.slow
def test_second_interrupt_signal_ends_a_run_whose_reward_function_hangs():
    """The function's module lies beside the configuration, and another one in the working directory: both are found, though
    `examples/run_grpo_math.py` puts neither folder on Python's path."""
    Path("mine").mkdir()
    Path("mine/beside_the_config.py").write_text(HANGING)
    Path("in_the_folder.py").write_text("def left(completions, **_):\n    return [0.0 for _ in completions]\n")
    Path("mine/run.yaml").write_text(
        f"defaults: {ROOT / 'configs/grpo_tiny.yaml'}\ndata: {{default: {{env_name: reward_functions}}}}\n"
        "env: {reward_functions: {functions: [in_the_folder.left, beside_the_config.hangs]}}\n"
    )
    script = str(ROOT / "examples/run_grpo_math.py")
    run = started(script, "--config", "mine/run.yaml", *TINY[2:], "logger.log_dir=logs")
    for line in run.stdout:
        if "hanging" in line:
            break
    run.send_signal(signal.SIGINT)
    first = [run.stderr.readline(), run.stderr.readline()]
    assert "saves nothing" in first[1] and "with a checkpoint" not in first[1]
    run.send_signal(signal.SIGTERM)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 143 and "ended by SIGTERM: stopped at once" in err and "Traceback" not in err


@pytest.mark.slow
def test_ctrl_c_while_torch_is_imported_ends_the_program_without_a_traceback(tmp_path):
    code = (
        "import os, signal, sys, threading\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch._tensor':\n"
        "            sys.meta_path.remove(self)\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "from nemo_rl_cpp.run_grpo_math import main\n"
        f"sys.exit(main({[*TINY, 'grpo.max_num_steps=1000']!r}))\n"
    )
    run = started("-c", code)
    out, err = run.communicate(timeout=120)
    assert run.returncode in (130, -signal.SIGINT) and "step 1" not in out  # both are 130 in a shell
    assert err.strip() == "interrupted: stopped at once"


@pytest.mark.slow
@pytest.mark.parametrize("words, said", [
    (["--help"], ""),
    (["--version"], ""),
    (["configs"], ""),
    (["train", "--config", "grpo_tiny.yaml", "--dry-run"], ""),
    (["train", *TINY], "ended: nobody reads what the run prints, its output is a closed pipe"),
    (["train", "--config", "grpo_tiny.yaml", "grpo.sed=1"], "grpo.sed"),
])  # fmt: skip
def test_command_with_closed_standard_output_ends_without_a_traceback(words, said):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "nemo_rl_cpp.cli", *words], stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert done.returncode == (2 if "grpo.sed=1" in words else 141)
    assert said in done.stderr if said else done.stderr == ""
    assert "Traceback" not in done.stderr and "Broken pipe" not in done.stderr


def test_broken_pipe_error_is_reported_if_standard_output_is_still_open(capsys):
    with program() as outcome:
        raise BrokenPipeError(32, "Broken pipe")
    assert outcome.status == 1
    assert "Broken pipe" in capsys.readouterr().err
