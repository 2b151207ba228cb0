"""Builds the documents as a site with Sphinx, warnings as errors, and checks every link and anchor of it.

uv run --group docs python docs/site/build.py          -> build/site/html/index.html
"""

import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import api
from stage import ROOT, stage

FOLDER = ROOT / "build" / "site"


class _Page(HTMLParser):
    """Ids, links, and addresses that a browser loads by itself, of one page."""

    def __init__(self, text: str):
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = {name: value for name, value in attrs if value}
        self.ids |= {of[name] for name in ("id", "name") if name in of}
        if tag == "a" and "href" in of:
            self.links.append(of["href"])
        elif tag == "link" and of.get("rel") == "stylesheet" and "href" in of:
            self.loaded.append(of["href"])
        elif tag in ("img", "script", "source", "iframe") and "src" in of:
            self.loaded.append(of["src"])


def broken_links(folder: Path) -> list[str]:
    """What is wrong with the links of a built site: a file or an anchor that is not there, or something loaded from elsewhere."""
    pages = {path.resolve(): _Page(path.read_text()) for path in sorted(folder.rglob("*.html"))}
    wrong = []
    for path, page in pages.items():
        name = path.relative_to(folder.resolve())
        wrong += [f"{name}: loads {address} from elsewhere" for address in page.loaded if urlsplit(address).scheme]
        for address in [*page.links, *page.loaded]:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                wrong.append(f"{name}: {address} leads to no file")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                wrong.append(f"{name}: {address} leads to no heading")
    return sorted(set(wrong))


def main() -> int:
    """Builds and checks; returns the exit status."""
    from sphinx.cmd.build import build_main

    begin = time.perf_counter()
    stage(FOLDER / "source", {"api": api.page()})
    conf, html = str(Path(__file__).parent), FOLDER / "html"
    options = ["-q", "-E", "-W", "--keep-going", "-j", "2", "-c", conf, "-d", str(FOLDER / "doctrees")]
    if status := build_main([*options, str(FOLDER / "source"), str(html)]):
        return status
    if wrong := broken_links(html):
        print("\n".join(wrong), file=sys.stderr)
        return 1
    pages = len(list(html.rglob("*.html")))
    print(f"{html / 'index.html'}: {pages} pages, every link leads somewhere ({time.perf_counter() - begin:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
