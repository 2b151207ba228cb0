"""docs/configuration.md says what the schema says, docs/command-line.md what the commands' own help says."""

import sys

import pytest
from documents.snippets import ROOT

sys.path.insert(0, str(ROOT / "docs" / "site"))
import command_line  # noqa: E402
import configuration_pages  # noqa: E402


@pytest.mark.parametrize(
    "tool, page", [(command_line, command_line.page), (configuration_pages, configuration_pages.document)]
)
def test_generated_documentation_page_equals_the_output_of_its_generator(monkeypatch, tool, page):
    monkeypatch.setenv("COLUMNS", "40")  # of the terminal: makes no difference
    assert tool.PAGE.read_text() == page(), f"run: python docs/site/{tool.__name__}.py --write"
