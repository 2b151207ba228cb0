"""The tests that docs/troubleshooting.md names are there."""

import re

from documents.snippets import ROOT


def test_every_test_named_on_the_troubleshooting_page_exists():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    assert len(named) > 10
    gone = [f"{file}::{test}" for file, test in named if not re.search(rf"def {test}\(", (ROOT / file).read_text())]
    assert gone == []
