"""Right or wrong for a program: its tests run in a sandbox. Lives in worker processes, so no torch here."""

import os
import re
import time

from nemo_rl_cpp.environments.code_tests import TestResult, parse_tests, uncompiled
from nemo_rl_cpp.environments.sandbox import Limits, Outcome, run_program
from nemo_rl_cpp.environments.sandbox.files import BOX
from nemo_rl_cpp.environments.verifiers import Verdict, VerifierBase, VerifierUseError

_FILE_ERROR = re.compile(r"^\w+Error: \[Errno (1|2|13|30)\] [^:\n]*: '([^'\n]*)'")
_READ_ONLY = "30"  # everything but the program's folder is
_NO_PROCESS = re.compile(r"^(?:BlockingIOError: \[Errno 11\]|RuntimeError: can't start new thread)", re.MULTILINE)


class CodeVerifyWorker(VerifierBase):
    """Runs the tests of `ground_truth` (see `parse_tests`) on a program, which is the response as it stands.

    Nothing here compiles the program: a few lines can make a compiler take gigabytes, so that, too, happens in the sandbox.

    The score is 1 when all pass, else 0 (with `reward="fraction"`: the share that passes). What is returned as the answer is
    how the tests ended, with a detail after a colon: passed, wrong_answer, runtime_error, syntax_error, no_code, time_limit,
    memory_limit, process_limit, output_limit, forbidden_call, or file_access, which is a failure at a file outside its folder.
    """

    caught = ()  # what goes wrong inside the sandbox never comes up here; what does is a mistake in the use

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
    """Why tests failed, from how the run ended and from what it wrote to standard error."""
    outcome = result.outcome
    assert outcome is not None
    errors = outcome.stderr.decode(errors="replace")
    refused = _NO_PROCESS.search(errors) or _NO_PROCESS.search(result.detail)
    crowded = outcome.stopped == "time_limit" and outcome.most_threads >= limits.threads
    if crowded or (refused and outcome.stopped in (None, "time_limit")):
        return f"process_limit: one process, {limits.threads} threads"
    if outcome.stopped is not None:
        return f"{outcome.stopped}: {outcome.detail}"
    last = result.detail or errors.rstrip().rpartition("\n")[2]
    if last.startswith("MemoryError") or "No space left on device" in last:
        return f"memory_limit: {limits.memory_mb} MB"
    if (found := _FILE_ERROR.match(last)) and (found[1] == _READ_ONLY or _outside(found[2])):
        return f"file_access: {found[2][:100]}"
    if uncompiled(outcome):
        return "syntax_error"
    if outcome.exit_code in (-9, -24):  # SIGKILL, SIGXCPU: of the kernel's limit, or of the program itself
        return f"time_limit: ended by signal {-outcome.exit_code}"
    if outcome.exit_code != 0 or result.detail:
        return f"runtime_error: {last[:200]}" if last else f"runtime_error: exit code {outcome.exit_code}"
    return f"wrong_answer: {result.passed} of {result.count} tests passed"


def _outside(path: str) -> bool:
    whole = os.path.normpath(os.path.join(BOX, path))
    return whole != BOX and not whole.startswith(BOX + "/")
