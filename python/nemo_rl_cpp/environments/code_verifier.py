"""Tests of programs: the formats in which data sets specify them, and the verifier that runs them in the sandbox."""

import ast
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from nemo_rl_cpp.environments.sandbox import Limits, Outcome, run_program
from nemo_rl_cpp.environments.sandbox.inside import BOX
from nemo_rl_cpp.environments.verifiers import Verdict, VerifierBase, VerifierUseError

_LONGEST_VALUE = 100_000  # a longer result is not parsed; this length takes 0.2 s and 50 MB at worst
_UNCOMPILED = ("SyntaxError: ", "IndentationError: ", "TabError: ", "RecursionError: ", "OverflowError: ")

# Modules whose names a solution with `fn_name` may use without importing them, as in LiveCodeBench
_IMPORTED = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools", "functools",
    "operator", "io", "sys", "json", "builtins", "typing",
)  # fmt: skip

# Runs the solution, then the checks, and writes the results to a descriptor that the solution does not print to.
HARNESS = """
import json, os, sys, types
def plain(value):  # Counter, namedtuple and others equal a literal, but their repr is none
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    for kind, kinds in ((list, list), (tuple, tuple), (set, (set, frozenset))):
        if isinstance(value, kinds):
            return kind(map(plain, value))
    return value
with open("/box/checks.json") as file:
    plan = json.load(file)
with open("/box/solution.py", encoding="utf-8", errors="surrogatepass") as file:
    source = file.read()
results = os.dup(1)
nowhere = os.open("/dev/null", os.O_WRONLY)
os.dup2(nowhere, 1)
os.close(nowhere)
sys.modules["solution"] = types.ModuleType("solution")  # dataclasses look up the module of a class
space = vars(sys.modules["solution"])
space["__file__"] = "/box/solution.py"
try:
    program = compile(source, "/box/solution.py", "exec")
except (SyntaxError, ValueError, RecursionError, OverflowError) as error:
    sys.exit("SyntaxError: " + str(error)[:200])
for statement in ("from {} import *", "import {}"):
    for name in plan["imports"]:
        exec(statement.format(name), space)
if plan["imports"]:
    sys.setrecursionlimit(50000)  # also as in LiveCodeBench
given = dict(space)
exec(program, space)
found = []
for check in plan["checks"]:
    try:
        if "call" in check:
            name = check["call"]
            is_own = name in space and space[name] is not given.get(name, given)
            target = space[name] if is_own else getattr(space["Solution"](), name)
            found.append({"value": json.dumps(target(*check["arguments"]))})
        elif "expression" in check:
            found.append({"value": repr(plain(eval(check["expression"], space)))})
        else:
            exec(check["statement"], space)
            found.append({"passed": plan["token"]})
    except MemoryError:
        raise
    except AssertionError:
        found.append({})
    except Exception as error:
        found.append({"error": type(error).__name__ + ": " + str(error)[:200]})
os.write(results, json.dumps(found).encode())
"""


Check = dict[str, object]
"""A test for `HARNESS`: {"call": name, "arguments": list}, {"expression": text} or {"statement": text}."""

CheckResult = dict[str, str]
"""The result of a test from `HARNESS`: {"value": value of a call or expression as text}, {"passed": the run's random
secret, which the tested code cannot guess} for a statement, {"error": the exception}, or {} for a failed assert."""

Runner = Callable[..., Outcome]  # `run_program` with limits already applied: (source, stdin=..., files=...) -> Outcome


@dataclass(frozen=True)
class TestResult:
    """The result of `count` tests, `passed` of which succeeded. `outcome` is the run of the program in which the first
    test failed (None: all passed), and `detail` the error of this test, if known."""

    __test__ = False  # pytest must not collect this class

    passed: int
    count: int
    outcome: Outcome | None = None
    detail: str = ""


@dataclass(frozen=True)
class CodeTests:
    """The tests of one problem: either `pairs` of input and output, or `checks` of values."""

    # (standard input, expected standard output). Each pair is a separate run. Trailing spaces of lines and trailing
    # empty lines are ignored.
    pairs: list[tuple[str, str]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)  # the tests for `HARNESS`, all in one run
    # the expected value of each check, or None for a statement. It is compared outside the sandbox, so that the program
    # never sees it.
    expected: list[object] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.pairs) + len(self.checks)

    def run(self, source: str, runner: Runner) -> TestResult:
        return self._run_pairs(source, runner) if self.pairs else self._run_checks(source, runner)

    def _run_pairs(self, source: str, runner: Runner) -> TestResult:
        passed, failure = 0, None
        for stdin, wanted in self.pairs:
            outcome = runner(source, stdin=stdin)
            printed = _lines(outcome.stdout.decode(errors="replace"))
            if outcome.exit_code == 0 and outcome.stopped is None and printed == _lines(wanted):
                passed += 1
            elif failure is None:
                failure = outcome
            if outcome.stopped is not None or uncompiled(outcome):  # a program that hit a limit is not run again
                break
        return TestResult(passed, len(self), failure)

    def _run_checks(self, source: str, runner: Runner) -> TestResult:
        token = secrets.token_hex(8)
        imports = _IMPORTED if any("call" in check for check in self.checks) else ()
        plan = json.dumps({"checks": self.checks, "token": token, "imports": imports})
        files = {"checks.json": plan.encode(), "solution.py": source.encode("utf-8", "surrogatepass")}
        outcome = runner(HARNESS, files=files)
        found = _results(outcome, len(self.checks))
        results = zip(self.checks, self.expected, found)
        good = [_fulfils(check, wanted, result, token) for check, wanted, result in results]
        detail = next((result.get("error", "") for result, right in zip(found, good) if not right), "")
        return TestResult(sum(good), len(self), None if all(good) else outcome, detail)


def uncompiled(outcome: Outcome) -> bool:
    """Return whether the program did not compile: exit status 1, and an error like SyntaxError without traceback."""
    errors = outcome.stderr.decode(errors="replace")
    last = errors.rstrip().rpartition("\n")[2]  # no regex, which may never end on a megabyte of output
    return outcome.exit_code == 1 and "Traceback (most recent" not in errors and last.startswith(_UNCOMPILED)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _results(outcome: Outcome, count: int) -> list[CheckResult]:
    """Return the `count` results that a run wrote as JSON; all {} if it failed or its output is invalid."""
    found = None
    if outcome.exit_code == 0 and outcome.stopped is None:
        with suppress(ValueError, RecursionError):
            found = json.loads(outcome.stdout)
    if isinstance(found, list) and len(found) == count and all(isinstance(one, dict) for one in found):
        return found
    return [{}] * count


def _fulfils(check: Check, wanted: object, result: CheckResult, token: str) -> bool:
    if "statement" in check:
        return result.get("passed") == token
    text = result.get("value")
    if not isinstance(text, str) or len(text) > _LONGEST_VALUE:
        return False
    try:
        if "call" in check:  # `wanted` may be a Python object with tuples, which are lists in JSON
            return bool(json.loads(text) == json.loads(json.dumps(wanted)))
        return bool(ast.literal_eval(text) == wanted)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False


def parse_tests(ground_truth: object) -> CodeTests:
    """Return the tests in a sample's `ground_truth`, which is a value or its JSON text. The formats are:

    - {"inputs": [text, ...], "outputs": [text, ...]}: standard input and expected standard output. A text may be a
      list of its lines.
    - {"fn_name": name, "inputs": [[argument, ...], ...], "outputs": [value, ...]}: calls of a function (or of a method
      of class Solution) and expected values. As in LiveCodeBench, arguments and value of a call may be texts in JSON,
      with one argument per line, and the program need not import what such programs use (`_IMPORTED`).
    - {"asserts": [statement, ...]} or just the list. For `assert EXPRESSION == LITERAL` the value is compared outside
      the program. Any other statement runs inside the program, where a malicious program could fake its success.

    Raise ValueError with the mistake for anything else."""
    truth = ground_truth
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except ValueError:
            raise ValueError(f"ground_truth of a code problem must be tests as JSON, not {truth[:80]!r}") from None
    if isinstance(truth, list):
        truth = {"asserts": truth}
    if not isinstance(truth, dict) or not ({"inputs", "outputs"} <= set(truth) or "asserts" in truth):
        raise ValueError(f"the ground_truth of code needs inputs and outputs, or asserts, not {str(truth)[:80]!r}")
    if "asserts" in truth:
        tests = _checked(map(_assert, truth["asserts"]))
    elif len(truth["inputs"]) != len(truth["outputs"]):
        raise ValueError(f"ground_truth has {len(truth['inputs'])} inputs and {len(truth['outputs'])} outputs")
    elif truth.get("fn_name"):
        tests = _checked(map(partial(_call, truth["fn_name"]), truth["inputs"], truth["outputs"]))
    else:
        tests = CodeTests(pairs=[*zip(map(_joined, truth["inputs"]), map(_joined, truth["outputs"]))])
    if not len(tests):
        raise ValueError("ground_truth of a code problem has no tests: every program would pass")
    return tests


def _joined(text: object) -> str:
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)


def _checked(cases: Iterable[tuple[Check, object]]) -> CodeTests:
    pairs = list(cases)
    return CodeTests(checks=[check for check, _ in pairs], expected=[wanted for _, wanted in pairs])


def _call(name: str, given: object, wanted: object) -> tuple[Check, object]:
    """Return (check, expected value) of a call of the function `name`. `given` is a list of arguments and `wanted` the
    value, or `given` is a text with one argument in JSON per line, and `wanted` is JSON."""
    if not isinstance(given, str):
        return {"call": name, "arguments": list(given)}, wanted
    try:
        return {"call": name, "arguments": [json.loads(line) for line in given.split("\n")]}, json.loads(wanted)
    except (ValueError, TypeError):
        raise ValueError(
            f"ground_truth has the arguments {given[:80]!r} and the value {str(wanted)[:80]!r}: as texts, each line must be JSON"
        ) from None


def _assert(statement: str) -> tuple[Check, object]:
    """Return (check, expected value) of a statement. If it is `assert EXPRESSION == LITERAL`, the value is compared
    outside the sandbox; for any other statement, the expected value is None."""
    try:
        [node] = ast.parse(statement).body
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise ValueError(
            f"ground_truth has the assert {str(statement)[:200]!r}, which is not one Python statement"
        ) from None
    test = node.test if isinstance(node, ast.Assert) else None
    if isinstance(test, ast.Compare) and [type(op) for op in test.ops] == [ast.Eq]:
        with suppress(ValueError, TypeError, RecursionError):
            return {"expression": ast.unparse(test.left)}, ast.literal_eval(test.comparators[0])
    return {"statement": statement}, None


_FILE_ERROR = re.compile(r"^\w+Error: \[Errno (1|2|13|30)\] [^:\n]*: '([^'\n]*)'")
_READ_ONLY = "30"  # EROFS: all folders except the program's are read-only
_NO_PROCESS = re.compile(r"^(?:BlockingIOError: \[Errno 11\]|RuntimeError: can't start new thread)", re.MULTILINE)


class CodeVerifyWorker(VerifierBase):
    """A verifier that runs the tests in `ground_truth` (see `parse_tests`) on a program, the whole response. Only the
    sandbox compiles it, because a few lines can make a compiler use gigabytes.

    The score is 1 if all tests pass, otherwise 0, or with `reward="fraction"` the fraction of tests that pass. The
    answer is the result, possibly with a detail after a colon: passed, wrong_answer, runtime_error, syntax_error,
    no_code, time_limit, memory_limit, process_limit, output_limit, forbidden_call, or file_access (outside the
    program's folder)."""

    caught = ()  # errors in the sandbox raise nothing here, so an exception is a usage error

    def judge(
        self, response: str, ground_truth: object, limits: dict[str, float] | None = None, total_time_s: float = 20.0, reward: str = "all"
    ) -> Verdict:  # fmt: skip
        if not response.strip():
            return 0.0, "no_code"
        try:
            tests = parse_tests(ground_truth)
        except ValueError as error:
            raise VerifierUseError(str(error)) from None
        if "\0" in response:
            return 0.0, "syntax_error"
        allowed, end = Limits(**(limits or {})), time.monotonic() + total_time_s

        def runner(program: str, stdin: str = "", files: dict[str, bytes] | None = None) -> Outcome:
            left = end - time.monotonic()
            if left <= 0:
                return Outcome(stopped="time_limit", detail=f"{total_time_s:g} s for all tests")
            return run_program(program, stdin, allowed, files)

        result = tests.run(response, runner)
        if result.passed == result.count:
            return 1.0, "passed"
        return (result.passed / result.count if reward == "fraction" else 0.0), reason_of(result, allowed)


def reason_of(result: TestResult, limits: Limits) -> str:
    """Return why tests of a run with these `limits` failed, such as "memory_limit: 512 MB"."""
    outcome = result.outcome
    assert outcome is not None
    errors = outcome.stderr.decode(errors="replace")
    refused = _NO_PROCESS.search(errors) or _NO_PROCESS.search(result.detail)
    if refused and outcome.stopped in (None, "time_limit"):
        return f"process_limit: one process, {limits.threads} threads"
    if outcome.stopped is not None:
        return f"{outcome.stopped}: {outcome.detail}" if outcome.detail else outcome.stopped
    last = result.detail or errors.rstrip().rpartition("\n")[2]
    if last.startswith("MemoryError") or "No space left on device" in last:
        return f"memory_limit: {limits.memory_mb} MB"
    if found := _FILE_ERROR.match(last):
        path = os.path.normpath(os.path.join(BOX, found[2]))
        if found[1] == _READ_ONLY or not f"{path}/".startswith(f"{BOX}/"):
            return f"file_access: {found[2][:100]}"
    if uncompiled(outcome):
        return "syntax_error"
    if outcome.exit_code in (-9, -24):  # SIGKILL, SIGXCPU: sent by the kernel at a limit, or by the program
        return f"time_limit: ended by signal {-outcome.exit_code}"
    if outcome.exit_code != 0 or result.detail:
        return f"runtime_error: {last[:200]}" if last else f"runtime_error: exit code {outcome.exit_code}"
    return f"wrong_answer: {result.passed} of {result.count} tests passed"
