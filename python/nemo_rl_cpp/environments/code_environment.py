"""An environment for coding tasks, which tests the model's programs in a sandbox."""

import re
from collections import Counter
from textwrap import dedent
from typing import NotRequired, TypedDict

from nemo_rl_cpp.config.base import as_model
from nemo_rl_cpp.config.env import CodeEnvConfig, VerifierPoolConfig
from nemo_rl_cpp.data.interfaces import LLMMessageLogType
from nemo_rl_cpp.environments.code_verifier import CodeVerifyWorker, parse_tests
from nemo_rl_cpp.environments.interfaces import EnvironmentReturn
from nemo_rl_cpp.environments.sandbox import Limits
from nemo_rl_cpp.environments.sandbox.check import require_sandbox
from nemo_rl_cpp.environments.single_turn import VerifyingEnvironment, assistant_text

# the language may be followed by attributes, such as a file name
_FENCED = re.compile(r"```([\w+#.-]*+)(?:(?<!`)[^\n`]*+|[^\S\n]*+)\n(.*?)(?:```|\Z)", re.DOTALL)
_PYTHON = ("python", "python3", "py")


class CodeEnvMetadata(TypedDict):
    """The entries of a sample's metadata that the code environment reads."""

    ground_truth: object  # the tests, see `code_verifier.parse_tests`
    # the beginning of the program, which the response continues. Without it, the response contains the whole program,
    # with or without a fenced block.
    code_prefix: NotRequired[str]


class CodeEnvironment(VerifyingEnvironment[CodeEnvMetadata]):
    """An environment that runs each response's program in a sandbox (see `docs/guides/environments.md`) and gives a
    reward by the tests that the program passes. Programs run after generation has ended, because they would slow
    generation down. The constructor raises SandboxUnavailableError if this machine cannot isolate programs. Metrics:
    those of `VerifyingEnvironment`, and `num_<reason>`, the number of programs that failed for this reason (see
    `CodeVerifyWorker`). The field `answers` of a result has the outcome of each program, such as `passed`."""

    def __init__(self, cfg: CodeEnvConfig | None = None) -> None:
        cfg = as_model(cfg or {}, CodeEnvConfig, "env.code")
        self._limits = Limits(cfg.time_limit_s, cfg.memory_mb, cfg.max_processes, cfg.max_output_kb, cfg.folder_mb)
        self._total_time_s, self._reward = cfg.total_time_limit_s, cfg.reward
        require_sandbox()
        self._reasons: Counter[str] = Counter()
        pool = VerifierPoolConfig(
            num_workers=cfg.num_workers,
            # the worker enforces the time limit; the deadline is for a worker that hangs
            verifier_deadline_s=self._total_time_s + self._limits.time_s + 30,
            verifier_memory_mb=None,
            max_answer_chars=cfg.max_answer_chars,
        )
        super().__init__(CodeVerifyWorker, pool)

    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[CodeEnvMetadata]
    ) -> EnvironmentReturn[CodeEnvMetadata]:
        programs = []
        for log, info in zip(message_log_batch, metadata):
            parse_tests(info["ground_truth"])  # errors in the data are raised in the caller's process
            prefix, response = info.get("code_prefix"), assistant_text(log)
            programs.append(extract_code(response) if prefix is None else prefix + response)
        truths = [info["ground_truth"] for info in metadata]
        settings = {"limits": vars(self._limits), "total_time_s": self._total_time_s, "reward": self._reward}
        verdicts = self._verify(programs, truths, **settings)
        self._reasons.update(reason.partition(":")[0] for reason in verdicts.answers if reason is not None)
        return self._finish(verdicts.scores, metadata, answers=verdicts.answers)

    def pop_metrics(self) -> dict[str, float]:
        metrics = super().pop_metrics()
        metrics |= {f"num_{reason}": count for reason, count in sorted(self._reasons.items()) if reason != "passed"}
        self._reasons.clear()
        return metrics


def extract_code(response: str) -> str:
    """Return the program in a response: its last fenced block marked as Python, otherwise its last fenced block without
    a language, otherwise the whole response. A block that is indented, in a list, loses its indentation."""
    blocks = [(language.lower(), code) for language, code in _FENCED.findall(response)]
    for languages in (_PYTHON, ("",)):
        if found := [code for language, code in blocks if language in languages]:
            return dedent(found[-1])
    return response
