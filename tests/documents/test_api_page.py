"""The page of the API reference has every public name with its docstring."""

import re
import sys

import nemo_rl_cpp
from documents.snippets import ROOT

sys.path.insert(0, str(ROOT / "docs" / "site"))
import api  # noqa: E402


def test_public_names_are_there():
    page = api.page()
    listed = set(re.findall(r"\{py:(?:class|function)\} ([\w.]+)", page))
    missing = {name for name in nemo_rl_cpp.__all__ if name != "__version__"} - {n.rpartition(".")[2] for n in listed}
    assert missing == set()
    for name in ("algorithms.loss.ClippedPGLossFn", "environments.interfaces.EnvironmentInterface"):
        assert f"nemo_rl_cpp.{name}" in listed


def test_sections_of_a_docstring_become_lists():
    text = """Adds *two* <numbers> of `a * b`.

    The formula:
        c = a * b

    Args:
        a, b: what is
            added.
        rest: {x}

    Raises:
        ValueError: never.
    """
    assert api.markdown(text).splitlines() == [
        "Adds \\*two\\* \\<numbers> of `a * b`.", "", "The formula:", "", "    c = a * b", "", "", "**Arguments**", "",
        "- `a, b`: what is", "  added.", "- `rest`: \\{x}", "", "", "**Raises**", "", "- `ValueError`: never.",
    ]  # fmt: skip


def test_defaults_are_readable():
    def function(a, b=3, *, c=object(), d="x" * 80):  # noqa: B008
        """Does nothing."""

    assert api.signature_of(function) == "(a, b=3, *, c=..., d=...)"
