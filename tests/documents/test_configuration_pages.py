"""docs/configuration.md says what the schema says."""

import sys

from documents.snippets import ROOT

sys.path.insert(0, str(ROOT / "docs" / "site"))
import configuration_pages  # noqa: E402


def test_the_page_is_current():
    expected = configuration_pages.document()
    assert configuration_pages.PAGE.read_text() == expected, "run: python docs/site/configuration_pages.py --write"


def test_the_keys_to_change_first_do_something():
    page = configuration_pages.document()
    assert len(configuration_pages.FIRST) == 15
    for key in {key for key, _ in configuration_pages.FIRST} | {key for _, key, _ in configuration_pages.SYMPTOMS}:
        section, _, name = key.rpartition(".")
        rows = page.partition(f"### `{section}`\n")[2].partition("\n### ")[0]
        assert f"| `{name}` |" in rows or f"### `{key}`\n" in page, key
