"""Every relative link and anchor of the documents leads somewhere, where a forge shows them (docs/site/build.py checks the site's)."""

import re
from pathlib import Path

from documents.snippets import documents

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


def test_every_relative_link_and_anchor_in_the_documents_points_to_an_existing_target():
    assert [wrong for path in documents() for wrong in broken(path, path.read_text())] == []
