"""docs/configuration.md and docs/configuration-without-effect.md say what the schema says."""

import sys

import pytest
from documents.snippets import ROOT

sys.path.insert(0, str(ROOT / "docs" / "site"))
import configuration_pages  # noqa: E402


@pytest.mark.parametrize("path", configuration_pages.PAGES, ids=lambda path: path.stem)
def test_the_pages_about_configuration_are_current(path):
    expected = configuration_pages.PAGES[path]()
    assert path.read_text() == expected, "run: python docs/site/configuration_pages.py --write"


def test_the_keys_to_change_first_do_something():
    page = configuration_pages.document()
    assert len(configuration_pages.FIRST) == 15
    for key in {key for key, _ in configuration_pages.FIRST} | {key for _, key, _ in configuration_pages.SYMPTOMS}:
        section, _, name = key.rpartition(".")
        rows = page.partition(f"### `{section}`\n")[2].partition("\n### ")[0]
        assert f"| `{name}` |" in rows or f"### `{key}`\n" in page, key
