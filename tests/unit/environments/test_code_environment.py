import json
from pathlib import Path

import pytest
from nemo_rl_cpp.environments.code_environment import CodeEnvironment, extract_code
from nemo_rl_cpp.environments.code_verifier import parse_tests
from nemo_rl_cpp.environments.loading import create_env
from nemo_rl_cpp.environments.sandbox import SandboxUnavailableError, check
from processes import verifier_pids


@pytest.fixture(scope="module")
def env():
    limits = {"time_limit_s": 60.0, "total_time_limit_s": 60.0, "memory_mb": 256}
    environment = CodeEnvironment({"num_workers": 2, **limits})
    yield environment
    environment.shutdown()


def score(env, program, truth, **info):
    log = [{"role": "user", "content": "?"}, {"role": "assistant", "content": program}]
    result = env.step([log], [{"ground_truth": truth, **info}])
    assert result.terminateds.tolist() == [1.0]
    return result.rewards.item(), result.answers[0]


DOUBLE = {"inputs": ["1\n", "21\n", "-4"], "outputs": ["2", "42\n", "-8\n\n"]}


def test_code_environment_scores_programs_by_standard_input_and_output(env):
    assert score(env, "print(2 * int(input()))", DOUBLE) == (1.0, "passed")
    spaces_at_the_end = "print(2 * int(input()), ' ')"
    assert score(env, spaces_at_the_end, json.dumps(DOUBLE)) == (1.0, "passed")
    as_lines = {"inputs": [["3", "4"]], "outputs": [["3", "4"]]}
    assert score(env, "print(input() + '\\n' + input())", as_lines) == (1.0, "passed")
    assert score(env, "print(abs(2 * int(input())))", DOUBLE) == (0.0, "wrong_answer: 2 of 3 tests passed")
    assert score(env, "print(int(input()) / 0)", DOUBLE)[1].startswith("runtime_error: ZeroDivisionError")
    assert score(env, "raise SystemExit(3)", DOUBLE)[1] == "runtime_error: exit code 3"
    assert score(env, "print(", DOUBLE) == (0.0, "syntax_error")
    assert score(env, "print(1)\0", DOUBLE) == (0.0, "syntax_error")
    assert score(env, " \n", DOUBLE) == (0.0, "no_code")
    assert score(env, "print('\\udcff')", DOUBLE)[0] == 0.0


def test_code_environment_scores_functions_by_calls_with_the_arguments_of_the_test_cases(env):
    truth = {"fn_name": "add", "inputs": [[1, 2], ["a", "b"], [[1], [2]]], "outputs": [3, "ab", [1, 2]]}
    assert score(env, "def add(a, b):\n    print('noise')\n    return a + b", truth) == (1.0, "passed")
    assert score(env, "class Solution:\n    def add(self, a, b):\n        return a + b", truth) == (1.0, "passed")
    assert score(env, "def add(a, b): return 3", truth) == (0.0, "wrong_answer: 1 of 3 tests passed")
    assert score(env, "def sub(a, b): return 3", truth)[1].startswith("runtime_error")
    assert score(env, "def add(a, b): return {1, 2}", truth)[1].startswith("runtime_error: TypeError")
    alone = "class Solution:\n    def add(self, a: List[int], b: Optional[int]) -> int:\n        return reduce(operator.add, deque([a, b]))"
    assert score(env, alone, truth) == (1.0, "passed")  # LiveCodeBench imports typing, functools and others itself
    as_text = {"fn_name": "add", "inputs": ["1\n2", '"a"\n"b"', "[1]\n[2]"], "outputs": ["3", '"ab"', "[1, 2]"]}
    assert score(env, "def add(a, b): return a + b", as_text) == (1.0, "passed")


def test_code_environment_scores_functions_by_assert_statements(env):
    truth = ["assert f(2) == (2, 4)", "assert f(3)[1] == 9", "assert abs(f(0.5)[1] - 0.25) < 1e-9"]
    assert score(env, "def f(x): return x, x * x", truth) == (1.0, "passed")
    assert score(env, "def f(x): return [x, x * x]", truth) == (0.0, "wrong_answer: 2 of 3 tests passed")
    assert score(env, "def f(x): return 2, 4", truth) == (0.0, "wrong_answer: 1 of 3 tests passed")
    assert score(env, "def f(x): return x / 0", truth)[1].startswith("runtime_error: ZeroDivisionError")


def test_values_of_subclasses_that_equal_the_expected_value_pass(env):
    program = "from collections import Counter, namedtuple\ndef count(x): return Counter(x)\ndef pairs(): return [namedtuple('P', 'x y')(1, 2)]"
    truth = ["assert count('aab') == {'a': 2, 'b': 1}", "assert pairs() == [(1, 2)]"]
    assert (
        score(env, program + "\ndef values(x): return frozenset(x)", [*truth, "assert values('aa') == {'a'}"])[0] == 1.0
    )
    assert score(env, program, [*truth, "assert pairs() == [(1, 3)]"])[0] == 0.0
    as_python_objects = {"fn_name": "pairs", "inputs": [[]], "outputs": [[(1, 2)]]}
    assert score(env, program, as_python_objects) == (1.0, "passed")


def test_dataclass_with_postponed_annotations_runs(env):
    imports = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    program = f"{imports}@dataclass\nclass A:\n    x: int\ndef f(x): return A(x).x"
    assert score(env, program, ["assert f(2) == 2"]) == (1.0, "passed")


def test_programs_that_exit_early_or_fake_the_expected_output_score_zero(env):
    truth = ["assert f(2) == 4", "assert f(3) == 9"]
    assert score(env, "import os; os._exit(0)", truth)[0] == 0.0
    assert score(env, "raise SystemExit(0)", truth)[0] == 0.0
    forged = 'import os\nfor i in range(3, 20):\n    try: os.write(i, b\'[{"value": "4"}, {"value": "16"}]\')\n    except OSError: pass\nos._exit(0)'
    assert score(env, forged, truth)[0] == 0.0
    assert score(env, "class E:\n    def __eq__(self, other): return True\ndef f(x): return E()", truth)[0] == 0.0
    assert score(env, "class E(int):\n    def __repr__(self): return '4'\ndef f(x): return E()", truth)[0] == 0.0
    without_answers = "def f(x): return '4' if 0 else open('/box/checks.json').read()"
    assert score(env, without_answers, truth)[0] == 0.0
    assert score(env, "def f(x): return [f] * 10**5", truth)[0] == 0.0
    deep = "def f(x):\n    class D:\n        def __repr__(self): return '(' * 5000\n    return D()"
    assert score(env, deep, truth)[0] == 0.0


def nested_finally(depth):
    """Return a program of a few kB that a compiler expands 2^depth times, because each `finally` is compiled twice."""
    lines = [" " * i + line for i in range(depth) for line in ("try: pass", "finally:")]
    return "\n".join([*lines, " " * depth + "x=y;" * 600])


# name -> program; the first three take a compiler long
BOMBS = {
    "nested finally": nested_finally(18),
    "one long sum": "x = " + "1+" * 200_000 + "1",
    "folded constants": "x = [" + "'%d' * 4000," * 20_000 % tuple(range(20_000)) + "]",
    "a power": "x = 9 ** 9 ** 9",
    "a long number": "x = " + "9" * 900_000,
    "brackets": "(" * 100_000,
    "exec in exec": f"s = {nested_finally(18)!r}\nexec('exec(s)')",
    "lines": "\\\n" * 300_000,
    "what a compiler would say, at length": "import os, sys\nsys.stderr.write('SyntaxError: ' + ' ' * 200_000 + '\\nx')\nsys.stderr.flush()\nos._exit(1)",
    "many of them": "import os, sys\nsys.stderr.write('SyntaxError: ' * 15_000 + '\\nx')\nsys.stderr.flush()\nos._exit(1)",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(120)  # half an hour was needed by a pattern that looked for the compiler's words
def test_resource_exhausting_programs_score_zero_and_leave_the_worker_running():
    """All programs run on one worker, which must survive and must not grow."""
    env = CodeEnvironment({"time_limit_s": 1.0, "total_time_limit_s": 2.0, "memory_mb": 128, "num_workers": 1})
    # it starts the worker, which takes longer than the limit on a busy machine
    score(env, "print(2 * int(input()))", DOUBLE)
    worker, before = verifier_pids(env), most_mb(env)
    cases = [(name, DOUBLE) for name in BOMBS] + [(name, ["assert f(2) == 4"]) for name in list(BOMBS)[:3]]
    for name, truth in cases:
        reward, reason = score(env, BOMBS[name], truth)
        assert reward == 0.0 and reason.partition(":")[0] in (
            "memory_limit", "time_limit", "syntax_error", "runtime_error", "wrong_answer",
        ), name  # fmt: skip
    assert verifier_pids(env) == worker and most_mb(env) < before + 16
    assert env.pop_metrics()["verifier_timeouts"] == 0
    env.shutdown()


def most_mb(env):
    text = Path(f"/proc/{verifier_pids(env)[0]}/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) / 1024


SYNTAX_ERRORS = ["print(", " x", "(" * 300, "if 1:\n\tx\n        y", "x = '\udcff'", "return 1", "\x80\0"]


@pytest.mark.parametrize("program", SYNTAX_ERRORS)
def test_response_that_is_not_valid_python_is_counted_as_a_syntax_error(env, program):
    assert score(env, program, DOUBLE) == (0.0, "syntax_error")
    assert score(env, program, ["assert f(2) == 4"]) == (0.0, "syntax_error")


def test_syntax_error_raised_at_run_time_is_reported_as_a_runtime_error(env):
    assert score(env, "eval('(')", DOUBLE)[1].startswith("runtime_error: SyntaxError")
    assert score(env, "raise SyntaxError('x')", ["assert f(2) == 4"])[1] == "runtime_error: SyntaxError: x"


def test_fraction_reward_of_the_code_environment_is_the_share_of_passed_tests():
    env = create_env("code", {"reward": "fraction", "time_limit_s": 60.0})
    assert score(env, "print(abs(2 * int(input())))", DOUBLE)[0] == pytest.approx(2 / 3)
    env.shutdown()


def test_code_is_extracted_from_the_last_code_block_of_a_response(env):
    assert extract_code("Sure:\n```python\nx = 1\n```\nor better\n```py\nx = 2\n```\nDone.") == "x = 2\n"
    assert extract_code("```\nx = 3") == "x = 3"
    assert (
        extract_code("```python3\r\nx = 5\n```\nIt prints\n```\n5\n```\nRun it:\n```bash\npython x.py\n```\nDone.")
        == "x = 5\n"
    )
    assert extract_code("```text\n1\n```\n```\nx = 6\n```\n") == "x = 6\n"
    assert extract_code("x = 4") == "x = 4"
    assert (
        extract_code("1. So:\n   ```python\n   def f():\n       return 1\n   ```\n2. Done.")
        == "def f():\n    return 1\n"
    )
    for mark in (' title="a.py"', ":a.py", "{1-2}"):
        assert extract_code(f"Put it into ```a.py``` now:\n```python{mark}\nx = 7\n```\nDone.") == "x = 7\n"
    assert score(env, "Here it is:\n```python\nprint(2 * int(input()))\n```", DOUBLE)[0] == 1.0
    assert score(env, " 2 * x\n", ["assert f(4) == 8"], code_prefix="def f(x):\n    return")[0] == 1.0


def test_code_environment_metrics_count_failures_by_reason():
    env = CodeEnvironment({"time_limit_s": 2.0, "memory_mb": 128})
    programs = [
        "print(2 * int(input()))", "while True: pass", "x = bytearray(10 * 2**30)", "print(1)", "x = 'y' * 2000",
    ]  # fmt: skip
    logs = [[{"role": "assistant", "content": program}] for program in programs]
    result = env.step(logs, [{"ground_truth": DOUBLE}] * 5)
    assert result.rewards.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert env.pop_metrics() == {
        "verifier_timeouts": 0, "num_time_limit": 1, "num_memory_limit": 1, "num_wrong_answer": 2,
    }  # fmt: skip
    assert env.pop_metrics() == {}
    env.shutdown()


MISTAKES = {
    "not JSON": ("{", "must be tests as JSON"), "nothing": ({}, "needs inputs and outputs"),
    "number": ("3", "needs inputs and outputs"), "empty": ({"inputs": [], "outputs": []}, "every program would pass"),
    "no asserts": ([], "every program would pass"),
    "lengths": ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
    "syntax": (["assert ("], "not one Python statement"), "no text": ([5], "not one Python statement"),
    "a long sum": (["assert " + "1+" * 20_000 + "1 == 1"], "not one Python statement"),
    "a digit after a digit": (["assert f(1) == " + "9" * 5000], "not one Python statement"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_invalid_test_cases_for_the_code_environment_are_errors(env, case):
    truth, message = MISTAKES[case]
    with pytest.raises(ValueError, match=message):
        parse_tests(truth)
    with pytest.raises(ValueError, match=message):
        score(env, "print(1)", truth)


def test_invalid_settings_of_the_code_environment_are_errors():
    least = "memory_mb is 64; the least is 72: folder_mb, and 32 for a Python interpreter"
    for config, message in (
        ({"reward": "some"}, "env.code.reward"), ({"memory_mb": 8}, "64"), ({"memory_mb": 64, "folder_mb": 40}, least),
        ({"time_limit_s": 0}, "env.code.time_limit_s must be greater than 0"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            CodeEnvironment(config)


@pytest.mark.slow
def test_code_environment_raises_if_no_sandbox_is_available(monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import ctypes\n"
        "from nemo_rl_cpp.environments.sandbox import kernel\n"
        "def refused(flags):\n    raise OSError(1, 'unshare: Operation not permitted')\n"
        "kernel.unshare = refused\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SandboxUnavailableError, match="unshare: Operation not permitted(.|\n)*needs Linux"):
        CodeEnvironment({})


@pytest.mark.slow
def test_sandbox_self_test_reports_files_and_network_that_a_program_can_reach(monkeypatch):
    assert check.missing_protections() == []
    monkeypatch.setattr(check, "_PROBE", "print('files: the program sees /etc/passwd')")
    monkeypatch.setattr(check, "_SOCKET", "print('connected')")
    missing = ["files: the program sees /etc/passwd", "network: a program can open a socket"]
    assert check.missing_protections() == missing
