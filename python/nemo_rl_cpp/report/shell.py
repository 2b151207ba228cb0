"""The frame of every page: one HTML text without any reference outside itself."""

import re
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from nemo_rl_cpp.files.yaml_text import Plain
from nemo_rl_cpp.report.chart_data import packed

_HERE = Path(__file__).parent
_SCRIPTS = ("base", "chart", "export", "metrics", "samples", "page")


class PageSection(NamedTuple):
    """A section: its id, its heading and its HTML."""

    key: str
    title: str
    content: str


def document(
    title: str, header: str, sections: Sequence[PageSection], data: Mapping[str, Plain], status: str = "finished", footer: str = "",
    now: float | None = None, scripts: Sequence[str] = _SCRIPTS,
) -> str:  # fmt: skip
    """The page. `data`: what the scripts read, by the id of its element; `now`: Unix time that it says it was written at; `scripts`:
    which of the page's scripts it has."""
    written = int(now if now is not None else time.time())
    style, code = (Markup("".join(map(_asset, names))) for names in (["page.css"], [f"{name}.js" for name in scripts]))
    shown = [section for section in sections if section.content]
    blocks = {key: packed(value) for key, value in data.items()}
    return str(
        parts().document(title, Markup(header), shown, blocks, status, footer, written, utc(written), style, code)
    )


@cache
def parts() -> Any:
    """The macros of page.html: each gives a part of a page as HTML in which every text is escaped."""
    import jinja2  # which takes a fifth of a second to load

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )  # fmt: skip
    environment.filters["breakable"] = breakable
    return environment.get_template("page.html").module


def breakable(name: str) -> Markup:
    """A metric's or stage's name as HTML that may be broken behind its underscores, slashes and dots."""
    return Markup(re.sub(r"(?<=[_/.])(?=\w)", "<wbr>", str(escape(name))))


@cache
def _asset(name: str) -> str:
    """A file of this folder, read once: a package that is installed anew during a run does not mix two versions on a page."""
    return (_HERE / name).read_text(encoding="utf-8")


def utc(seconds: float) -> str:
    """A time as text."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def duration(seconds: float) -> str:
    """Text of a length of time: `1 h 02 min`, `5 min 31 s`, `12.3 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
