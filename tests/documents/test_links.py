"""Every relative link and anchor of the documents leads somewhere, where a forge shows them (docs/site/build.py checks the site's)."""

import re
import sys
from pathlib import Path

import pytest
from documents.snippets import ROOT, documents

sys.path.insert(0, str(ROOT / "docs" / "site"))
import stage  # noqa: E402

from build import broken_links  # noqa: E402

LINK = re.compile(r"\]\(([^)\s]+)\)")


def without_fences(text):
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)


def anchors(text):
    """The ids that a forge gives to the headings of a document."""
    found: list[str] = []
    for heading in re.findall(r"^#+ +(.+?) *$", without_fences(text), re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.append(f"{slug}-{same}" if (same := sum(f == slug for f in found)) else slug)
    return {*found, *re.findall(r'<a (?:id|name)="([^"]+)"', text)}


def broken(path: Path, text: str) -> list[str]:
    wrong = []
    for link in LINK.findall(without_fences(text)):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists():
            wrong.append(f"{path.name}: {link} leads to no file")
        elif anchor and anchor not in anchors(text if target == path else target.read_text()):
            wrong.append(f"{path.name}: {link} leads to no heading")
    return wrong


def test_links_lead_somewhere():
    assert [wrong for path in documents() for wrong in broken(path, path.read_text())] == []


def test_a_broken_link_is_found(tmp_path):
    path = tmp_path / "a.md"
    path.write_text("# One `two`\n")
    assert broken(path, path.read_text() + "[x](#one-two) [y](a.md#one-two) [z](https://elsewhere)") == []
    assert broken(path, "# One\n[x](#two) [y](b.md)") == [
        "a.md: #two leads to no heading",
        "a.md: b.md leads to no file",
    ]


@pytest.mark.parametrize(
    "document, link, moved",
    [
        ("README.md", "docs/cluster.md#ray", "cluster.md#ray"),
        ("README.md", "LICENSE", "files/LICENSE"),
        ("docs/README.md", "../configs/README.md", "configurations.md"),
        ("docs/guides/grpo.md", "../../CONTRIBUTING.md#a-data-set", "../contributing.md#a-data-set"),
        ("docs/guides/grpo.md", "images/a.svg", "images/a.svg"),
        ("README.md", "docs/images/report.png", "images/report.png"),
        ("configs/README.md", "../docs/configuration.md", "configuration.md"),
        ("README.md", "https://docs.astral.sh/uv/", "https://docs.astral.sh/uv/"),
    ],
)
def test_links_are_bent_to_the_site(document, link, moved):
    assert stage.page_text(document, f"see [x]({link}).\n")[0] == f"see [x]({moved}).\n"


def test_code_is_not_bent():
    text = "```text\n[x](docs/a.md)\n```\n"
    assert stage.page_text("README.md", text) == (text, set())


def test_every_page_stands_in_the_sidebar():
    pages = {stage.page_of(document).removesuffix(".md") for document in stage.documents()} | {"api"}
    listed = [page for group in stage.NAVIGATION.values() for page in group]
    assert len(set(listed)) == len(listed)
    shown = stage.toctrees(pages | {"zz/new"})
    assert [page for page in pages - {"index"} if f"\n{page}\n" not in shown] == []
    assert "zz/new" in shown.partition(":caption: More\n")[2]
    assert "nowhere" not in stage.toctrees({"start"}) and "installation" not in stage.toctrees({"start"})


def test_what_is_wrong_with_a_built_site_is_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<h1 id="top">A</h1><a href="b.html#x">b</a><a href="#top">up</a><img src="gone.png">'
    )
    (tmp_path / "b.html").write_text('<p id="y"></p><script src="https://elsewhere/x.js"></script>')
    assert broken_links(tmp_path) == [
        "a.html: b.html#x leads to no heading",
        "a.html: gone.png leads to no file",
        "b.html: loads https://elsewhere/x.js from elsewhere",
    ]
