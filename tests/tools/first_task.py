"""Walks docs/guides/your-data-your-reward.md as a newcomer: in an empty folder, with an installed package, by the guide's commands alone.

    python tests/tools/first_task.py                       the guide as it stands: SmolLM2, some minutes
    python tests/tools/first_task.py --tiny                the same commands with a model of random weights: seconds
    python tests/tools/first_task.py --bin VENV/bin        with the package of another environment (a wheel, say)

Each command is printed with its seconds and its last lines. `--installed` refuses a package that lies in a source tree. The exit status
is the number of expectations that failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "your-data-your-reward.md"
LARGEST_REPORT = 400_000
TINY = [
    "policy.model_name=tiny-random", "policy.precision=float32", "grpo.max_num_steps=2", "grpo.num_prompts_per_step=2", "grpo.val_period=0",
    "++policy.hf_config_overrides={vocab_size: 16, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 4, max_position_embeddings: 256}",
]  # fmt: skip
"""What makes a run of the guide one of seconds."""
_MARKED = re.compile(r"<!-- (run|check|file)(?::.*?)? -->\n```(\w+)\n(.*?)```", re.DOTALL)


class Walk:
    """The walk through one guide: its folder, its commands, and what was not as expected."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder, self.failed = folder, 0
        self.environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        self.environment |= {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "160"}

    def run(self, words: Sequence[str]) -> str:
        """Runs a command in the folder and says how it went; what it printed."""
        begin = time.monotonic()
        done = subprocess.run(
            words, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        shown = " ".join(word if len(word) < 60 else f"{word[:57]}..." for word in map(shlex.quote, words))
        print(f"$ {shown}\n  status {done.returncode}, {time.monotonic() - begin:.1f} s")
        for line in done.stdout.splitlines()[-4:]:
            print(f"  | {line[:150]}")
        self.expect(done.returncode == 0, "the command succeeds")
        return done.stdout

    def expect(self, holds: bool, what: str) -> None:
        """Counts what does not hold, and says so."""
        if not holds:
            self.failed += 1
            print(f"  NOT AS EXPECTED: {what}")


def commands(kind: str) -> list[list[str]]:
    """The words of each command of the guide's bash blocks of a kind."""
    blocks = [
        text for found, language, text in _MARKED.findall(GUIDE.read_text()) if (found, language) == (kind, "bash")
    ]
    return [words for block in blocks for line in block.splitlines() if (words := shlex.split(line, comments=True))]


def write_files(folder: Path) -> None:
    """The guide's files; each begins with its name as a comment."""
    for kind, _, text in _MARKED.findall(GUIDE.read_text()):
        if kind == "file":
            name, _, rest = text.partition("\n")
            (folder / name.removeprefix("# ")).write_text(rest)


def accuracies(printed: str) -> list[float]:
    """The means of the validations that a run printed."""
    return [float(number) for number in re.findall(r"validation after step \d+: \w+ ([\d.]+)", printed)]


def walk(folder: Path, programs: Path, tiny: bool, installed: bool) -> int:
    """All of it; the number of expectations that failed."""
    way = Walk(folder, programs)
    place = way.run(["python", "-c", "import nemo_rl_cpp; print(nemo_rl_cpp.__file__)"]).strip()
    way.expect(not installed or "site-packages" in place, "the package is an installed one")
    write_files(folder)
    for words in commands("run"):
        way.run(words)
    for words in commands("check"):
        if (
            words[:2] == ["nemo-rl-cpp", "train"] and "grpo_jsonl.yaml" in words
        ):  # the same run again, without a file of one's own
            words = ["nemo-rl-cpp", "check", *words[2:]]
        trains = words[:2] == ["nemo-rl-cpp", "train"]
        printed = way.run([*words, *TINY] if tiny and trains else words)
        if trains and not tiny:
            means = accuracies(printed)
            way.expect(len(means) > 1 and means[-1] > means[0], f"the validation's mean rises: {means}")
    way.run(["nemo-rl-cpp", "train", "--config", "parts.yaml", *(["grpo.max_num_steps=2"] if tiny else [])])
    report = folder / "logs" / "words" / "exp_001" / "report.html"
    size = report.stat().st_size if report.exists() else 0
    print(f"report.html: {size / 1000:.0f} kB")
    way.expect(0 < size <= LARGEST_REPORT, f"{report} has at most {LARGEST_REPORT / 1000:.0f} kB")
    return way.failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--bin", type=Path, default=Path(sys.executable).parent, help="folder with python and nemo-rl-cpp"
    )
    parser.add_argument("--folder", type=Path, help="an empty folder to work in (default: a temporary one)")
    parser.add_argument("--tiny", action="store_true", help="with a tiny model of random weights")
    parser.add_argument("--installed", action="store_true", help="the package must not be that of a source tree")
    given = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="first_task_") as scratch:
        folder = given.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        failed = walk(folder.resolve(), given.bin.absolute(), given.tiny, given.installed)
    print(f"{time.monotonic() - begin:.0f} s, {failed} not as expected")
    return failed


if __name__ == "__main__":
    sys.exit(main())
