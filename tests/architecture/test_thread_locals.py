"""No call of an op hands another one anything through a thread: what a thread keeps in csrc/ops is memory that is used again, never
a value. What a call needs is an argument."""

import re
from pathlib import Path

OPS = Path(__file__).resolve().parents[2] / "csrc" / "ops"
MEMORY = re.compile(
    r"(static )?thread_local (runtime::ScratchMemory|std::vector<[\w:]+>|runtime::UploadedArray<\w+(::\w+)?>) \w+;"
)


def kept(text: str) -> list[str]:
    """The declarations of what a thread keeps."""
    return [line.strip() for line in text.splitlines() if "thread_local" in line]


def test_thread_local_variables_in_ops_hold_only_scratch_memory():
    found = [line for path in sorted(OPS.iterdir()) for line in kept(path.read_text())]
    assert [line for line in found if not MEMORY.fullmatch(line)] == []
    assert found, "csrc/ops keeps nothing any more: this test can go"
