import asyncio
import json
from pathlib import Path

import pytest
import torch
from nemo_rl_cpp import errors
from nemo_rl_cpp.command_line import program
from nemo_rl_cpp.environments.reward_environment import RewardFunctionEnvironment
from nemo_rl_cpp.errors import UserCodeError, one_sentence, save_traceback, user_place
from nemo_rl_cpp.interrupts import Ended

LOG = [[{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]]
HERE = Path(__file__).name


def caught(call, *arguments):
    with pytest.raises(BaseException) as info:
        call(*arguments)
    return info.value


def scored(function, columns=({"truth": "2"},)):
    return RewardFunctionEnvironment(function).step(LOG, [dict(row) for row in columns])


def missing(completions, **columns):
    return columns["answer"]


def test_reward_function_for_trl_messages_gets_a_hint_that_completions_are_texts():
    error = caught(scored, lambda completions, **columns: [len(each[0]["content"]) for each in completions])
    assert str(error).endswith("; prompts and completions are texts here, also for conversations")


def test_exception_in_user_code_keeps_its_type_and_names_the_line_that_raised_the_exception():
    error = caught(scored, missing)
    assert isinstance(error, KeyError) and isinstance(error, UserCodeError)
    line = missing.__code__.co_firstlineno + 1
    assert str(error).startswith("reward function missing failed with KeyError 'answer', in missing (")
    assert f"{HERE}:{line})" in str(error)
    assert str(error).endswith("; the samples have no column 'answer', they have completions, prompts, truth")
    assert type(error.__cause__) is KeyError and one_sentence(error) == str(error)


class OddError(Exception):
    def __init__(self, first, second):
        super().__init__(first, second)


@pytest.mark.parametrize("raised, kind, text", [
    (OSError(28, "No space left on device"), OSError, "OSError: [Errno 28] No space left on device"),
    (OddError("a", "b"), OddError, "OddError: ('a', 'b')"),
    (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), UnicodeDecodeError, "UnicodeDecodeError: 'utf-8' codec"),
    (ValueError(), ValueError, "failed with ValueError, in"),
    (RuntimeError("one\n  two\n\nthree"), RuntimeError, "RuntimeError: one; two; three, in"),
    (json.JSONDecodeError("bad", "x", 0), json.JSONDecodeError, "JSONDecodeError: bad"),
])  # fmt: skip
def test_exceptions_of_every_type_in_user_code_are_reported_in_one_line(raised, kind, text):
    def reward(completions):
        raise raised

    error = caught(scored, reward)
    assert isinstance(error, kind) and text in str(error) and "\n" not in str(error)


class KeyboardInterruptLike(BaseException):
    """No Exception, as some libraries derive theirs."""


@pytest.mark.parametrize("raised", [
    StopIteration(), StopAsyncIteration("x"), GeneratorExit(), asyncio.CancelledError(), KeyboardInterruptLike(),
    BaseExceptionGroup("x", [SystemExit(0)]),
])  # fmt: skip
def test_control_flow_exceptions_in_a_reward_function_are_reported_as_errors(raised):
    def reward(completions):
        raise raised

    error = caught(scored, reward)
    assert isinstance(error, errors.UserCodeError) and type(raised) not in type(error).__mro__
    assert str(error).startswith(f"reward function reward failed with {type(raised).__name__}") and HERE in str(error)


def test_keyboard_interrupt_in_a_reward_function_is_raised_unchanged():
    def reward(completions):
        raise KeyboardInterrupt

    assert type(caught(scored, reward)) is KeyboardInterrupt


def test_error_inside_a_library_is_reported_with_the_calling_line_of_user_code():
    def reward(completions):
        return torch.zeros(2) @ torch.zeros(3)

    error = caught(scored, reward)
    assert "reward (" in str(error) and HERE in str(error)


def test_error_in_an_installed_reward_function_names_its_file_and_line(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "installed_rewards.py").write_text("def reward(completions, **columns):\n    return columns['answer']\n")
    monkeypatch.syspath_prepend(folder)
    error = caught(scored, "installed_rewards.reward")
    assert isinstance(error, KeyError) and "installed_rewards.py:2); the samples have no column 'answer'" in str(error)


def test_errors_raised_by_the_package_itself_are_reported_unchanged():
    error = caught(scored, lambda completions: [1.0, 2.0])
    assert user_place(error) is None and type(error) is ValueError
    assert one_sentence(error) == "reward function <lambda> returned 2 rewards for 1 completions"


def test_file_and_import_errors_are_reported_in_one_line(tmp_path):
    from nemo_rl_cpp.report.page import write_report

    said = f"{tmp_path} holds no metrics.jsonl: give the log folder of a run, such as logs/exp_001"
    assert one_sentence(caught(write_report, tmp_path)) == said
    assert "nowhere.txt': No such file or directory" in one_sentence(caught(open, tmp_path / "nowhere.txt"))
    error = ModuleNotFoundError("No module named 'nobody.auto'", name="nobody.auto")
    assert one_sentence(error) == "the package nobody is not installed: run `pip install nobody`"
    assert one_sentence(ModuleNotFoundError("No module named 'sklearn'", name="sklearn")).endswith(
        "run `pip install scikit-learn`"
    )
    assert one_sentence(MemoryError()).startswith("out of memory; `--dry-run` shows")
    assert one_sentence(TypeError("x" * 5000)).endswith("...") and len(one_sentence(TypeError("x" * 5000))) < 700
    noisy = RuntimeError("bad shape\nException raised from run at a.cpp:3 (most recent call first):\nframe #0: ...")
    assert one_sentence(noisy) == "bad shape"


def test_unexpected_internal_error_names_the_function_and_line():
    from nemo_rl_cpp.algorithms.reward_functions import band_factor

    sentence = one_sentence(caught(band_factor, 1.0, 3))
    assert sentence.startswith("unexpected AttributeError: ")
    assert "in band_factor (nemo_rl_cpp/algorithms/reward_functions.py:" in sentence


def test_traceback_of_an_error_is_saved_in_the_log_folder_or_in_a_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(errors, "_folder", None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    error = caught(scored, missing)
    path = save_traceback(error)
    assert path.parent == tmp_path and "KeyError: 'answer'" in path.read_text()
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(errors, "_folder", tmp_path / "run")
    assert save_traceback(error) == tmp_path / "run" / "error.txt"
    monkeypatch.setattr(errors, "_folder", tmp_path / "gone")
    assert save_traceback(error).parent == tmp_path
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    assert save_traceback(error) is None


@pytest.mark.parametrize("raised, status, says", [
    (SystemExit(0), 1, "error: "), (SystemExit(), 1, "error: "), (SystemExit("words"), 1, "error: "), (ValueError("no"), 1, "error: "),
    (KeyboardInterrupt(), 130, "interrupted"), (Ended(15), 143, "ended by SIGTERM"), (BaseException("odd"), 1, "error: "),
])  # fmt: skip
def test_exit_status_depends_on_the_exception_that_ended_a_program(raised, status, says, capfd, monkeypatch, tmp_path):
    monkeypatch.setattr(errors, "_folder", tmp_path)
    with program() as outcome:
        raise raised
    assert outcome.status == status
    shown = capfd.readouterr().err.strip()
    assert shown.startswith(says) and shown.count("\n") == 0
    with program() as outcome:
        outcome.status = 2
    assert outcome.status == 2


def test_debug_flag_prints_the_traceback_before_the_error_line(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(errors, "_folder", tmp_path)
    with program(debug=True) as outcome:
        scored(missing)
    assert outcome.status == 1
    shown = capsys.readouterr().err
    assert "Traceback (most recent call last)" in shown and shown.splitlines()[-1].startswith(
        "error: reward function missing"
    )


def test_error_is_reported_even_if_the_working_directory_was_deleted(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    error = caught(scored, eval("lambda completions, **columns: 1 / 0"))
    assert one_sentence(error).startswith("reward function <lambda> failed with ZeroDivisionError: division by zero")
